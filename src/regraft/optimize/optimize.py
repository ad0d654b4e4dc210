"""`optimize`: capture, transform, verify, measure, and keep what pays."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import fx
from torch.export import ExportedProgram

from regraft.dropin import Entry, Grafts, make_dropin
from regraft.optimize import presets, saving
from regraft.optimize.engines import ENGINES, adopt_engine
from regraft.optimize.engines.choosing import expect_installed
from regraft.optimize.progress import Progress
from regraft.optimize.result import GraphResult, Optimized
from regraft.optimize.sharing import share_weights
from regraft.optimize.steps import Stepper, clock, worst_sentence
from regraft.optimize.subjects import Graph, Subject, subject_of
from regraft.verify import Comparison, Verification, compare_speed
from regraft.verify import verify as compare_results

logger = logging.getLogger("regraft")

_ENGINES = ("torch", *ENGINES, "auto")
# What does not preserve the computation is held to this instead of to the error that the model has itself.
_LOOSE = {"rtol": 0.1, "atol": 0.1}


def optimize(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    transformations: Any = None,
    dynamic_shapes: Any = "auto",
    verify: bool = True,
    keep: Literal["measured", "all"] = "measured",
    engine: str = "torch",
    seconds: float = 1.0,
) -> Optimized:
    """Make a model faster on this machine: capture it, rewrite its graph, verify the result, and keep what pays.

    Each transformation is applied and timed against the graph without it, in alternating pairs; one whose 95 %
    interval does not lie wholly below 1 is taken back. A model whose graph ends up no faster than the model itself is
    left as it is. The caller's model is never changed; the result shares its weights.

    Args:
        model: A module, a graph module or an `ExportedProgram`.
        args: Positional arguments of an example call. A transformers model needs no example.
        kwargs: Keyword arguments of it.
        transformations: A preset (`"exact"`, the default; `"fast"`, which may change the result by more than rounding;
            `"compile"`, for use before `torch.compile`), a transformation, or several of either.
        dynamic_shapes: As for `trace`: by default every axis that can vary does.
        verify: Compare the result with the model, and take back what is wrong.
        keep: `"measured"` keeps what pays on this machine, `"all"` keeps everything that is right.
        engine: What runs the rewritten graph: `"torch"`, `"inductor"`, `"onnxruntime"`, `"openvino"`, or `"auto"`,
            which measures those that are installed and keeps the fastest one that is right.
        seconds: How long to measure each step.

    Returns:
        The result: `.model` is called as the model is, and of the same kind as what was given.

    Raises:
        CaptureError: The model cannot be captured; the message names the line of its source and the cure.
        TypeError: An argument is not what it should be; the message shows the corrected call.
        ValueError: There is no such preset, engine or way to keep.
        ImportError: The engine is not installed; the message shows how to install it.

    Example:
        >>> import torch, regraft as rg
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> result = rg.optimize(model, (torch.randn(2, 3, 8, 8),), transformations="FoldBatchNorm", keep="all")
        >>> [(step.transformation, step.applied) for step in result.steps]
        [('FoldBatchNorm()', 1)]
        >>> result.verification.ok, isinstance(result.model, torch.nn.Sequential)
        (True, True)
    """
    chosen = presets.resolve(transformations)
    if keep not in ("measured", "all"):
        raise ValueError(f'keep={keep!r}, but takes "measured" or "all"')
    if engine not in _ENGINES:
        raise ValueError(f"engine={engine!r}, but takes one of {', '.join(map(repr, _ENGINES))}")
    expect_installed(engine)
    if engine != "torch" and isinstance(model, (fx.GraphModule, ExportedProgram)):
        raise ValueError(
            f"engine={engine!r} needs a module, whose drop-in can call it, and a {type(model).__name__} comes back as "
            f"one: regraft.optimize(module, args, engine={engine!r})"
        )
    if seconds <= 0:
        raise ValueError(f"seconds={seconds}, but has to be positive")
    with Progress(total=len(chosen) + 3) as progress:
        subject = subject_of(model, args, kwargs, dynamic_shapes, progress.next)
        progress.total = len(subject.graphs) * (len(chosen) + 2) + 1
        work = _Work(subject, verify, keep == "measured", seconds, progress)
        work.transform(chosen)
        work.verify()
        work.install()
        work.measure(engine)
        return work.result()


class _Work:
    """One run of `optimize`."""

    def __init__(self, subject: Subject, verified: bool, measured: bool, seconds: float, progress: Progress) -> None:
        self.subject = subject
        self.verified = verified
        self.measured = measured
        self.seconds = seconds
        self.progress = progress
        self.steppers = [Stepper(graph, measured, seconds) for graph in subject.graphs]
        self.verifications: dict[str, Verification] = {}
        self.benchmarks: dict[str, Comparison] = {}
        self.verdicts: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        self.engines: dict[str, Any] = {}

    @property
    def graphs(self) -> list[Graph]:
        return self.subject.graphs

    def transform(self, chosen: Sequence[Any]) -> None:
        """Apply each transformation to each graph, and keep what pays."""
        by_name = {stepper.graph.name: stepper for stepper in self.steppers}
        for stepper in self.steppers:
            example = by_name.get(stepper.graph.like or "")
            for index, transformation in enumerate(chosen):
                self.progress.next(f"{stepper.graph.name}: {type(transformation).__name__.lstrip('_')}")
                if example is None:
                    stepper.take(transformation)
                else:
                    stepper.follow(transformation, example.results[index])
            share_weights(self.graphs[0].gm, stepper.graph.gm)

    def verify(self) -> None:
        """Compare each graph with the original; take steps back, the last first, until they agree."""
        for stepper in self.steppers if self.verified else ():
            self.progress.next(f"{stepper.graph.name}: verifying")
            found = self._compared(stepper)
            for index in reversed(range(len(stepper.results))):
                if found.ok:
                    break
                if stepper.results[index].kept:
                    stepper.take_back(index, f"taken back, {worst_sentence(found)}")
                    found = self._compared(stepper)
            self.verifications[stepper.graph.name] = found
            if not found.ok:
                self.verdicts[stepper.graph.name] = (
                    f"the original is kept: even the graph alone is off, {worst_sentence(found)}"
                )

    def _compared(self, stepper: Stepper) -> Verification:
        graph = stepper.graph
        kept = [result for result in stepper.results if result.kept]
        bound: dict[str, Any] = {} if all(result.preserves for result in kept) else dict(_LOOSE)
        args, kwargs = graph.inputs
        return compare_results(graph.reference, graph.candidate(), args, kwargs, extra_inputs=graph.more, **bound)

    def install(self) -> None:
        """Make the drop-in, with every graph that is right."""
        self.entries = {
            graph.name: Entry(graph.name, graph.gm, graph.inputs[1])
            for graph in self.graphs
            if graph.name not in self.verdicts
        }
        if self.subject.twin is not None and self.subject.reader is not None:
            make_dropin(self.subject.twin, Grafts(self.subject.reader, list(self.entries.values())))

    def measure(self, engine: str) -> None:
        """Time what came of each graph against the original, and let go of what does not pay."""
        if engine != "torch":
            for graph in self.graphs:
                self.progress.next(f"{graph.name}: {engine}")
                if graph.name in self.entries:
                    entry = self.entries[graph.name]
                    self.engines[graph.name] = adopt_engine(engine, graph, entry, self.seconds, self.measured)
        for graph in self.graphs:
            if graph.name in self.verdicts:
                continue
            self.progress.next(f"{graph.name}: measuring")
            found = compare_speed(
                graph.runner(graph.reference), graph.runner(self._program(graph)), **clock(self.seconds)
            )
            self.benchmarks[graph.name] = found
            self.verdicts[graph.name] = self._verdict(graph, found)

    def _program(self, graph: Graph) -> Any:
        return graph.gm if self.subject.twin is None else self.subject.twin

    def _verdict(self, graph: Graph, found: Comparison) -> str:
        kept = any(step.kept for stepper in self.steppers if stepper.graph is graph for step in stepper.results)
        engine = self.entries[graph.name].engine is not None
        if not self.measured:
            return f"the graph runs, unmeasured steps included; {found.reason}"
        if found.slower or not (found.faster or kept or engine):
            del self.entries[graph.name]
            return f"the original is kept: {found.reason}"
        return f"the graph runs: {found.reason}"

    def result(self) -> Optimized:
        """All of it, for the caller."""
        model = self._model()
        for name, verdict in self.verdicts.items():
            logger.info("%s: %s", name, verdict)
        cases = [
            replace(case, label=case.label if name == "forward" else f"{name}, {case.label}")
            for name, found in self.verifications.items()
            for case in found.cases
        ]
        notes = dict.fromkeys(note for found in self.verifications.values() for note in found.notes)
        return Optimized(
            model=model,
            original=self.subject.original,
            graphs=tuple(self._graph_result(graph) for graph in self.graphs),
            steps=tuple(result for stepper in self.steppers for result in stepper.results),
            verification=Verification(tuple(cases), tuple(notes)) if self.verified else None,
            notes=tuple(self.subject.notes),
            positional=self.subject.positional,
        )

    def _graph_result(self, graph: Graph) -> GraphResult:
        return GraphResult(
            name=graph.name,
            graph_module=graph.gm,
            inputs=graph.inputs,
            used=graph.name in self.entries,
            verdict=self.verdicts[graph.name],
            benchmark=self.benchmarks.get(graph.name),
            engine=self.engines.get(graph.name),
        )

    def _model(self) -> Any:
        subject = self.subject
        if not self.entries:
            return subject.original if subject.twin is None else self.graphs[0].reference
        if isinstance(subject.original, ExportedProgram):
            return saving.exported(self.graphs[0].gm, self.graphs[0].inputs)
        if subject.twin is None or subject.reader is None:
            return self.graphs[0].gm
        return make_dropin(subject.twin, Grafts(subject.reader, list(self.entries.values())))
