"""The charts of the report as PNG files, by matplotlib, for slides and papers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from regraft.report.html import depths_of
from regraft.report.result import Result
from regraft.verify import Comparison, Depth, Verification

_BEFORE, _AFTER = "#8b6fc7", "#0b7fa3"
_MOST_BARS = 24  # as many as can be read
_Draw = Callable[[Any], None]


def write(result: Result, folder: str | Path) -> list[Path]:
    """Write what there is to plot: `errors.png`, `depth.png` and `latency.png`, `depth-decode.png` for a second graph.

    Args:
        result: what `optimize` gave.
        folder: where to; it is made if need be.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is not installed; the message says how to.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, _Draw] = {}
    if result.verification is not None and _leaves(result.verification):
        drawn["errors"] = partial(errors, found=result.verification)
    for index, graph in enumerate(result.graphs):
        suffix = f"-{graph.name.replace(' ', '-')}" if index else ""
        depths, _ = depths_of(graph)
        if depths:
            drawn[f"depth{suffix}"] = partial(depth, values=depths)
        if graph.benchmark is not None and graph.benchmark.times:
            drawn[f"latency{suffix}"] = partial(latency, speed=graph.benchmark)
    return [_written(folder / f"{name}.png", draw) for name, draw in drawn.items()]


def errors(axes: Any, found: Verification) -> None:
    """The error of each output, beside what is allowed and what the original has.

    Args:
        axes: of matplotlib.
        found: the verification.
    """
    leaves = _leaves(found)
    places = range(len(leaves))
    axes.barh(places, [leaf.candidate_error for _, leaf in leaves], color=_AFTER, height=0.5, label="result")
    axes.plot([leaf.reference_error for _, leaf in leaves], places, "|", color=_BEFORE, ms=14, mew=2, label="original")
    axes.plot([leaf.allowed for _, leaf in leaves], places, "|", color="black", ms=18, mew=2, label="allowed")
    axes.set_yticks(list(places), [f"{label}: {leaf.name}" for label, leaf in leaves])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("largest error against float64, relative to the output")
    axes.legend()


def depth(axes: Any, values: tuple[Depth, ...]) -> None:
    """The error along the graph.

    Args:
        axes: of matplotlib.
        values: in the order of the graph.
    """
    places = [value.position for value in values]
    for name, colour, read in (
        ("before", _BEFORE, [value.reference_error for value in values]),
        ("after", _AFTER, [value.candidate_error for value in values]),
    ):
        axes.plot(places, read, "o-", ms=3, lw=1.2, color=colour, label=name)
    if any(value.candidate_error > 0 for value in values):
        axes.set_yscale("log")
    axes.set_xlabel("position in the graph, first to last value")
    axes.set_ylabel("root mean square error against float64")
    axes.legend()


def latency(axes: Any, speed: Comparison) -> None:
    """The times of calls before and after.

    Args:
        axes: of matplotlib.
        speed: the measurement.
    """
    for name, colour, column, median in (
        ("before", _BEFORE, 0, speed.baseline_seconds),
        ("after", _AFTER, 1, speed.candidate_seconds),
    ):
        ordered = sorted(pair[column] * 1e3 for pair in speed.times)
        axes.ecdf(ordered, color=colour, label=f"{name}, median {median * 1e3:.3g} ms")
    axes.set_xlabel("milliseconds of one call")
    axes.set_ylabel("share of calls that take at most so long")
    axes.set_title(speed.describe(), fontsize=10)
    axes.legend()


def _leaves(found: Verification) -> list[tuple[str, Any]]:
    leaves = [(case.label, leaf) for case in found.cases for leaf in case.leaves if leaf.allowed > 0]
    return leaves[:_MOST_BARS]


def _written(path: Path, draw: _Draw) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'regraft[report]'") from None
    # A figure of its own, and not pyplot's: what a user has open there stays as it is.
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path
