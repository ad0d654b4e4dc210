"""Is one program faster than another, on this machine, now?

Both run in pairs of short blocks, in an order that alternates from pair to pair, so that a clock that slows down or a
neighbour who wakes up strikes both alike. The ratio of each pair is what is looked at: its median, and the interval
between two of its order statistics that holds the true median with 95 % probability whatever the distribution (the
sign test turned round; Conover, Practical Nonparametric Statistics, 3.2). No random numbers: equal times, equal answer.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from regraft.core.expect import expect_number

# Twelve, because the interval may then leave out two at either end, where with ten it is one. Fewer where all of them
# fall on one side of 1: eight, since of two equal programs that happens in 0.8 % of all cases, and both looks err in
# under 5 %; six where each is off 1 by a tenth, and four where each is by a quarter, which of equal programs is rarer
# still. And fewer where so many fall on either side that 1 is in the interval of all, whatever the others are.
MIN_PAIRS = 12
_ENOUGH = {4: 1.25, 6: 1.1, 8: 1.0}
# What disturbs a call of ten milliseconds by a quarter is a few percent of one that takes a second. So where a block
# takes longer than all were to take, two pairs are enough where each is off 1 by a tenth, and four where by 3 %.
_ENOUGH_OF_SLOW = {**_ENOUGH, 2: 1.1, 4: 1.03}
# On a busy machine: go on for so many times as long while the interval is wider than this part of the ratio.
_PATIENCE, _WIDE = 2, 0.1


@dataclass(frozen=True)
class Comparison:
    """Two programs timed against each other.

    Args:
        baseline_seconds: Median time of one call of the baseline, in seconds.
        candidate_seconds: Median time of one call of the candidate, in seconds.
        ratio: Median over pairs of candidate's time over baseline's; below 1 the candidate is faster.
        low: Lower end of the 95 % interval of the ratio.
        high: Upper end.
        ratios: The ratio of every pair, in the order measured.
        calls: Calls per block.
        times: Seconds of one call of the baseline and of the candidate, for every pair.
    """

    baseline_seconds: float
    candidate_seconds: float
    ratio: float
    low: float
    high: float
    ratios: tuple[float, ...]
    calls: int
    times: tuple[tuple[float, float], ...] = ()

    @property
    def pairs(self) -> int:
        """How many pairs of blocks were measured."""
        return len(self.ratios)

    @property
    def faster(self) -> bool:
        """Whether the interval lies wholly below 1."""
        return self.high < 1

    @property
    def slower(self) -> bool:
        """Whether the interval lies wholly above 1."""
        return self.low > 1

    @property
    def reason(self) -> str:
        """The decision as a sentence."""
        if self.faster:
            return f"faster: {self.describe()}, an interval wholly below 1"
        if self.slower:
            return f"slower: {self.describe()}, an interval wholly above 1"
        return f"no difference shown: {self.describe()}, an interval that contains 1"

    def describe(self) -> str:
        """The ratio with its interval.

        >>> Comparison(1.0, 0.9, 0.9, 0.88, 0.91, (0.9,) * 40, 1).describe()
        '0.90x the time (95% 0.88–0.91, 40 pairs)'
        """
        digits = 2 if abs(self.ratio - 1) >= 0.02 else 3
        held = "95% " if 2 * 0.5**self.pairs <= 0.05 else "all in "  # fewer pairs are between their ends less often
        within = f"{held}{self.low:.{digits}f}–{self.high:.{digits}f}"
        return f"{self.ratio:.{digits}f}x the time ({within}, {self.pairs} pairs)"

    def __str__(self) -> str:
        """`reason`, with the times."""
        return f"{self.reason} ({_milliseconds(self.baseline_seconds)} -> {_milliseconds(self.candidate_seconds)})"

    def to_dict(self) -> dict[str, Any]:
        """Everything as a plain dictionary; times in seconds."""
        plain = dict(vars(self), ratios=list(self.ratios), times=[list(pair) for pair in self.times])
        return dict(plain, pairs=self.pairs, faster=self.faster, reason=self.reason)


def compare_speed(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    min_seconds: float = 1.0,
    warmup_seconds: float = 0.2,
    block_seconds: float = 0.01,
    pause_seconds: float = 0.0,
    min_pairs: int = MIN_PAIRS,
    max_pairs: int = 200,
    grad: bool = False,
    timer: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time two programs in alternating pairs.

    Args:
        baseline: Called without arguments.
        candidate: Likewise.
        min_seconds: Measure for at least this long in all, unless `max_pairs` are reached. On a busy machine, where the
            interval is wider than a tenth of the ratio, for up to twice as long.
        warmup_seconds: Run each for at least this long first, and at least twice (compilers, caches, clocks). The
            last call of each is the first pair where a block is one call and there is no pause. 0 for programs that
            have run just now: the first call is timed.
        block_seconds: A block repeats its call until it takes about this long, so that the timer's grain and the
            call's own noise average out.
        pause_seconds: Before each block, wait for so long, and make one call that is not timed: for programs that have
            threads of their own, which go on spinning after a call and slow whatever runs next.
        min_pairs: At least so many pairs; or 8 that agree, 6 of which each differs by a tenth, 4 of which each does by
            a quarter, or as many as show that 12, or `max_pairs` if that is less, would tell no difference. Of calls
            that take longer than `min_seconds` each, also 4 that differ by 3 %, or 2 that do by a tenth.
        max_pairs: Stop here.
        grad: Time with gradients recorded; by default they are not, as in inference.
        timer: The clock, in seconds.

    Returns:
        The ratio with its interval.

    Raises:
        TypeError: An argument is not callable, or a limit no number.
        ValueError: A limit is not positive or not finite, or the pause or the warming up is negative.

    >>> import torch
    >>> small, large = torch.randn(8, 8), torch.randn(512, 512)
    >>> result = compare_speed(lambda: large @ large, lambda: small @ small, min_seconds=0.05, warmup_seconds=0.01)
    >>> result.faster
    True
    """
    for name, program in (("baseline", baseline), ("candidate", candidate)):
        if not callable(program):
            raise TypeError(f"{name} is a {type(program).__name__}; pass a call: {name}=lambda: model(x)")
    positive = {"min_seconds": min_seconds, "block_seconds": block_seconds}
    positive |= {"min_pairs": min_pairs, "max_pairs": max_pairs}
    for name, limit in {**positive, "warmup_seconds": warmup_seconds, "pause_seconds": pause_seconds}.items():
        shown = f"compare_speed(baseline, candidate, {name}={20 if name in ('min_pairs', 'max_pairs') else 0.5})"
        expect_number(limit, name, shown, zero=name not in positive)
    with torch.set_grad_enabled(grad):
        # The slower of the two sets the calls per block: the same number for both, so that both average alike.
        warm = [_warm(program, warmup_seconds, timer) for program in (baseline, candidate)]
        slowest = max(min(times) for times in warm)
        calls = max(1, round(block_seconds / slowest)) if slowest > 0 else 100
        times = [(warm[0][-1], warm[1][-1])] if calls == 1 and not pause_seconds else []
        block = partial(_block, calls=calls, pause=pause_seconds, timer=timer)
        leave_out = _outside(min(max_pairs, MIN_PAIRS))
        goes_on = partial(_goes_on, min_seconds=min_seconds, pairs=min_pairs, leave_out=leave_out)
        _measure(times, partial(block, baseline), partial(block, candidate), goes_on, max_pairs, timer)
    ratios = tuple(ours / theirs for theirs, ours in times)
    low, high = median_interval(ratios)
    return Comparison(
        statistics.median(pair[0] for pair in times) / calls,
        statistics.median(pair[1] for pair in times) / calls,
        statistics.median(ratios),
        low,
        high,
        ratios,
        calls,
        tuple((theirs / calls, ours / calls) for theirs, ours in times),
    )


def _measure(
    times: list[tuple[float, float]],
    baseline: Callable[[], float],
    candidate: Callable[[], float],
    goes_on: Callable[[list[tuple[float, float]], float], bool],
    max_pairs: int,
    timer: Callable[[], float],
) -> None:
    """Add pairs to those there are."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = timer()
        # An even number of pairs, so that each program goes first as often as the other.
        while len(times) < max_pairs and (len(times) % 2 or goes_on(times, timer() - start)):
            if len(times) % 2 == 0:
                first = baseline()
                times.append((first, candidate()))
            else:
                first = candidate()
                times.append((baseline(), first))
    finally:
        if collecting:
            gc.enable()


def _goes_on(times: list[tuple[float, float]], spent: float, min_seconds: float, pairs: int, leave_out: int) -> bool:
    if len(times) < pairs:
        ahead, behind = (sum(a < b for a, b in times), sum(b < a for a, b in times))
        slow = min(map(min, times), default=0.0) > min_seconds
        off = (_ENOUGH_OF_SLOW if slow else _ENOUGH).get(len(times), math.inf)
        clear = all(b > off * a for a, b in times) or all(a > off * b for a, b in times)
        return spent < min_seconds or not (clear or min(ahead, behind) > leave_out)
    if not min_seconds <= spent < _PATIENCE * min_seconds:
        return spent < min_seconds
    # Asks for the width alone: to go on until the interval excludes 1 would find differences where there are none.
    ratios = tuple(ours / theirs for theirs, ours in times)
    low, high = median_interval(ratios)
    return high - low > _WIDE * statistics.median(ratios)


def _warm(program: Callable[[], object], seconds: float, timer: Callable[[], float]) -> list[float]:
    """The times of a program's calls but the first, in seconds; of the first where it need not be warmed up."""
    start = timer()
    if seconds > 0:
        program()
    times: list[float] = []
    while not times or (times[-1] > 0 and timer() - start < seconds):  # 0 where it is finer than the timer
        before = timer()
        program()
        synchronize()
        times.append(timer() - before)
    return times


def _block(program: Callable[[], object], calls: int, pause: float, timer: Callable[[], float]) -> float:
    if pause:
        time.sleep(pause)
        program()
    synchronize()
    start = timer()
    for _ in range(calls):
        program()
    synchronize()
    return max(timer() - start, 1e-12)


def synchronize() -> None:
    """Wait for what a call has started: on an accelerator kernels run on after it has returned."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def median_interval(values: tuple[float, ...], confidence: float = 0.95) -> tuple[float, float]:
    """The order statistics that hold the true median with at least the given probability.

    Args:
        values: Independent measurements; fewer than six cannot give 95 %, and their whole range comes back.
        confidence: The probability.

    >>> median_interval(tuple(float(i) for i in range(1, 21)))
    (6.0, 15.0)
    """
    ordered = sorted(values)
    k = _outside(len(ordered), confidence)
    return ordered[k], ordered[len(ordered) - 1 - k]


def _outside(n: int, confidence: float = 0.95) -> int:
    """How many of n values may be cut off each end while the chance that the median is outside stays allowed."""
    outside, k = 2 * 0.5**n, 0
    while k + 1 <= (n - 1) // 2 and outside + 2 * math.comb(n, k + 1) * 0.5**n <= 1 - confidence:
        k += 1
        outside += 2 * math.comb(n, k) * 0.5**n
    return k


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
