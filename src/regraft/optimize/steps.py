"""Each transformation applied, measured against what was there before, and kept where it pays."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from regraft.core.history import history, undo
from regraft.core.journal import Step
from regraft.core.transformation import Transformation
from regraft.optimize.applying import applied
from regraft.optimize.graphs import Graph
from regraft.optimize.presets import PACKING
from regraft.optimize.step_result import StepResult, result_of, why_nothing
from regraft.verify import Comparison, compare_speed
from regraft.verify.measure import MIN_PAIRS, synchronize

logger = logging.getLogger("regraft")

_TOGETHER_PAIRS = 6
"""So many pairs judge steps of a slow model together: the fewest that tell a difference, where all of them agree."""


@dataclass(frozen=True)
class _Packing:
    """What packs, measured alone: what it gains, the graph as it was captured, packed, and what the history says."""

    transformation: Transformation
    comparison: Comparison
    gm: GraphModule
    records: tuple[Step, ...]


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
        self._packing: _Packing | None = None  # what packs, where it pays
        self._packed: GraphModule | None = None  # the graph as it stands, packed
        self._together: bool | None = None  # whether steps wait for one measurement of all of them,
        self._with_packing = False  # and what packs, too

    def anticipate(self, packing: Transformation, others: Sequence[Transformation]) -> None:
        """Measure what packs first, and if it pays, the other steps between packed layers: so they will run in the end.

        A merged layer may be slower than three where it is plain, and faster where it is packed. In a slow model what
        packs waits with the others, unless one of those is measured alone.

        Args:
            packing: The transformation that packs; it is the last to be taken.
            others: What is taken before it.
        """
        if not self._measured or self.graph.large:
            return
        self._with_packing = self._is_slow() and all(other.preserves_computation for other in others)
        if not self._with_packing:
            self._measure_packing(packing)

    def _measure_packing(self, packing: Transformation) -> None:
        try:
            packed, records = applied(packing, copy.copy(self.graph.gm))
            if not any(step.applied for step in records):
                return
            found = self._compared(self.graph.gm, packed)
            if found.faster:
                self._packing, self._packed = _Packing(packing, found, packed, records), packed
        except Exception as error:  # whatever a graph raises that was rewritten wrongly; `take` says so
            logger.info("%s is not measured packed: %s", self.graph.name, error)

    def take(self, transformation: Transformation) -> None:
        """Apply one transformation, and take it back where it is slower or fails.

        One that makes no difference that can be shown stays until `settle`, since a later one may stand on it. So does,
        unmeasured, one that preserves the computation, where to measure each alone would take longer than was asked.

        Args:
            transformation: The transformation.
        """
        before = copy.copy(self.graph.gm) if self._measured and not self._waits(transformation) else None
        made, records = applied(transformation, self.graph.gm)
        result = result_of(self.graph.name, transformation, records)
        self._taken.append(transformation)
        if not result.applied and made is self.graph.gm:
            self.results.append(replace(result, reason=why_nothing(records)))
            return
        if not self._measured:
            self.graph.gm = made
            self.results.append(replace(result, kept=True, reason='kept unmeasured, as keep="all" asks'))
            return
        if before is None:
            self._undecided.append(len(self.results))
            self.graph.gm, self._packed = made, None
            self.results.append(replace(result, kept=True))
            return
        packed = None
        try:
            if self._packing is None:
                comparison = self._compared(before, made)
            elif transformation is self._packing.transformation:
                comparison = self._packing.comparison
            else:
                packed = self._repacked(made)
                comparison = self._compared(self._packed or self._repacked(before), packed)
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

    def _waits(self, transformation: Transformation) -> bool:
        """Whether a step is measured with others alone: not one that costs accuracy, nor by itself one that packs."""
        packs = type(transformation).__name__ in PACKING
        if not transformation.preserves_computation or self.graph.large or (packs and not self._with_packing):
            return False
        return self._is_slow()

    def _is_slow(self) -> bool:
        """Whether to measure each step alone would take longer than was asked."""
        if self._together is None:
            run = self.graph.runner(self._captured.forward, shorter=True)
            self._together = 2 * MIN_PAIRS * min(_time_of(run), _time_of(run)) > self._seconds
        return self._together

    def _repacked(self, gm: GraphModule) -> GraphModule:
        assert self._packing is not None
        return applied(self._packing.transformation, copy.copy(gm))[0]

    def settle(self) -> None:
        """Judge together, with all other steps there, those that alone made no difference that could be shown.

        Where the graph is no faster with them than without, they are taken back. Where those that were not measured
        alone make it slower, or fail, it is found out which.
        """
        undecided, self._undecided = self._undecided, []
        if undecided:
            self._judge(undecided)
        self._packing = self._packed = None  # packed weights take as much room as the model's

    def _judge(self, undecided: Sequence[int]) -> None:
        alone = all(self.results[index].comparison is not None for index in undecided)
        try:
            left_out, records = self._without(undecided)
            few = {} if alone else {"max_pairs": MIN_PAIRS if self._with_packing else _TOGETHER_PAIRS}
            comparison = self._compared(left_out, self.graph.gm, **few)
            if comparison.slower and comparison.pairs < _TOGETHER_PAIRS:  # to time each alone takes longer than a look
                comparison = self._compared(left_out, self.graph.gm, **few)
        except Exception as error:  # the others alone were never run together
            logger.info("%s does not run with and without what is undecided: %s", self.graph.name, error)
            if not alone:
                self._take_each_alone()
            return
        if comparison.slower and not alone and len(undecided) > 1:
            self._take_each_alone()
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
                before, now = self.results[index], result_of(self.graph.name, self._taken[index], made)
                found = replace(before, applied=now.applied, refused=now.refused, records=now.records)
                if before.applied and not now.applied:  # it stood on what is gone
                    found = replace(found, kept=False, reason=f"nothing to do without {' and '.join(names)}")
                self.results[index] = found

    def _take_each_alone(self) -> None:
        """Begin again with the graph as it was captured, and measure each step."""
        taken, self._taken, self.results = self._taken, [], []
        self.graph.gm, self._packed, self._together = copy.copy(self._captured), None, False
        if self._with_packing:
            self._with_packing = False
            self._measure_packing(taken[-1])
        for transformation in taken:
            self.take(transformation)
        self.settle()

    def _without(self, indices: Sequence[int]) -> tuple[GraphModule, dict[int, tuple[Step, ...]]]:
        """The graph made anew without some of the steps that stand, and what its history says of the others."""
        others = [index for index, result in enumerate(self.results) if result.kept and index not in indices]
        if self._packing is not None and [self._taken[index] for index in others] == [self._packing.transformation]:
            return self._packing.gm, {others[0]: self._packing.records}  # whose weights are packed already
        gm, records = copy.copy(self._captured), {}
        for index in others:
            gm, records[index] = applied(self._taken[index], gm)
        return gm, records

    def _compared(self, before: GraphModule, made: GraphModule, **limits: Any) -> Comparison:
        both = self.graph.runner(before.forward, shorter=True), self.graph.runner(made.forward, shorter=True)
        return compare_speed(*both, **{**clock(self._seconds), **limits})

    def _restore(self, made: GraphModule, records: tuple[Step, ...]) -> None:
        for step in reversed(records) if made is self.graph.gm else ():
            undo(self.graph.gm, step)

    def follow(self, transformation: Transformation, other: StepResult) -> None:
        """Apply one transformation where it stays in the graph of another call of the same layers.

        Args:
            transformation: The transformation.
            other: What came of it there.
        """
        if not other.kept:
            return
        self.graph.gm, records = applied(transformation, self.graph.gm)
        result = result_of(self.graph.name, transformation, records)
        reason = f"as in {other.graph}" if result.applied else why_nothing(records)
        self.results.append(replace(result, kept=bool(result.applied), reason=reason))

    def take_back(self, index: int, reason: str) -> None:
        """Undo what one of the results stands for.

        Args:
            index: Which of `results`.
            reason: Why.
        """
        result = self.results[index]
        standing = {step.id for step in history(self.graph.gm)}
        for step in (step for step in reversed(result.records) if step.id in standing):
            undo(self.graph.gm, step)
        self.results[index] = replace(result, kept=False, reason=reason)


def _time_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        call()
    synchronize()
    return time.perf_counter() - start


def clock(seconds: float, pause: float = 0.0, call: float = 0.0) -> dict[str, Any]:
    """The settings of `compare_speed` for a measurement that is to take about so long.

    Args:
        seconds: How long.
        pause: How long to wait before each block, in seconds.
        call: How long a call takes. Where that is longer, it has been made before, and every call is timed.
    """
    warmup = 0.0 if call > seconds else min(0.2, seconds / 5)
    block = min(max(0.01, pause), seconds / 20)  # a wait is not to outweigh the work
    return {"min_seconds": seconds, "warmup_seconds": warmup, "block_seconds": block, "pause_seconds": pause}
