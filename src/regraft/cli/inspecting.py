"""`explain` and `diff`: what would change, with nothing changed."""

from __future__ import annotations

import argparse
import difflib

from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.node import map_arg

from regraft.cli.fitting import expect_fit
from regraft.cli.inputs import converted_inputs, make_inputs
from regraft.cli.loading import converted, load_model
from regraft.cli.preparing import Job, captured, planned, prepared, print_json
from regraft.report import text


def explain(arguments: argparse.Namespace) -> int:
    """Print every candidate site, and whether it would be rewritten."""
    job = prepared(arguments)
    if arguments.dry_run:
        return planned(arguments, job, "explain")
    report = job.explained()
    if arguments.json:
        print_json({**report.to_dict(), "notes": job.notes})
    else:
        text.show(text.sites(report))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Print what changes in the graph."""
    job = prepared(arguments)
    if arguments.dry_run:
        return planned(arguments, job, "diff")
    before = job.graph()
    after = candidate_graph(job, arguments.candidate) if arguments.candidate else job.rewritten()
    old, new = listing(before), listing(after)
    lines = [*difflib.unified_diff(old, new, "before", "after", lineterm="")]
    if arguments.json:
        counts = {"nodes_before": len(old), "nodes_after": len(new), "parameters_before": _size(before)}
        print_json({**counts, "parameters_after": _size(after), "diff": lines})
        return 0
    for line in lines:
        text.show(line)
    text.show(f"{len(old)} nodes before, {len(new)} after; {_size(before)} parameters before, {_size(after)} after")
    return 0


def candidate_graph(job: Job, spec: str) -> GraphModule:
    """The graph of a second model.

    Args:
        job: the first model's work.
        spec: the second model, as on the command line.
    """
    recipe = job.recipe
    model = converted(load_model(spec, recipe.seed)[0], recipe.dtype, recipe.device)
    inputs = job.inputs
    if not inputs[0] and not inputs[1]:
        inputs = converted_inputs(make_inputs(model, recipe.inputs, recipe.seed), recipe.dtype, recipe.device)
    if not isinstance(model, ExportedProgram):
        expect_fit(model, inputs, recipe.inputs)
    return captured(model, inputs, recipe)


def listing(gm: GraphModule) -> list[str]:
    """The nodes of a graph, a line each, as a reader would write them.

    Args:
        gm: the graph.
    """
    lines = []
    for node in gm.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Name(n.name))
        words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        lines.append(f"{node.name} = {node.op} {target}({', '.join(words)})")
    return lines


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _size(gm: GraphModule) -> int:
    return sum(parameter.numel() for parameter in gm.parameters())
