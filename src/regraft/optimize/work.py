"""The work of `optimize`, step by step, and the same again where a model's weights have been converted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from regraft.capture.own_state import spelled
from regraft.core.transformation import Transformation
from regraft.dropin import Entry, Grafts, Reader, make_dropin, without_grafts
from regraft.optimize import saving
from regraft.optimize.engines import PAIRS, adopt_engine, let_go, pause_after
from regraft.optimize.finite import must_be_finite
from regraft.optimize.graphs import TWICE, Graph
from regraft.optimize.presets import OTHER_KERNELS, PACKING
from regraft.optimize.progress import Progress
from regraft.optimize.result import GraphResult, Optimized
from regraft.optimize.sharing import share_weights
from regraft.optimize.step_result import worst_sentence
from regraft.optimize.steps import Stepper, clock
from regraft.optimize.subjects import Subject, subject_again
from regraft.verify import Comparison, Verification, compare_speed
from regraft.verify import verify as compare_results
from regraft.verify.call import described

logger = logging.getLogger("regraft")

# What does not preserve the computation is held to this instead of to the error that the model has itself.
_LOOSE = {"rtol": 0.1, "atol": 0.1}


@dataclass(frozen=True)
class Settings:
    """How a model is optimized.

    Args:
        chosen: The transformations.
        dynamic_shapes: As for `trace`.
        measured: Whether only what pays is kept.
        engines: What may run the graphs.
        seconds: How long to measure each step.
        frozen: Whether the caller promises to leave the model as it is.
    """

    chosen: tuple[Transformation, ...]
    dynamic_shapes: Any
    measured: bool
    engines: tuple[str, ...]
    seconds: float
    frozen: bool


@dataclass(frozen=True)
class Again:
    """Optimizes a drop-in whose weights have been converted or moved, as it was optimized before.

    Args:
        settings: How.
        call: An example of a call, by name.
        dtype: The type that the model's weights had.
    """

    settings: Settings
    call: dict[str, Any]
    dtype: torch.dtype | None

    def __call__(self, model: nn.Module) -> Iterable[Entry]:
        """Make graphs of the model as it is now.

        Args:
            model: The drop-in.
        """
        plain = without_grafts(copy.copy(model))
        weight = next((tensor for tensor in plain.parameters() if tensor.is_floating_point()), None)

        def moved(tensor: Tensor) -> Tensor:
            dtype = None if weight is None or tensor.dtype is not self.dtype else weight.dtype
            return tensor if weight is None else tensor.to(weight.device, dtype)

        call = pytree.tree_map_only(Tensor, moved, self.call)
        subject = subject_again(plain, call, self.settings.dynamic_shapes, self.settings.frozen)
        return Work(subject, True, self.settings, Progress(total=1)).run().entries.values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Again:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a file says what a model is, not how it is optimized


def _nothing() -> None:
    return None


class Work:
    """One run of `optimize`.

    Args:
        subject: What is optimized.
        verified: Whether the graphs are compared with the original.
        settings: How it is optimized.
        progress: Is told what is being done.
    """

    def __init__(self, subject: Subject, verified: bool, settings: Settings, progress: Progress) -> None:
        self.subject, self.settings, self.progress = subject, settings, progress
        self.verified, self.measured, self.seconds = verified, settings.measured, settings.seconds
        self.steppers = [Stepper(graph, self.measured, self.seconds) for graph in subject.graphs]
        self.verifications: dict[str, Verification] = {}
        self.benchmarks: dict[str, Comparison] = {}
        self.verdicts: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        self.engines: dict[str, Any] = {}

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of the subject."""
        return self.subject.graphs

    def run(self) -> Work:
        """All of it; what models set meanwhile and the buffers that are written to are left as they were."""
        with self.subject.untouched():
            self.transform()
            self.verify()
            self.install()
            self.measure(self.settings.engines)
        return self

    def transform(self) -> None:
        """Apply each transformation to each graph, and keep what pays."""
        by_name = {stepper.graph.name: stepper for stepper in self.steppers}
        for stepper in self.steppers:
            example = by_name.get(stepper.graph.like or "")
            last = self.settings.chosen[-1:]
            if example is None and last and type(last[0]).__name__ in PACKING:
                self.progress.next(f"{stepper.graph.name}: {type(last[0]).__name__} alone")
                stepper.anticipate(last[0], self.settings.chosen[:-1])
            for index, transformation in enumerate(self.settings.chosen):
                self.progress.next(f"{stepper.graph.name}: {type(transformation).__name__.lstrip('_')}")
                if example is None:
                    stepper.take(transformation)
                else:
                    stepper.follow(transformation, example.results[index])
            if self.measured:
                self.progress.next(f"{stepper.graph.name}: all steps together")
                stepper.settle()
                self._note_what_was_timed(stepper)
            share_weights(self.graphs[0].gm, stepper.graph.gm)

    def _note_what_was_timed(self, stepper: Stepper) -> None:
        graph = stepper.graph
        if graph.shorter is not None and any(step.comparison is not None for step in stepper.results):
            call = described(graph.shorter)
            self.subject.notes.append(
                f"{graph.name}: a call takes {graph.seconds:.1f} s, so steps were timed on {call}"
            )

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
            elif not stepper.graph.answers_alike():
                self.verdicts[stepper.graph.name] = "the original is kept: each call of it gives something else"

    def _compared(self, stepper: Stepper) -> Verification:
        graph = stepper.graph
        bound = self._bound(graph)
        return compare_results(graph.oracle, graph.candidate(), *graph.inputs, extra_inputs=graph.more, **bound)

    def _bound(self, graph: Graph) -> dict[str, Any]:
        kept = [step for stepper in self.steppers if stepper.graph is graph for step in stepper.results if step.kept]
        if not all(step.preserves for step in kept):
            return dict(_LOOSE)
        packed = any(record.transformation in PACKING for step in kept for record in step.records)
        return {"factor": OTHER_KERNELS} if packed else {}

    def install(self) -> None:
        """Make the drop-in, with every graph that is right."""
        self.entries = {
            graph.name: Entry(graph.name, graph.gm, graph.call, graph.ignores, graph.sets, graph.contents)
            for graph in self.graphs
            if graph.name not in self.verdicts
        }
        if self.subject.twin is not None and self.subject.reader is not None:
            make_dropin(self.subject.twin, self._grafts(self.subject.reader))

    def measure(self, engines: tuple[str, ...]) -> None:
        """Time what came of each graph against the original, and let go of what does not pay."""
        for graph in self._for(engines):
            self.progress.next(f"{graph.name}: {', '.join(engines)}")
            settings = self.seconds, self.measured, self._bound(graph)
            self.engines[graph.name] = adopt_engine(engines, graph, self.entries[graph.name], *settings)
        for graph in [graph for graph in self.graphs if graph.name not in self.verdicts]:
            self.progress.next(f"{graph.name}: measuring")
            self.entries[graph.name].finite = must_be_finite(graph, self.entries[graph.name])
            right = not self.verified or graph.is_right_in(self.subject.twin, self._bound(graph))
            if not right and self.entries[graph.name].engine is not None:
                by_torch = let_go(self.engines[graph.name], self.entries[graph.name])
                if right := graph.is_right_in(self.subject.twin, self._bound(graph)):
                    self.engines[graph.name] = by_torch
            if not right:
                self.verdicts[graph.name] = TWICE
                del self.entries[graph.name]
                continue
            runs = self.engines[graph.name].engine if graph.name in self.engines else "torch"
            known = graph.seconds if self.verified else 0.0  # else the original has not run yet
            timing = {**clock(self.seconds, pause_after(runs), known), "min_pairs": PAIRS}
            found = compare_speed(graph.runner(graph.reference), graph.runner(self._program(graph)), **timing)
            self.benchmarks[graph.name] = found
            self.verdicts[graph.name] = self._verdict(graph, found)

    def _for(self, engines: tuple[str, ...]) -> list[Graph]:
        """The graphs for which engines are tried; torch's own is made for one size, that of the caller's call."""
        if self.subject.twin is None or engines == ("eager",) or (engines == ("torch",) and not self.measured):
            return []
        graphs = self.graphs[:1] if engines == ("torch",) else self.graphs
        return [graph for graph in graphs if graph.name in self.entries]

    def _program(self, graph: Graph) -> Any:
        return graph.gm if self.subject.twin is None else self.subject.twin

    def _verdict(self, graph: Graph, found: Comparison) -> str:
        kept = any(step.kept for stepper in self.steppers if stepper.graph is graph for step in stepper.results)
        engine = self.entries[graph.name].engine is not None
        if not self.measured:
            return f"the graph runs, unmeasured steps included; {found.reason}"
        if found.ratio >= 1 or not (found.faster or kept or engine):
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
            gm=graph.gm,
            entries=tuple(self.entries.values()),
            inputs=graph.inputs,
            used=graph.name in self.entries,
            verdict=self.verdicts[graph.name],
            benchmark=self.benchmarks.get(graph.name),
            engine=self.engines.get(graph.name),
            sets=(*map(spelled, graph.sets), *graph.contents.names),
        )

    def _model(self) -> Any:
        subject = self.subject
        if not self.entries:
            return subject.original if subject.evaluated is None else subject.evaluated
        if isinstance(subject.original, ExportedProgram):
            return saving.exported(self.graphs[0].gm, self.graphs[0].inputs)
        if subject.twin is None or subject.reader is None:
            return self.graphs[0].gm
        return make_dropin(subject.twin, self._grafts(subject.reader))

    def _grafts(self, reader: Reader) -> Grafts:
        weights = self.subject.twin.parameters() if self.subject.twin is not None else ()
        dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), None)
        again = Again(self.settings, self.subject.call, dtype)
        return Grafts(reader, list(self.entries.values()), again, self.settings.frozen)
