"""The charts of the page as SVG, in the colours of the page: errors by depth, times of calls, ratios of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from regraft.verify import Comparison, Depth

_WIDTH, _HEIGHT = 640.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 12.0, 12.0, 40.0
_MOST_BINS = 28
_FLOOR = 1e-18  # an error of zero has no logarithm


def depth(values: Sequence[Depth]) -> str:
    """The error of the values inside, before and after, from the first to the last of the graph.

    Args:
        values: in the order of the graph.
    """
    errors = [max(e, _FLOOR) for v in values for e in (v.reference_error, v.candidate_error) if math.isfinite(e)]
    if not errors:
        return ""
    above_zero = [e for e in errors if e > _FLOOR] or [1e-9]
    low, high = math.floor(math.log10(min(above_zero))), math.ceil(math.log10(max(above_zero)))
    high += low == high

    def y(error: float) -> float:
        error = error if math.isfinite(error) else 10.0**high
        exponent = math.log10(min(max(error, 10.0**low), 10.0**high))
        return _TOP + (high - exponent) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    ticks = [(y(10.0**e), f"1e{e:+03d}") for e in range(low, high + 1, max(1, (high - low) // 5))]
    parts = [_grid(ticks), _across("first value", "position in the graph", "last value")]
    kinds: list[tuple[str, Callable[[Depth], float]]] = [
        ("before", lambda v: v.reference_error),
        ("after", lambda v: v.candidate_error),
    ]
    for name, read in kinds:
        places = [(_x(v.position), y(read(v)), f"{v.where}: {read(v):.3g} {name}") for v in values]
        line = "L".join(f"{px:.1f} {py:.1f}" for px, py, _ in places)
        dots = "".join(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{escape(said)}</title></circle>'
            for px, py, said in places
        )
        parts.append(f'<g class="{name}"><path class="line" d="M{line}"/>{dots}</g>')
    return _chart("error against float64 along the graph, before and after", parts)


def times(result: Comparison) -> str:
    """How long the calls took, before and after, as two histograms over one axis.

    Args:
        result: the measurement.
    """
    if not result.times:
        return ""
    before, after = ([pair[i] * 1e3 for pair in result.times] for i in (0, 1))
    # The few calls that a busy machine held up would squeeze all others into one bar.
    ordered = sorted([*before, *after])
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.98))]
    high = high if high > low else low * 1.01 + 1e-9
    bins = min(_MOST_BINS, max(6, round(2 * len(before) ** 0.5)))
    counts = [_counts(values, low, high, bins) for values in (before, after)]
    most = max(max(c) for c in counts)

    def y(count: float) -> float:
        return _HEIGHT - _BOTTOM - count / most * (_HEIGHT - _TOP - _BOTTOM)

    step = max(1, math.ceil(most / 4))
    parts = [_grid([(y(c), str(c)) for c in range(0, most + 1, step)])]
    parts.append(_across(f"{low:.3g} ms", "one call (the slowest 2 % in the last bar)", f"{high:.3g} ms"))
    width = (_WIDTH - _LEFT - _RIGHT) / bins
    for name, bars in zip(("before", "after"), counts, strict=True):
        drawn = "".join(
            f'<rect class="bar" x="{_LEFT + i * width:.1f}" y="{y(c):.1f}" width="{width - 1:.1f}" '
            f'height="{_HEIGHT - _BOTTOM - y(c):.1f}"><title>{c} pairs {name}</title></rect>'
            for i, c in enumerate(bars)
            if c
        )
        median = (result.baseline_seconds if name == "before" else result.candidate_seconds) * 1e3
        at = _x(min(max((median - low) / (high - low), 0), 1))
        line = f"M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"
        mark = f'<path class="median" d="{line}"><title>median {median:.4g} ms</title></path>'
        parts.append(f'<g class="{name}">{drawn}{mark}</g>')
    return _chart("distribution of the time of a call, before and after", parts)


def interval(result: Comparison) -> str:
    """The ratio and its interval on a scale with 1 in it.

    Args:
        result: the measurement.
    """
    low, high = min(result.low, 1.0), max(result.high, 1.0)
    margin = (high - low) * 0.15 + 0.01
    low, high = low - margin, high + margin

    def x(ratio: float) -> float:
        return _LEFT + (ratio - low) / (high - low) * (_WIDTH - 2 * _LEFT)

    kind = "good" if result.faster else "bad" if result.slower else "even"
    return (
        f'<svg class="chart" role="img" aria-label="{escape(result.describe())}" viewBox="0 0 {_WIDTH} 62">'
        f'<path class="axis" d="M{_LEFT} 26H{_WIDTH - _LEFT}"/><path class="one" d="M{x(1):.1f} 8V44"/>'
        f'<text x="{x(1):.1f}" y="58" class="tick middle">1: as fast as before</text>'
        f'<g class="{kind}"><path class="range" d="M{x(result.low):.1f} 26H{x(result.high):.1f}"/>'
        f'<circle cx="{x(result.ratio):.1f}" cy="26" r="6"/></g></svg>'
    )


def share(part: float, whole: float) -> float:
    """How far a part goes towards a whole, from 0 to 1.

    Args:
        part: such as an error.
        whole: such as the error that is allowed.

    >>> share(1.0, 4.0), share(3.0, 0.0), share(0.0, 0.0)
    (0.25, 1.0, 0.0)
    """
    if not math.isfinite(part):
        return 1.0
    return min(part / whole, 1.0) if whole > 0 else float(part > 0)


def _counts(values: list[float], low: float, high: float, bins: int) -> list[int]:
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    return counts


def _x(position: float) -> float:
    return _LEFT + 6 + position * (_WIDTH - _LEFT - _RIGHT - 12)


def _grid(ticks: list[tuple[float, str]]) -> str:
    return "".join(
        f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{text}</text>'
        for y, text in ticks
    )


def _across(left: str, middle: str, right: str) -> str:
    y = _HEIGHT - 14
    return (
        f'<text class="tick" x="{_LEFT}" y="{y}">{escape(left)}</text>'
        f'<text class="tick middle" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{y}">{escape(middle)}</text>'
        f'<text class="tick end" x="{_WIDTH - _RIGHT}" y="{y}">{escape(right)}</text>'
    )


def _chart(title: str, parts: list[str]) -> str:
    inside = "".join(parts)
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{inside}</svg>'
