"""Paired timing, against a clock of the test's own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from regraft.verify import compare_speed, measure
from regraft.verify.measure import median_interval


class Clock:
    """Time passes only when a program runs."""

    def __init__(self) -> None:
        self.now, self.drift, self.order = 0.0, 1.0, ""

    def __call__(self) -> float:
        return self.now

    def program(self, name: str, seconds: float, noise: float = 0.0, seed: int = 0) -> Callable[[], None]:
        rng = random.Random(seed)

        def run() -> None:
            self.order += name
            self.now += seconds * self.drift * (1 + noise * rng.uniform(-1, 1))
            self.drift *= 1.001

        return run


def compare(clock: Clock, a: Callable[[], Any], b: Callable[[], Any], **options: Any) -> Any:
    limits = {"block_seconds": 1e-9, "min_seconds": 15.0, "warmup_seconds": 0.01, **options}
    return compare_speed(a, b, timer=clock, **limits)


@pytest.mark.parametrize(("candidate", "faster", "slower"), [(0.8, True, False), (1.25, False, True)])
def test_a_difference_is_decided(candidate: float, faster: bool, slower: bool) -> None:
    clock = Clock()
    found = compare(clock, clock.program("a", 0.01, 0.1), clock.program("b", 0.01 * candidate, 0.1, 7))
    assert (found.faster, found.slower) == (faster, slower)
    assert found.ratio == pytest.approx(candidate, rel=0.1)
    assert found.low <= found.ratio <= found.high
    assert ("below 1" in found.reason) is faster
    assert found.to_dict()["faster"] is faster


def test_equal_programs_are_called_equal_though_the_clock_drifts() -> None:
    wrong = 0
    for seed in range(40):
        clock = Clock()
        found = compare(clock, clock.program("a", 0.01, 0.1, seed), clock.program("b", 0.01, 0.1, 1000 + seed))
        wrong += found.faster or found.slower
    assert wrong <= 6  # 5 % of 40 is 2


def test_the_order_alternates() -> None:
    clock = Clock()
    found = compare(clock, clock.program("a", 0.01), clock.program("b", 0.01), max_pairs=20)
    assert clock.order.endswith("abba" * 5)
    assert found.pairs % 2 == 0


def test_a_pause_keeps_the_threads_of_one_program_out_of_the_time_of_the_other(monkeypatch) -> None:
    for pause, low in ((0.0, 1 / 3), (0.03, 1.0)):
        clock, waited = Clock(), []
        plain, spins = clock.program("a", 0.01), clock.program("b", 0.01)

        def slowed(clock=clock, plain=plain) -> None:
            plain()
            if clock.order[-2:-1] == "b":  # whose threads spin on
                clock.now += 0.02

        def wait(seconds: float, clock=clock, waited=waited) -> None:
            clock.order += "."
            waited.append(seconds)

        monkeypatch.setattr(measure.time, "sleep", wait)
        found = compare(clock, slowed, spins, max_pairs=20, pause_seconds=pause)
        assert found.low == pytest.approx(low, rel=0.05)  # half of the plain program's blocks come after the other's
        assert set(waited) == ({pause} if pause else set())
        assert clock.order.endswith(".aa.bb.bb.aa" if pause else "abba")
    with pytest.raises(ValueError, match=r"pause_seconds=-1, .*compare_speed\(baseline, candidate, pause_seconds="):
        compare(clock, plain, spins, pause_seconds=-1)


def test_pairs_and_repeats_are_bounded() -> None:
    clock = Clock()
    slow = compare(clock, clock.program("a", 10.0, 0.1), clock.program("b", 10.0, 0.1, 7))
    assert slow.pairs == 8, "three on either side"
    clock = Clock()
    assert compare(clock, clock.program("a", 10.0), clock.program("b", 9.5)).pairs == 8, "they agree"
    assert slow.calls == 1
    clock = Clock()
    short = compare_speed(
        clock.program("a", 1e-4),
        clock.program("b", 1e-4),
        timer=clock,
        block_seconds=1e-2,
        min_seconds=99,
        max_pairs=12,
    )
    assert short.pairs == 12
    assert short.calls > 10
    assert short.baseline_seconds == pytest.approx(1e-4, rel=10)


@pytest.mark.parametrize(
    ("later", "pairs"),  # which of the pairs the candidate loses
    [("xoxoxo", 6), ("ooooxxx", 8), ("ooooooox", 12), ("xxooooooo", 12), ("xxooooooooox", 12), ("oxooxooooox", 12)],
)
def test_what_twelve_pairs_could_not_tell_is_not_measured_on(later: str, pairs: int) -> None:
    clock, calls = Clock(), iter("o" + later + 10 * "o")

    def candidate() -> None:
        clock.now += {"o": 9.5, "x": 10.5}[next(calls)]

    found = compare(clock, clock.program("a", 10.0), candidate)
    losses = (later + 10 * "o")[:pairs].count("x")
    assert (found.pairs, found.faster) == (pairs, losses <= 2)
    assert found.low <= 1 <= found.high or losses <= 2


@pytest.mark.parametrize(
    ("seconds", "pairs"),
    [
        ([9.0] * 6, 6),
        ([11.1] * 6, 6),
        ([9.3] * 6, 8),
        ([10.7] * 6, 8),
        ([9.0] * 5 + [9.5], 8),
        ([5.0] * 3 + [9.5] * 2 + [20.0], 12),
        ([9.0] * 3 + [11.1] * 3, 6),
        ([7.9] * 4, 4),
        ([12.7] * 4, 4),
        ([8.1] * 4, 6),
        ([7.9] * 3 + [8.1], 6),
        ([5.0] * 3 + [20.0], 12),
    ],
)
def test_the_further_off_each_pair_is_the_fewer_are_enough(seconds: list[float], pairs: int) -> None:
    clock, times = Clock(), iter([1.0, *seconds, *[seconds[0]] * 10])

    def candidate() -> None:
        clock.now += next(times)

    assert compare(clock, clock.program("a", 10.0), candidate).pairs == pairs


@pytest.mark.parametrize(
    ("seconds", "pairs"),
    [
        ([9.0] * 2, 2),
        ([11.1] * 2, 2),
        ([9.2] * 4, 4),
        ([10.4] * 4, 4),
        ([9.0, 9.2, 9.0, 9.0], 4),
        ([9.0, 11.1, 9.0, 9.0, 9.0, 9.0], 12),
        ([9.8] * 8, 8),
        ([9.0, 9.8, 9.0, 9.0, 9.0, 9.0], 8),
        ([9.1, 9.1, 9.1, 9.8, 9.0, 9.0], 8),
    ],
)
@pytest.mark.parametrize("asked", [8.0, 9.9])
def test_of_calls_that_take_longer_than_was_asked_fewer_are_enough(seconds, pairs: int, asked: float) -> None:
    """Of both programs: not where one of them takes 9 seconds, and 9.9 were asked."""
    clock, times = Clock(), iter([1.0, *seconds, *[seconds[0]] * 12])

    def candidate() -> None:
        clock.now += next(times)

    found = compare(clock, clock.program("a", 10.0), candidate, min_seconds=asked)
    slow = asked < min(seconds[:2])
    assert found.pairs == pairs if slow else found.pairs >= 6


def test_slow_programs_that_are_equal_are_called_so() -> None:
    """With each call off by up to 5 % in either direction."""
    wrong = 0
    for seed in range(400):
        clock = Clock()
        a, b = clock.program("a", 10.0, 0.05, seed), clock.program("b", 10.0, 0.05, 1000 + seed)
        found = compare(clock, a, b, min_seconds=1.0)
        wrong += found.faster or found.slower
    assert wrong <= 20  # 5 %


@pytest.mark.parametrize(("most", "pairs"), [(6, 2), (8, 2), (10, 4), (12, 6), (40, 6)])
def test_the_fewer_pairs_there_may_be_the_sooner_they_can_tell_nothing(most: int, pairs: int) -> None:
    """Of six, one on either side puts 1 into the interval; of ten, two do, and of twelve, three."""
    clock, calls = Clock(), iter("ooxxoxox" + 10 * "o")

    def candidate() -> None:
        clock.now += {"o": 9.5, "x": 10.5}[next(calls)]

    found = compare(clock, clock.program("a", 10.0), candidate, max_pairs=most)
    assert found.pairs == pairs
    assert found.low < 1 < found.high


def test_what_is_in_all_of_a_few_pairs_is_not_called_95_percent() -> None:
    """Of five values or fewer the median of what they are drawn from is between the ends in 94 % or less."""
    six, five = (measure.Comparison(1.0, 0.5, 0.5, 0.45, 0.55, (0.5,) * n, 1) for n in (6, 5))
    assert six.describe() == "0.50x the time (95% 0.45–0.55, 6 pairs)"
    assert five.describe() == "0.50x the time (all in 0.45–0.55, 5 pairs)"


@pytest.mark.parametrize(("seconds", "calls"), [(0.01, 2), (15.0, 2), (25.0, 3)])
def test_the_first_call_counts_as_warming_up(seconds: float, calls: int) -> None:
    clock = Clock()
    compare_speed(clock.program("a", 10.0), clock.program("b", 10.0), timer=clock, warmup_seconds=seconds, max_pairs=2)
    assert clock.order == "a" * calls + "b" * calls + "ba"


@pytest.mark.parametrize(("pause", "order"), [(0.0, "aabbbba"), (0.03, "aabbbaabbbbaa")])
def test_the_last_calls_of_warming_up_are_a_pair_where_a_block_is_one_call(
    pause: float, order: str, monkeypatch
) -> None:
    """Not with a pause, which none was made before."""
    clock = Clock()
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    a, b = clock.program("a", 10.0), clock.program("b", 8.0)
    found = compare_speed(a, b, timer=clock, warmup_seconds=20.0, max_pairs=2, pause_seconds=pause)
    assert clock.order == order
    assert found.pairs == 2
    assert found.ratio == pytest.approx(0.8, rel=0.01)
    warm = Clock()
    found = compare_speed(warm.program("a", 10.0), warm.program("b", 8.0), timer=warm, warmup_seconds=0, max_pairs=2)
    assert (warm.order, found.pairs) == ("abba", 2), "of what has just run the first call is timed"
    short = Clock()
    again = compare_speed(
        short.program("a", 1e-3), short.program("b", 1e-3), timer=short, max_pairs=2, warmup_seconds=0
    )
    assert (again.calls, short.order) == (10, "ab" + 10 * "a" + 20 * "b" + 10 * "a")


def test_calls_finer_than_the_timer_are_warmed_up_once_and_timed_by_the_hundred() -> None:
    order: list[str] = []
    reads = iter(range(1000))  # a loop that waits for this clock to move would not end

    def still() -> float:
        next(reads)
        return 0.0

    found = compare_speed(
        lambda: order.append("a"), lambda: order.append("b"), timer=still, warmup_seconds=1.0, max_pairs=2
    )
    assert found.calls == 100
    assert "".join(order).startswith("aabb" + 100 * "a")


def test_the_fastest_call_of_warming_up_says_how_many_make_a_block() -> None:
    clock, times = Clock(), iter([1.0, 0.9, 0.1, 0.5])

    def uneven() -> None:
        clock.now += next(times, 0.1)

    found = compare_speed(
        uneven, clock.program("b", 0.05), timer=clock, warmup_seconds=2.2, block_seconds=1.0, max_pairs=2
    )
    assert found.calls == 10


def test_fewer_pairs_are_enough_for_who_asks_for_fewer() -> None:
    for few, pairs in ((6, 6), (12, 12)):
        clock, times = Clock(), iter([9.9, *[9.8, 9.9, 10.1, 9.9, 9.9, 9.9, 10.1] + [9.9] * 5])

        def candidate(clock=clock, times=times) -> None:
            clock.now += next(times)

        found = compare(clock, clock.program("a", 10.0), candidate, min_pairs=few)
        assert found.pairs == pairs
    with pytest.raises(ValueError, match="min_pairs=0, but has to be positive"):
        compare(clock, candidate, candidate, min_pairs=0)


def test_the_same_times_give_the_same_answer() -> None:
    results = []
    for _ in range(2):
        clock = Clock()
        results.append(compare(clock, clock.program("a", 0.01, 0.1, 1), clock.program("b", 0.009, 0.1, 2)))
    assert results[0] == results[1]


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(1000):
        low, high = median_interval(tuple(rng.expovariate(1.0) for _ in range(25)))
        covered += low <= math.log(2) <= high
    assert 940 <= covered <= 990
    assert median_interval((1.0, 2.0)) == (1.0, 2.0)


def test_gradients_are_off_unless_asked_for() -> None:
    modes: list[bool] = []
    for grad in (False, True):
        compare_speed(
            lambda: modes.append(torch.is_grad_enabled()), lambda: None, grad=grad, min_seconds=0.01, warmup_seconds=0
        )
        assert modes[-1] is grad
    with pytest.raises(TypeError, match="candidate is a int"):
        compare_speed(lambda: None, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_seconds"):
        compare_speed(lambda: None, lambda: None, min_seconds=0)
    with pytest.raises(ValueError, match="min_seconds=nan"):
        compare_speed(lambda: None, lambda: None, min_seconds=math.nan)
    with pytest.raises(TypeError, match="warmup_seconds='1', but takes a number"):
        compare_speed(lambda: None, lambda: None, warmup_seconds="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "longest"), [(0.01, 0.6), (0.9, 1.2)])
def test_on_a_busy_machine_it_takes_longer(noise: float, longest: float) -> None:
    clock = Clock()
    a, b = clock.program("a", 0.01, noise), clock.program("b", 0.01, noise, 7)
    found = compare(clock, a, b, min_seconds=0.5, max_pairs=10_000)
    spent = sum(a + b for a, b in found.times)
    assert longest / 1.5 < spent < longest
