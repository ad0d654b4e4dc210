"""The report as a page: one HTML file with everything in it, which needs no network."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from regraft.core.errors import RegraftError
from regraft.core.journal import Step
from regraft.core.results import Drawer
from regraft.report import charts, drawing
from regraft.report.result import GraphResult, Result, StepResult
from regraft.verify import Depth, Leaf, error_by_depth

_PLAIN = frozenset({"bool", "int", "float", "str", "NoneType", "dtype", "device"})
_MOST_DRAWINGS = 200  # a page with thousands of pictures opens in no browser; the sentences are all there


def write(result: Result, path: str | Path) -> Path:
    """Write the page.

    Args:
        result: what `optimize` gave.
        path: of the file.

    Returns:
        The path.

    Raises:
        ImportError: jinja2 is not installed; the message says how to.
    """
    try:
        import jinja2
    except ImportError:
        raise ImportError("a report needs jinja2: pip install 'regraft[report]'") from None
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("page.html.j2").render(page(result))
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def page(result: Result) -> dict[str, Any]:
    """All that the template shows, as plain data.

    Args:
        result: what `optimize` gave.
    """
    pictures = _Pictures(result)
    return {
        "model": type(result.original).__name__,
        "summary": _summary(result),
        "graphs": [_graph(graph) for graph in result.graphs],
        "many": len(result.graphs) > 1,
        "steps": [_step(step, pictures) for step in result.steps],
        "left_out": pictures.left_out,
        "verification": [] if result.verification is None else _verification(result),
        "depths": [_depth(graph) for graph in result.graphs],
        "notes": list(result.notes),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "made_with": _versions(),
    }


def depths_of(graph: GraphResult) -> tuple[tuple[Depth, ...], str]:
    """The error along a graph, or why there is none.

    Args:
        graph: one of those that `optimize` made.
    """
    args, kwargs = graph.inputs
    try:
        return error_by_depth(graph.graph_module, args, kwargs), ""
    except RegraftError as error:
        return (), str(error)
    except Exception as error:  # what the graph raises in float64 is no reason to have no report
        return (), f"{type(error).__name__}: {error}".splitlines()[0]


class _Pictures:
    """The drawings of the sites, up to as many as a page bears."""

    def __init__(self, result: Result) -> None:
        records: dict[str, list[Step]] = {}
        for step in result.steps:
            records.setdefault(step.graph, []).extend(step.records)
        self._drawers = {g.name: Drawer(g.graph_module, records.get(g.name, ())) for g in result.graphs}
        self._drawn = 0
        self.left_out = 0

    def of(self, graph: str, site: Any) -> dict[str, Any]:
        """Before and after of one site."""
        drawer = self._drawers.get(graph)
        found = drawer.draw(site) if drawer is not None and self._drawn < _MOST_DRAWINGS else None
        if found is None:
            self.left_out += self._drawn >= _MOST_DRAWINGS
            return {}
        self._drawn += 1
        return {
            "before": drawing.graph(found.before, f"{site.where} before"),
            "after": drawing.graph(found.after, f"{site.where} after"),
            "weights": found.weights,
        }


def _summary(result: Result) -> list[dict[str, str]]:
    tiles = []
    first = result.graphs[0]
    speed = first.benchmark
    if speed is not None:
        kind = "good" if speed.faster else "bad" if speed.slower else "even"
        call = "call" if first.name == "forward" else first.name
        said = f"95 % between {speed.low:.3g} and {speed.high:.3g}, {speed.pairs} pairs"
        tiles.append({"kind": kind, "value": f"{speed.ratio:.3g}×", "name": f"the time of a {call}", "said": said})
    found = result.verification
    if found is not None:
        tried = sum(case.skipped is None for case in found.cases)
        value, kind = ("verified", "good") if found.ok else ("NOT verified", "bad")
        tiles.append({"kind": kind, "value": value, "name": f"on {tried} sets of inputs", "said": _worst(result)})
    kept = [step for step in result.steps if step.kept]
    sites, refused = sum(s.applied for s in kept), sum(s.refused for s in result.steps)
    said = f"by {len(kept)} of {len(result.steps)} transformations; {refused} refused"
    tiles.append({"kind": "even", "value": str(sites), "name": "sites rewritten", "said": said})
    return tiles


def _worst(result: Result) -> str:
    cases = result.verification.cases if result.verification is not None else ()
    leaves = [leaf for case in cases for leaf in case.leaves]
    wrong = sum(not leaf.ok for leaf in leaves) + sum(len(case.problems) for case in cases)
    if wrong:
        return f"{wrong} wrong, see below"
    ratios = [leaf.ratio for leaf in leaves if leaf.reference_error > 0]
    return f"at most {max(ratios):.2f} times the model's own error" if ratios else "every output is the same"


def _graph(graph: GraphResult) -> dict[str, Any]:
    speed = graph.benchmark
    return {
        "name": graph.name,
        "used": graph.used,
        "verdict": graph.verdict,
        "times": charts.times(speed) if speed else "",
        "interval": charts.interval(speed) if speed else "",
        "engine": graph.engine.engine if graph.engine else "",
        "engines": list(_engines(graph)),
        "before": f"{speed.baseline_seconds * 1e3:.4g} ms" if speed else "",
        "after": f"{speed.candidate_seconds * 1e3:.4g} ms" if speed else "",
    }


def _engines(graph: GraphResult) -> Iterator[dict[str, str]]:
    for name, said in (graph.engine.tried if graph.engine else {}).items():
        added = graph.engine.rewriting.get(name) if graph.engine else None
        yield {"name": name, "said": said, "added": added.reason if added else "nothing was rewritten"}


def _depth(graph: GraphResult) -> dict[str, Any]:
    depths, why = depths_of(graph)
    worst = max(depths, key=lambda depth: depth.candidate_error) if depths else None
    return {"name": graph.name, "chart": charts.depth(depths), "why": why, "worst": worst}


def _step(step: StepResult, pictures: _Pictures) -> dict[str, Any]:
    refusals = [refusal for record in step.records for refusal in record.refused]
    return {
        "graph": step.graph,
        "name": step.transformation.removesuffix("()"),
        "outcome": "kept" if step.kept else "taken back" if step.applied else "nothing to do",
        "kind": "good" if step.kept else "even",
        "reason": step.reason,
        "ratio": f"{step.comparison.ratio:.3g}× the time" if step.comparison else "",
        "sites": list(_sites(step, pictures)),
        "refusals": [{"where": refusal.where, "reason": refusal.reason} for refusal in refusals],
    }


def _sites(step: StepResult, pictures: _Pictures) -> Iterator[dict[str, Any]]:
    for record in step.records:
        for site in record.applied:
            yield {"where": site.where, "sentence": site.sentence, **pictures.of(step.graph, site)}


def _verification(result: Result) -> list[dict[str, Any]]:
    assert result.verification is not None
    return [
        {
            "label": case.label,
            "skipped": case.skipped,
            "problems": case.problems,
            "leaves": [
                {
                    "name": leaf.name,
                    "ok": leaf.ok,
                    "about": f"{leaf.dtype} {' x '.join(map(str, leaf.shape))}",
                    "own": f"{leaf.reference_error:.2e}",
                    "error": f"{leaf.candidate_error:.2e}",
                    "allowed": f"{leaf.allowed:.2e}",
                    "own_share": charts.share(leaf.reference_error, leaf.allowed) * 100,
                    "share": charts.share(leaf.candidate_error, leaf.allowed) * 100,
                    "problem": leaf.problem or leaf.note or "",
                }
                for leaf in case.leaves
                if not _is_setting(leaf)
            ],
            "alike": sum(map(_is_setting, case.leaves)),
        }
        for case in result.verification.cases
    ]


def _is_setting(leaf: Leaf) -> bool:
    """Whether it is a number or a name beside the tensors, and right: a cache has many of them in each layer."""
    return leaf.ok and leaf.dtype in _PLAIN and not leaf.shape


def _versions(names: Sequence[str] = ("regraft", "torch", "transformers")) -> list[str]:
    found = [f"Python {platform.python_version()}", f"{torch.get_num_threads()} threads", platform.machine()]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
