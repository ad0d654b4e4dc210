"""Each transformation applied, measured against what was there before, and kept where it pays."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from regraft.core.history import history, undo
from regraft.core.journal import Step
from regraft.core.report import Report
from regraft.core.transformation import Transformation
from regraft.optimize.subjects import Graph
from regraft.verify import Comparison, Verification, compare_speed

logger = logging.getLogger("regraft")


@dataclass(frozen=True)
class StepResult:
    """What one transformation did to one graph, and whether that stayed.

    Args:
        graph: Which graph: `"forward"`, or `"prefill"` and `"decode"` for what a decoder's `generate` calls.
        transformation: The transformation, by name and arguments.
        kept: Whether what it did stands in the graph.
        reason: Why it was kept or taken back, as a sentence.
        applied: How many sites it rewrote.
        refused: How many sites it refused.
        preserves: Whether it claims to compute the same.
        comparison: The graph with it against the graph without; None where that was not measured.
        records: What the history says of it, sites and refusals included; also of what was taken back.
    """

    graph: str
    transformation: str
    kept: bool
    reason: str
    applied: int
    refused: int
    preserves: bool
    comparison: Comparison | None
    records: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graph's own records, as plain data; sites and refusals as sentences."""
        plain = {key: value for key, value in vars(self).items() if key not in ("comparison", "records")}
        names = ("transformation", "outcome", "site", "sentence")
        sites = [dict(zip(names, row, strict=True)) for row in Report(self.transformation, self.records).rows()]
        return {**plain, "comparison": self.comparison and self.comparison.to_dict(), "sites": sites}


class Stepper:
    """Takes one graph through transformations.

    Args:
        graph: The graph, whose graph module is changed.
        measured: Whether to keep only what pays.
        seconds: How long to measure each step.
    """

    def __init__(self, graph: Graph, measured: bool, seconds: float) -> None:
        self.graph = graph
        self.results: list[StepResult] = []
        self._measured = measured
        self._seconds = seconds
        self._captured = copy.copy(graph.gm)
        self._taken: list[Transformation] = []
        self._undecided: list[int] = []
        self._packing: tuple[Transformation, Comparison] | None = None  # what packs, and what it gains
        self._packed: GraphModule | None = None  # the graph as it stands, packed

    def anticipate(self, packing: Transformation) -> None:
        """Measure what packs first, and if it pays, the other steps between packed layers: so they will run in the end.

        A merged layer may be slower than three where it is plain, and faster where it is packed.

        Args:
            packing: The transformation that packs; it is the last to be taken.
        """
        if not self._measured or self.graph.large:
            return
        try:
            packed, records = _applied(packing, copy.copy(self.graph.gm))
            found = self._compared(self.graph.gm, packed) if any(step.applied for step in records) else None
            if found is not None and found.faster:
                self._packing, self._packed = (packing, found), packed
        except Exception as error:  # whatever a graph raises that was rewritten wrongly; `take` says so
            logger.info("%s is not measured packed: %s", self.graph.name, error)

    def take(self, transformation: Transformation) -> None:
        """Apply one transformation, and take it back where it is slower or fails.

        One that makes no difference that can be shown stays until `settle`, since a later one may stand on it.

        Args:
            transformation: The transformation.
        """
        before = copy.copy(self.graph.gm)
        made, records = _applied(transformation, self.graph.gm)
        result = _result(self.graph.name, transformation, records)
        self._taken.append(transformation)
        if not result.applied and made is self.graph.gm:
            self.results.append(replace(result, reason=_why_nothing(records)))
            return
        if not self._measured:
            self.graph.gm = made
            self.results.append(replace(result, kept=True, reason='kept unmeasured, as keep="all" asks'))
            return
        packed = None
        try:
            if self._packing is None:
                comparison = self._compared(before, made)
            elif transformation is self._packing[0]:
                comparison, self._packing = self._packing[1], None
            else:
                packed, _ = _applied(self._packing[0], copy.copy(made))
                comparison = self._compared(self._packed or before, packed)
        except Exception as error:  # whatever a graph raises that was rewritten wrongly
            self._restore(made, records)
            failure = f"taken back, it raised {type(error).__name__}: {error}".splitlines()[0]
            self.results.append(replace(result, reason=failure))
            return
        result = replace(result, comparison=comparison)
        if comparison.slower or not (comparison.faster or not self.graph.large):
            self._restore(made, records)
            self.results.append(replace(result, reason=f"taken back, {comparison.reason}"))
            return
        if not comparison.faster:
            self._undecided.append(len(self.results))
        self.graph.gm, self._packed = made, packed
        self.results.append(replace(result, kept=True, reason=comparison.reason))

    def settle(self) -> None:
        """Judge together, with all other steps there, those that alone made no difference that could be shown.

        Where the graph is no faster with them than without, they are taken back.
        """
        undecided, self._undecided = self._undecided, []
        if not undecided:
            return
        try:
            left_out, records = self._without(undecided)
            comparison = self._compared(left_out, self.graph.gm)
        except Exception as error:  # the others alone were never run together
            logger.info("%s does not run without what is undecided: %s", self.graph.name, error)
            return
        needed, names = comparison.faster, [type(self._taken[index]).__name__.lstrip("_") for index in undecided]
        for index in undecided:
            others = " and ".join(name for at, name in zip(undecided, names) if at != index)
            verdict = f"in the whole{f', with {others}' if others else ''}, {comparison.reason}"
            reason = verdict if needed else f"taken back, {verdict}"
            self.results[index] = replace(self.results[index], kept=needed, reason=reason, comparison=comparison)
        if not needed:
            if not comparison.slower and all(self.results[index].preserves for index in undecided):
                self.graph.whole = self.graph.gm
            self.graph.gm = left_out
            for index, made in records.items():
                counted = _result(self.graph.name, self._taken[index], made)
                self.results[index] = replace(
                    self.results[index], applied=counted.applied, refused=counted.refused, records=counted.records
                )

    def _without(self, indices: Sequence[int]) -> tuple[GraphModule, dict[int, tuple[Step, ...]]]:
        """The graph made anew without some of the steps that stand, and what its history says of the others."""
        gm, records = copy.copy(self._captured), {}
        for index, result in enumerate(self.results):
            if result.kept and index not in indices:
                gm, records[index] = _applied(self._taken[index], gm)
        return gm, records

    def _compared(self, before: GraphModule, made: GraphModule) -> Comparison:
        graph = self.graph
        return compare_speed(graph.runner(before.forward), graph.runner(made.forward), **clock(self._seconds))

    def _restore(self, made: GraphModule, records: tuple[Step, ...]) -> None:
        if made is self.graph.gm:
            for step in reversed(records):
                undo(self.graph.gm, step)

    def follow(self, transformation: Transformation, other: StepResult) -> None:
        """Apply one transformation where it stays in the graph of another call of the same layers.

        Args:
            transformation: The transformation.
            other: What came of it there.
        """
        if not other.kept:
            return
        self.graph.gm, records = _applied(transformation, self.graph.gm)
        result = _result(self.graph.name, transformation, records)
        kept = bool(result.applied)
        self.results.append(
            replace(result, kept=kept, reason=f"as in {other.graph}" if kept else _why_nothing(records))
        )

    def take_back(self, index: int, reason: str) -> None:
        """Undo what one of the results stands for.

        Args:
            index: Which of `results`.
            reason: Why.
        """
        result = self.results[index]
        standing = {step.id for step in history(self.graph.gm)}
        for step in reversed(result.records):
            if step.id in standing:
                undo(self.graph.gm, step)
        self.results[index] = replace(result, kept=False, reason=reason)


def _applied(transformation: Transformation, gm: GraphModule) -> tuple[GraphModule, tuple[Step, ...]]:
    """What a transformation makes of a graph, and what the history says of it."""
    known = {step.id for step in history(gm)}
    with _without_remarks():
        made = transformation(gm)
    return made, tuple(step for step in history(made) if step.id not in known)


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Without the warning that a transformation found nothing: of a preset most do not, and the steps say so."""
    thread = threading.get_ident()

    def remark(record: logging.LogRecord) -> bool:
        return record.thread != thread or "rewrote nothing" not in record.msg

    logger = logging.getLogger("regraft")
    logger.addFilter(remark)
    try:
        yield
    finally:
        logger.removeFilter(remark)


def clock(seconds: float, pause: float = 0.0) -> dict[str, Any]:
    """The settings of `compare_speed` for a measurement that is to take about so long.

    Args:
        seconds: How long.
        pause: How long to wait before each block, in seconds.
    """
    warmup, block = min(0.2, seconds / 5), min(max(0.01, pause), seconds / 20)  # a wait is not to outweigh the work
    return {"min_seconds": seconds, "warmup_seconds": warmup, "block_seconds": block, "pause_seconds": pause}


def _result(name: str, transformation: Transformation, records: Sequence[Step]) -> StepResult:
    arguments = records[0].arguments if len(records) == 1 else ""
    return StepResult(
        graph=name,
        transformation=f"{type(transformation).__name__.lstrip('_')}({arguments})",
        kept=False,
        reason="",
        applied=sum(len(step.applied) for step in records),
        refused=sum(len(step.refused) for step in records),
        preserves=transformation.preserves_computation,
        comparison=None,
        records=tuple(records),
    )


def _why_nothing(records: Sequence[Step]) -> str:
    refusals = [refusal for step in records for refusal in step.refused]
    if not refusals:
        return "nothing to do: no candidate site"
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return f"nothing done, {refusals[0].where} was refused: {refusals[0].reason}{more}"


def worst_sentence(found: Verification) -> str:
    """What is wrong by most, as the end of a sentence.

    Args:
        found: A verification that is not ok.
    """
    for case in found.cases:
        for problem in case.problems:
            return f"on {case.label} {problem}"
    if found.worst is None:
        return "the results differ"
    case, leaf = found.worst
    return f"on {case.label} {leaf.name} {leaf.problem}"
