"""`optimize`: all five steps, and the files they leave."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from torch.export import ExportedProgram
from torch.fx import GraphModule

from regraft.cli.describing import versions
from regraft.cli.failure import Failure
from regraft.cli.loading import blamed
from regraft.cli.preparing import Job, prepared, print_json
from regraft.cli.recipe import Recipe
from regraft.cli.writing import file_for, folder_for
from regraft.optimize import Optimized, StepResult
from regraft.optimize import optimize as optimized
from regraft.optimize.engines.wanted import expect_installed, need_a_module
from regraft.report import text


def optimize(arguments: argparse.Namespace) -> int:
    """Optimize a model; exit code 1 where the result does not verify."""
    output = file_for("--output", arguments.output)
    page = file_for("--report", arguments.report, needs="jinja2")
    plots = folder_for("--plots", arguments.plots, needs="matplotlib")
    if output is not None and output.suffix != ".pt2":
        raise Failure(f"--output is a .pt2 file, and not {output.name}")
    job = prepared(arguments)
    _expect_engine(job)
    if arguments.dry_run:
        return _rehearsed(arguments, job)
    recipe = job.recipe
    result = optimized(
        job.model,
        *job.inputs,
        transformations=job.transformations,
        dynamic_shapes="auto" if recipe.dynamic_shapes == "auto" else None,
        verify=recipe.verify,
        keep="all" if recipe.keep == "all" else "measured",
        engine=recipe.engine.split(","),
        seconds=recipe.seconds,
    )
    files = _write(job, result, output, page, plots)
    if arguments.json:
        print_json({**result.to_dict(), "files": files, "notes": [*job.notes, *result.notes]})
    else:
        text.show(text.optimized(result))
        for what, name in files.items():
            text.show(f"{what}: {name}")
    return 0 if _right(result) else 1


def _expect_engine(job: Job) -> None:
    names, model = job.recipe.engine.split(","), job.model
    try:
        expect_installed(names)
    except ImportError as error:
        raise Failure(str(error)) from error
    if need_a_module(names) and isinstance(model, (GraphModule, ExportedProgram)):
        raise Failure(
            f"--engine {job.recipe.engine} runs in the drop-in of a module, and {job.recipe.model} is of the type "
            f"{type(model).__name__}; name the model that it was made from, or: --engine torch"
        )


def _right(result: Optimized) -> bool:
    return result.verification is None or result.verification.ok


def _rehearsed(arguments: argparse.Namespace, job: Job) -> int:
    report = job.explained()
    if arguments.json:
        print_json({**job.plan("optimize"), "report": report.to_dict()})
    else:
        text.show(text.sites(report))
        text.show("dry run: nothing was changed, measured or written")
    return 0


def _write(job: Job, result: Optimized, output: Path | None, page: Path | None, plots: Path | None) -> dict[str, str]:
    files = {}
    if output is not None and _right(result):  # a model that is wrong is not written
        with blamed(f"the result cannot be saved to {output}"):
            result.save(output)
        files["model"] = str(output)
    beside = output or page
    if beside is not None:
        path = beside.with_suffix(".recipe.toml")
        path.write_text(_resolved(job, result, path.parent), encoding="utf-8")
        files["recipe"] = str(path)
    if page is not None:
        files["report"] = str(result.report(page))
    if plots is not None:
        from regraft.report import plot

        files["plots"] = ", ".join(map(str, plot.write(result, plots)))
    return files


def _resolved(job: Job, result: Optimized, folder: Path) -> str:
    """The recipe of what came out: what was kept, to be kept unmeasured, so that the clock decides nothing again."""
    choices = job.recipe.transformations or ()
    of_each = [_of(result, number, len(choices)) for number in range(len(choices))]
    kept = tuple(choice for choice, steps in zip(choices, of_each, strict=True) if any(s.kept for s in steps))
    lost = tuple(
        f"{choice.name} on {step.graph}: {step.reason}"
        for choice, steps in zip(choices, of_each, strict=True)
        for step in steps
        if not step.kept
    )
    recipe: Recipe = dataclasses.replace(job.recipe, transformations=kept, keep="all")
    return recipe.to_toml(folder, versions(), lost)


def _of(result: Optimized, number: int, count: int) -> list[StepResult]:
    """What became of one transformation, on each graph."""
    return [step for i, step in enumerate(result.steps) if i % count == number]
