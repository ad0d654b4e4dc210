"""The words of the command line. Nothing here loads torch, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

DYNAMIC = ("auto", "none")
DTYPES = ("float64", "float32", "bfloat16", "float16")
KEEP = ("measured", "all")
PRESETS = ("exact", "fast", "compile")
ENGINES = ("torch", "eager", "onednn", "inductor", "onnxruntime", "openvino", "auto")

MODEL_HELP = """\
MODEL is one of
  package.module:factory   a model, or a function that makes one, in a module that Python can import from here
  folder                   of a transformers model; its config.json alone gives random weights
  file.pt2                 a program saved by torch.export.save
"""
EPILOG = """\
exit codes: 0 all went well, 1 a check failed, 2 the command, a file or the model cannot be used, and a line says why,
3 a fault of regraft or of a transformation of yours, and a traceback
"""


@dataclass(frozen=True)
class Command:
    """One subcommand: the module under `regraft.cli` that holds its function, and its help."""

    module: str
    help: str
    description: str


COMMANDS = {
    "optimize": Command(
        "optimizing",
        "rewrite a model, verify it, measure it, keep what pays",
        "Capture a model, apply transformations, verify the result against a float64 run, and keep what pays.",
    ),
    "explain": Command(
        "inspecting",
        "say what would be rewritten, and what not and why",
        "Say of every candidate site whether it would be rewritten, and if not why. Nothing is changed.",
    ),
    "verify": Command(
        "checking",
        "compare two models, or a model with its rewritten self",
        "Compare a candidate with a model by the error that the model itself has against a float64 run. "
        "Without a candidate, the transformations are applied and the result is compared.",
    ),
    "bisect": Command(
        "checking",
        "find the transformation and the site that broke a result",
        "Apply the transformations and find the one, and its site, that breaks the result. Exit code 1 if one does.",
    ),
    "bench": Command(
        "checking",
        "time a model against its rewritten self, in pairs",
        "Time two models in alternating pairs of blocks, and give the ratio with its 95 % interval.",
    ),
    "diff": Command(
        "inspecting",
        "show what changes in the graph, node by node",
        "Show the graph before and after as a unified diff.",
    ),
    "list": Command("describing", "list the transformations", "List the transformations, a line each."),
    "show": Command("describing", "describe one transformation", "Describe one transformation and its options."),
    "env": Command("describing", "tell versions and machine", "Tell the versions and the machine, for a bug report."),
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="regraft",
        description="Rewrite the graph of a PyTorch model, prove the result, and say what was done and what not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action=_Version, help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog=EPILOG if command.module == "describing" else f"{MODEL_HELP}\n{EPILOG}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _OWN_OPTIONS[name](sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
        sub.add_argument("--traceback", action="store_true", help="show the traceback of an error in full")
    return top


class _Version(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"regraft {version('regraft')}")
        except PackageNotFoundError:
            print("regraft, run from its source")
        parser.exit()


def _model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", metavar="MODEL", help="see below; may stand in the recipe instead")
    sub.add_argument(
        "--inputs",
        metavar="FILE",
        help="an example of the call: a .pt, .safetensors, .json or .npz file, or module:function; made from the model "
        "where it is left out",
    )
    sub.add_argument("--dtype", choices=DTYPES, help="convert the model and its inputs to this type first")
    sub.add_argument("--device", help="move the model and its inputs there first")
    sub.add_argument("--seed", type=int, help="of random weights and inputs (0)")
    sub.add_argument("--dynamic-shapes", choices=DYNAMIC, help="whether sizes may vary in the captured graph (auto)")
    sub.add_argument("--dry-run", action="store_true", help="say what would be done, and do not do it")


def _selection(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--recipe", metavar="FILE.toml", help="read transformations and settings from a file")
    sub.add_argument(
        "-t",
        "--transformation",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="apply this one; several in the order given, in the place of those of the recipe (see `regraft list`)",
    )
    sub.add_argument(
        "--preset",
        choices=PRESETS,
        help="what to try where no transformation is named (exact)",
    )


def _optimize(sub: argparse.ArgumentParser) -> None:
    _model(sub)
    _selection(sub)
    sub.add_argument("-o", "--output", metavar="FILE.pt2", help="save the result, and FILE.recipe.toml beside it")
    sub.add_argument("--report", metavar="FILE.html", help="write a report that people look at, in one file")
    sub.add_argument("--plots", metavar="FOLDER", help="write the report's plots as PNG files")
    sub.add_argument(
        "--engine",
        type=_engines,
        metavar="NAME[,NAME...]",
        help=f"what runs the rewritten graph: {', '.join(ENGINES)}; of several, as torch,openvino, the fastest one; "
        "auto is all that are installed (torch)",
    )
    sub.add_argument("--seconds", type=float, help="measure each step for about this long (0.5)")
    sub.add_argument("--keep", choices=KEEP, help="keep what was measured to be faster, or all of it (measured)")
    sub.add_argument("--no-verify", dest="verify", action="store_false", default=None, help="do not verify the result")


def fault_of_engines(names: str) -> str | None:
    """What is wrong with the engines that are named, as a sentence; None for nothing.

    Args:
        names: One name, or several with commas between them.
    """
    several = names.split(",")
    for name in several:
        if name not in ENGINES:
            return f"there is no {name!r} (choose from {', '.join(ENGINES)}, or several, as torch,openvino)"
        if name in ("eager", "auto") and len(several) > 1:
            return f"{name!r} stands by itself, and not in {names!r}"
    return None


def _engines(names: str) -> str:
    fault = fault_of_engines(names)
    if fault is not None:
        raise argparse.ArgumentTypeError(fault)
    return names


def _explain(sub: argparse.ArgumentParser) -> None:
    _model(sub)
    _selection(sub)


def _candidate(sub: argparse.ArgumentParser) -> None:
    _model(sub)
    sub.add_argument("candidate", nargs="?", metavar="CANDIDATE", help="a second model, in place of transformations")
    _selection(sub)


def _verify(sub: argparse.ArgumentParser) -> None:
    _candidate(sub)
    sub.add_argument("--rtol", type=float, help="allow |C - R| <= atol + rtol |R| in the place of the float64 measure")
    sub.add_argument("--atol", type=float, help="see --rtol")


def _bisect(sub: argparse.ArgumentParser) -> None:
    _model(sub)
    _selection(sub)
    sub.add_argument("--rtol", type=float, help="as in `regraft verify`")
    sub.add_argument("--atol", type=float, help="as in `regraft verify`")
    sub.add_argument("--script", metavar="FILE.py", help="write a script that reproduces what was found")


def _bench(sub: argparse.ArgumentParser) -> None:
    _candidate(sub)
    sub.add_argument("--seconds", type=float, help="measure for at least this long (1)")
    sub.add_argument(
        "--max-ratio",
        type=float,
        metavar="R",
        help="exit with 1 unless all of the ratio's interval is at most R",
    )


def _show(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", metavar="NAME", help="of a transformation, as `regraft list` prints it")


def _nothing(sub: argparse.ArgumentParser) -> None:
    pass


_OWN_OPTIONS = {
    "optimize": _optimize,
    "explain": _explain,
    "verify": _verify,
    "bisect": _bisect,
    "bench": _bench,
    "diff": _candidate,
    "list": _nothing,
    "show": _show,
    "env": _nothing,
}
