"""Plants one bug at a time in the conditions and formulas of the rules, and counts how many the tests catch.

    python tests/mutation/run.py                      every mutant
    python tests/mutation/run.py --only _batch_norm   those of one file
    python tests/mutation/run.py --sample 8           a few, the same ones each time
    python tests/mutation/run.py --list               what would be planted

A mutant is a module with one change in its syntax tree. It is imported, in place of the real one, by a fork of this
process, which has torch loaded already and runs the tests that the module has until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regraft"
SECONDS = 240

RULES = sorted(p for p in (SOURCE / "transformations").glob("*.py") if p.name != "__init__.py")
ORACLE = [SOURCE / "core" / name for name in ("query.py", "plainness.py", "strides.py", "flow.py", "values.py")]
FORMULAS = [*RULES, SOURCE / "core" / "weights.py"]

SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SWAPPED |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
SWAPPED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
SWAPPED |= {ast.And: ast.Or, ast.Or: ast.And}


Change = tuple[ast.AST, str, Callable[[ast.AST], None]]
"""Where, what, and how it is done to a node."""


@dataclass(frozen=True)
class Mutant:
    """One bug: where, what, and how it comes into the syntax tree."""

    path: Path
    line: int
    what: str
    changes: Callable[[ast.AST], Iterator[Change]]
    position: int
    number: int

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT / "src").with_suffix("").parts)

    @property
    def source(self) -> str:
        """The whole module with the bug in it."""
        tree = ast.parse(self.path.read_text())
        target = list(ast.walk(tree))[self.position]
        list(self.changes(target))[self.number][2](target)
        return ast.unparse(ast.fix_missing_locations(tree))

    def __str__(self) -> str:
        return f"{self.path.relative_to(SOURCE)}:{self.line} {self.what}"


def mutants(only: str = "") -> Iterator[Mutant]:
    """All of them, of the files whose path has one of the parts `only` (with commas) in it."""
    for paths, changes in ((FORMULAS, conditions_and_formulas), (ORACLE, questions)):
        for path in paths:
            if not any(part in str(path) for part in only.split(",")):
                continue
            for position, node in enumerate(ast.walk(ast.parse(path.read_text()))):
                for number, (at, what, _) in enumerate(changes(node)):
                    yield Mutant(path, getattr(at, "lineno", 0), what, changes, position, number)


def questions(node: ast.AST) -> Iterator[Change]:
    """A question that always answers that all is well."""
    returns = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns is not None else ""
    if returns in ("Answer", "str | None") and node.name not in ("that", "require"):
        yield node, f"{node.name}() answers None", lambda n: setattr(n, "body", [ast.Return(ast.Constant(None))])


def conditions_and_formulas(node: ast.AST) -> Iterator[Change]:
    """A condition left out; an operator, an axis, an operand or a branch that is another."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
        for index, argument in enumerate(node.args):
            yield argument, f"without require({short(argument)})", lambda n, i=index: n.args.pop(i)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        other = SWAPPED[type(node.op)]
        yield node, f"{short(node)}: {other.__name__}", lambda n: setattr(n, "op", other())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        other = SWAPPED[type(node.ops[0])]
        yield node, f"{short(node)}: {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"{short(node)}: without not", without_not
    elif isinstance(node, ast.IfExp):
        yield node, f"{short(node)}: branches swapped", swap_branches
    elif isinstance(node, ast.Call):
        for index, argument in enumerate(node.args):
            if isinstance(argument, ast.Constant) and type(argument.value) is int:
                yield node, f"{short(node)}: {argument.value + 1}", lambda n, i=index: next_number(n.args[i])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "rsqrt":
            yield node, f"{short(node)}: sqrt", lambda n: setattr(n.func, "attr", "sqrt")


def without_not(node: ast.AST) -> None:
    node.op, node.operand = ast.UAdd(), ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])


def next_number(node: ast.AST) -> None:
    node.value += 1


def swap_branches(node: ast.AST) -> None:
    node.body, node.orelse = node.orelse, node.body


def short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) < 60 else f"{text[:57]}..."


def tests_of(path: Path) -> list[str]:
    """The tests of a module: those of its own rule first, and the laws; every rule's for what all rules share."""
    here, stem = ROOT / "tests", path.stem.lstrip("_")
    own = [str(p) for p in sorted((here / "transformations").glob(f"test_*{stem}*.py"))]
    rest = [str(p) for p in sorted((here / "transformations").glob("test_*.py")) if str(p) not in own]
    if path.parent.name == "transformations" and own:
        rest = []
    shared = [str(here / "core" / "test_checkpoint.py")] if path.name in ("weights.py", "_batch_norm.py") else []
    return [*own, *rest, *shared, str(here / "mutation" / "test_survivors.py")]


def run(
    mutant: Mutant | None, tests: list[str], left_out: tuple[str, ...] = (), fast: bool = False
) -> tuple[bool, str]:
    """Run tests in a fork; whether they all passed, and which failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os._exit(in_child(mutant, tests, left_out, fast, write))
    os.close(write)
    deadline, status = time.monotonic() + SECONDS, None
    while status is None and time.monotonic() < deadline:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid else time.sleep(0.02)
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        failed = pipe.read()
    return status == 0, failed if status is not None else "timeout"


def in_child(mutant: Mutant | None, tests: list[str], left_out: tuple[str, ...], fast: bool, write: int) -> int:
    import pytest

    class Failures:
        def pytest_runtest_logreport(self, report) -> None:
            if report.failed:
                os.write(write, f"{report.nodeid}\n".encode())

        def pytest_collectreport(self, report) -> None:
            if report.failed:
                os.write(write, f"{report.nodeid}\n".encode())

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("regraft", "tests", "helpers", "conftest")]:
        del sys.modules[name]
    if mutant is not None:
        sys.meta_path.insert(0, Planted(mutant))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--override-ini=addopts=", f"--rootdir={ROOT}"]
    options += [f"--deselect={test}" for test in left_out]
    options += ["-k", "not trace"] if fast else []
    return int(pytest.main([*options, *(["-x"] if mutant else []), *tests], plugins=[Failures()]))


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant where the real module is asked for."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name, path=None, target=None):
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.mutant.source, str(self.mutant.path), "exec"), module.__dict__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="parts of files' names, with commas")
    parser.add_argument("--sample", type=int, help="so many of them, spread evenly")
    parser.add_argument("--part", default="0/1", help="the k-th of n parts: 0/2, 1/2")
    parser.add_argument(
        "--thorough", action="store_true", help="with the tests that trace, which take most of the time"
    )
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    found = list(mutants(options.only))
    if options.sample:
        found = found[:: max(len(found) // options.sample, 1)][: options.sample]
    part, parts = map(int, options.part.split("/"))
    found = found[part::parts]
    if options.list:
        print("\n".join(map(str, found)))
        return 0
    os.environ["REGRAFT_MUTANT"] = "1"
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch.export

    import regraft
    from regraft.testing import fuzz

    torch.set_num_threads(1)
    fuzz(regraft.MergeLinears(), examples=3)  # what torch loads late is loaded before the forks
    broken: dict[Path, tuple[str, ...]] = {}
    survivors: list[Mutant] = []
    for number, mutant in enumerate(found, 1):
        tests = tests_of(mutant.path)
        if mutant.path not in broken:  # what fails without a mutant says nothing
            passed, failed = run(None, tests, fast=not options.thorough)
            broken[mutant.path] = () if passed else tuple(failed.split("\n")[:-1])
            if not passed:
                print(f"left out, because they fail without a mutant: {', '.join(broken[mutant.path])}")
        survived, by = run(mutant, tests, broken[mutant.path], not options.thorough)
        survivors += [mutant] * survived
        by = f"by {by.splitlines()[0]}" if by else ""
        print(f"{number}/{len(found)} {'SURVIVED' if survived else 'caught'} {mutant}  {by}", flush=True)
    print(f"\n{len(found) - len(survivors)} of {len(found)} mutants caught")
    print("\n".join(f"  survived: {mutant}" for mutant in survivors))
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
