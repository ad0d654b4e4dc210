"""What `optimize` returns, and how it is shown."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from regraft.core.errors import CaptureError
from regraft.core.history import history, undo
from regraft.dropin import Entry, grafts_of
from regraft.optimize import saving
from regraft.optimize.step_result import StepResult
from regraft.verify import Comparison, Verification


@dataclass(frozen=True)
class GraphResult:
    """One graph of a model and what came of it.

    Args:
        name: `"forward"`, or `"prefill"` and `"decode"` for what a decoder's `generate` calls.
        gm: The rewritten graph, for regraft's own use; `graph_module` gives it to others.
        entries: What the model runs: this graph and those that share weights with it.
        inputs: The call that it was captured with.
        used: Whether the model runs it.
        verdict: Why, as a sentence.
        benchmark: The result against the original; None where it was not measured.
        engine: What was tried to run it and which was taken; None for torch alone.
        sets: Attributes that the model sets as it runs, and what it puts into lists and dictionaries that it is given.
            Where there are some the graph returns a pair: the result, and a list of what is set and put there.
    """

    name: str
    gm: GraphModule
    entries: tuple[Entry, ...]
    inputs: saving.Inputs
    used: bool
    verdict: str
    benchmark: Comparison | None
    engine: Any = None
    sets: tuple[str, ...] = ()

    @property
    def graph_module(self) -> GraphModule:
        """The rewritten graph. You may change it; each call of the model then looks whether you have, unless frozen.

        It returns a pair where the model sets or puts something somewhere as it runs; see `sets`.
        """
        for entry in self.entries:
            entry.lend()
        return self.gm


@dataclass(repr=False)
class Optimized:
    """The result of `optimize`. It prints as a short table.

    Args:
        model: Called as the original is, and of its kind. The original itself where nothing paid.
        original: What was given; it has not been changed.
        graphs: The graphs; more than one for a decoder, whose call with a cache has its own.
        steps: What was tried, in order, what stayed, and why.
        verification: The comparison with the original; None where `verify=False`.
        notes: What else a reader should know.
        positional: The arguments that the example gave by position, and so a saved program takes.
    """

    model: Any
    original: nn.Module | ExportedProgram
    graphs: tuple[GraphResult, ...]
    steps: tuple[StepResult, ...]
    verification: Verification | None
    notes: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()

    @property
    def graph_module(self) -> GraphModule:
        """The rewritten graph of the example call, as `GraphResult.graph_module` gives it.

        Raises:
            CaptureError: The example call could not be captured, only what `generate` calls was; or it returns a
                string, which no such file can hold.
        """
        return self._of_the_example().graph_module

    @property
    def benchmark(self) -> Comparison | None:
        """The model against the original on the example call; None where it was not measured, or not captured."""
        return self.graphs[0].benchmark if self.graphs[0].name == "forward" else None

    def _of_the_example(self) -> GraphResult:
        if self.graphs[0].name != "forward":
            raise CaptureError(
                f"the example call has no graph, only those of generate have, in result.graphs: "
                f"{', '.join(graph.name for graph in self.graphs)}; result.notes says why"
            )
        return self.graphs[0]

    def undo(self, transformation: str | None = None) -> Optimized:
        """Take back what was done: all of it, or one transformation; bit for bit.

        Args:
            transformation: The name of its class; all of them where it is None.

        Returns:
            This result. Its graphs are then as they were captured, and its model runs those.

        Raises:
            ReversalConflict: Something made later stands on it; nothing is changed then.
            ValueError: No such transformation stands.
        """
        standing = {step.transformation for graph in self.graphs for step in history(graph.gm)}
        if transformation is not None and transformation not in standing:
            raise ValueError(f"no step {transformation!r} stands; undo() takes one of {sorted(standing)}")
        undone: set[str] = set()
        for gm in self._graph_modules():
            for step in reversed(history(gm)):
                if transformation in (None, step.transformation):
                    undo(gm, step)
                    undone.add(step.transformation)
        self.steps = tuple(self._after_undo(step, undone) for step in self.steps)
        grafts = grafts_of(self.model) if isinstance(self.model, nn.Module) else None
        if grafts is not None:
            for entry in grafts.entries:
                entry.engine = None
            grafts.renew(self.model)
        elif isinstance(self.model, ExportedProgram) and self.model is not self.original:
            self.model = saving.exported(self.graphs[0].gm, self.graphs[0].inputs)
        return self

    def _graph_modules(self) -> list[GraphModule]:
        """The graphs, or those that were captured in their place after the model was converted."""
        grafts = grafts_of(self.model) if isinstance(self.model, nn.Module) else None
        known = [graph.gm for graph in self.graphs]
        later = [entry.gm for entry in grafts.entries] if grafts is not None else []
        return known if all(any(gm is one for one in known) for gm in later) else later

    @staticmethod
    def _after_undo(step: StepResult, undone: set[str]) -> StepResult:
        gone = step.kept and any(record.transformation in undone for record in step.records)
        return replace(step, kept=False, reason="undone") if gone else step

    def report(self, path: str | Path) -> Path:
        """Write a page that shows what was done, as one HTML file that needs no network.

        Args:
            path: The file.
        """
        from regraft.report import html as page

        page.write(self, path)
        return Path(path)

    def save(self, path: str | Path) -> Path:
        """Write the rewritten graph of the example call to a file for `torch.export.load`, or `regraft.load`.

        The program that is loaded from it takes the tensors that the example gave by position by position, and the
        others by name; what is no tensor is as in the example, and not taken. It gives the result; there is no model on
        which it could set anything.

        Args:
            path: The file, usually `*.pt2`.

        Raises:
            CaptureError: The example call could not be captured, only what `generate` calls was; or it returns a
                string, which no such file can hold.
        """
        graph = self._of_the_example()
        args, kwargs = graph.inputs
        names = list(takewhile(kwargs.__contains__, self.positional))
        named = {name: value for name, value in kwargs.items() if name not in names}
        inputs = (*args, *(kwargs[name] for name in names)), named
        saving.save(graph.gm, inputs, path, first=bool(graph.sets))
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the models, as plain data."""
        return {
            "graphs": [
                {
                    "name": graph.name,
                    "used": graph.used,
                    "verdict": graph.verdict,
                    "benchmark": graph.benchmark and graph.benchmark.to_dict(),
                    "engine": graph.engine and graph.engine.to_dict(),
                }
                for graph in self.graphs
            ],
            "steps": [step.to_dict() for step in self.steps],
            "verification": None if self.verification is None else self.verification.to_dict(),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        rows = [_HEAD, *(_row(step) for step in self.steps)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(_row(step), "td") for step in self.steps)
        remarks = "".join(f"<li>{html.escape(text)}</li>" for text in self._remarks())
        return f"<table><thead>{line(_HEAD, 'th')}</thead><tbody>{body}</tbody></table><ul>{remarks}</ul>"

    def _remarks(self) -> list[str]:
        lines = [f"{graph.name}: {graph.verdict}" for graph in self.graphs]
        lines += [f"{graph.name}: {graph.engine}" for graph in self.graphs if graph.engine]
        if self.verification is not None:
            lines.append(str(self.verification).splitlines()[-1])
        return [*lines, *(f"note: {note}" for note in self.notes)]


_HEAD = ["graph", "transformation", "applied", "refused", "kept", "why"]


def _row(step: StepResult) -> list[str]:
    kept = "yes" if step.kept else "no"
    return [step.graph, step.transformation, str(step.applied), str(step.refused), kept, step.reason]
