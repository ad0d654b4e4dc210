"""A linear layer by whichever product is the fastest here: torch's own, or oneDNN's or MKL's with packed weights.

Which it is depends on the processor, the sizes and the number of threads: on one machine MKL's packed product wins, on
another oneDNN's takes half of its time, and without AVX-512 oneDNN's convolutions are faster than its products. So each
is timed once for a size, at the first call of that size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations._activations import NONE, Activation
from regraft.transformations._packed import SIZES, Packed
from regraft.transformations._pixels import image_of

PLAIN, ONEDNN, MKL, PIXELS = "plain", "onednn", "mkl", "pixels"
FOR_ROWS = {MKL, PIXELS}
"""The ways that pack a weight for one number of rows."""
PREFERENCE = {PLAIN: 0.95, ONEDNN: 1.0, MKL: 1.05, PIXELS: 1.05}
"""Times are multiplied by this: a plain product needs no copy of the weight, oneDNN's one, and others one a size."""
AS_GOOD = 1.1
"""In a program a convolution may take so many times a product's time: what follows costs nothing in its kernel."""
AHEAD = 0.98
"""In a program another product may take so much of the time of oneDNN's."""
ROUNDS, FEW_ROUNDS, LONG = 8, 2, 0.02
"""How often each way is timed, and how often where one takes so many seconds; its shortest time counts."""
CACHE, LARGE = 1 << 22, 1 << 18
"""More bytes than a core's own cache has; and from how many on a weight is not found there when its turn comes."""
PACKS = 2
"""So many copies of a weight are kept that are packed for one number of rows each."""

_TIMES: dict[Any, dict[str, float]] = {}
_SUMS: dict[Any, float] = {}
_BY_PIXELS: dict[Any, bool] = {}
"""What was found for a size."""


class PackedLinear(Packed, nn.Linear):
    """`activation(x W^T + b)`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """`input` is (..., in_features)."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if weight is None or not mkldnn.usable(input, weight, bias) or input.ndim < 2 or not input.numel():
            return self.activation.plain(F.linear(input, self.weight, self.bias))
        packs, rows = self._fresh(weight), input.numel() // weight.shape[1]
        way, packed = packs.get(rows) or self._choose(input, weight, bias, packs, rows)
        return _compute(way, packed, input, weight, bias, rows, self.activation)

    def _choose(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, packs: dict[Any, Any], rows: int
    ) -> tuple[str, Tensor | None]:
        """How to compute this call, and with what."""
        again, self._copies.rows = self._copies.rows == rows, rows
        way = ranked(x, weight, bias, rows, self.activation)[0]
        packed: Tensor | None = packs.get(ONEDNN)
        if way in FOR_ROWS and not again:  # a number of rows that comes twice running is worth a copy
            return (PLAIN, None) if packed is None else (ONEDNN, packed)
        if way != ONEDNN or packed is None:  # which packs for any number of rows
            packed = _pack(way, weight, rows)
        others = list(packs.items())  # other threads may add some
        for_rows = [key for key, found in others if key != ONEDNN and found[0] in FOR_ROWS]
        if len(packs) >= SIZES:
            packs.clear()
        elif way in FOR_ROWS and len(for_rows) >= PACKS:
            packs.pop(for_rows[0], None)
        if way == ONEDNN:
            packs[ONEDNN] = packed
        packs[rows] = way, packed
        return way, packed


def ranked(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, activation: Activation) -> tuple[str, ...]:
    """The ways to compute a layer, the fastest first, as timed at the first call of about so many rows.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,), or None.
        rows: Of how many rows `x` is.
        activation: What follows.
    """
    if torch.are_deterministic_algorithms_enabled():  # what is the fastest may be another in another process
        return (PLAIN,)
    times = _times(x, weight, bias, rows, activation)
    return tuple(sorted(times, key=lambda way: times[way] * PREFERENCE[way]))


def way_in_program(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, joined: bool = False) -> str:
    """The fastest way for a program made for these rows; oneDNN's kernel where no other is ahead of it.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,), or None.
        activation: What follows.
        joined: Whether another tensor is added or multiplied, which oneDNN's kernel does for nothing.
    """
    rows = x.numel() // weight.shape[1]
    another = rows == 1 or mkldnn.works(mkldnn.MKL, weight.dtype)
    if torch.are_deterministic_algorithms_enabled() or not another:
        return ONEDNN
    times = _times(x, weight, bias, rows, activation)
    others = [way for way in times if way != ONEDNN and (way != PLAIN or rows == 1)]  # of more rows it would fuse that
    way = min(others, key=times.__getitem__, default=ONEDNN)
    if way == ONEDNN or ONEDNN not in times:
        return ONEDNN
    after = _time_of_a_sum(rows, weight) if joined else 0.0
    return way if times[way] + after < AHEAD * times[ONEDNN] else ONEDNN


def _times(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, activation: Activation) -> dict[str, float]:
    size = _size(weight, bias, rows, activation)
    if size not in _TIMES:
        ways = [PLAIN]
        ways += [ONEDNN] if mkldnn.computed_in(mkldnn.LINEAR, weight.dtype, activation) is not None else []
        ways += [MKL] if mkldnn.works(mkldnn.MKL, weight.dtype) else []
        ways += [PIXELS] if rows > 1 and mkldnn.computed_in(mkldnn.PIXELS, weight.dtype, activation) is not None else []
        packs = {way: _pack(way, weight, rows) for way in ways}
        times = seconds(
            *(_computing(way, packs[way], x, weight, bias, rows, activation) for way in ways), cold=_is_large(weight)
        )
        _TIMES[size] = dict(zip(ways, times, strict=True))
    return _TIMES[size]


def _time_of_a_sum(rows: int, weight: Tensor) -> float:
    size = rows, len(weight), weight.dtype, torch.get_num_threads()
    if size not in _SUMS:
        result = torch.ones(rows, len(weight), dtype=weight.dtype)
        (_SUMS[size],) = seconds(lambda: result + result)
    return _SUMS[size]


def as_good_by_pixels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN computes a layer as fast as a convolution as by a product, in a program that has the image.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,), or None.
    """
    rows = x.numel() // weight.shape[1]
    if torch.are_deterministic_algorithms_enabled() or rows < 2 or not mkldnn.works(mkldnn.PIXELS, weight.dtype):
        return False
    size = _size(weight, bias, rows, NONE)
    if size not in _BY_PIXELS:
        image, packed = image_of(x), mkldnn.pack_pixels(weight, rows)
        product = _computing(ONEDNN, _pack(ONEDNN, weight, rows), x, weight, bias, rows, NONE)
        by_pixels, by_product = seconds(
            lambda: mkldnn.conv(image, packed, bias, mkldnn.BY_PIXEL, NONE), product, cold=_is_large(weight)
        )
        _BY_PIXELS[size] = by_pixels < AS_GOOD * by_product
    return _BY_PIXELS[size]


def _size(weight: Tensor, bias: Tensor | None, rows: int, activation: Activation) -> tuple[Any, ...]:
    return (rows - 1).bit_length(), weight.shape, weight.dtype, bias is not None, activation, torch.get_num_threads()


def seconds(*calls: Callable[[], Any], cold: bool = False) -> list[float]:
    """The shortest time of each call, in seconds; they take turns, so that what disturbs one disturbs all.

    Args:
        *calls: The calls.
        cold: Whether the caches are filled with something else before each, as by the other layers of a network.
    """
    others = torch.ones(torch.get_num_threads() * CACHE // 4 if cold else 0)
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < (ROUNDS if max(map(sum, times)) < LONG else FEW_ROUNDS):
        for call, its in zip(calls, times, strict=True):
            others.sum()
            start = time.perf_counter()
            call()
            its.append(time.perf_counter() - start)
    return list(map(min, times))


def _is_large(weight: Tensor) -> bool:
    return weight.numel() * weight.element_size() >= LARGE


def _computing(*arguments: Any) -> Callable[[], Tensor]:
    return lambda: _compute(*arguments)


def _pack(way: str, weight: Tensor, rows: int) -> Tensor | None:
    if way == PLAIN:
        return None
    if way == MKL:
        return mkldnn.pack_sgemm(weight, rows)
    if way == PIXELS:
        return mkldnn.pack_pixels(weight.to(mkldnn.computed_in(mkldnn.PIXELS, weight.dtype)), rows)
    return mkldnn.pack_linear(weight.to(mkldnn.computed_in(mkldnn.LINEAR, weight.dtype)))


def _compute(
    way: str, packed: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, activation: Activation
) -> Tensor:
    if way in (ONEDNN, PIXELS):
        return _by_onednn(way, packed, x, bias, activation)
    product = mkldnn.sgemm(x, packed, weight, bias, rows) if way == MKL else F.linear(x, weight, bias)
    return activation.write(product)


def _by_onednn(way: str, packed: Tensor, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    if packed.dtype is not x.dtype:
        offset = None if bias is None else bias.to(packed.dtype)
        return _by_onednn(way, packed, x.to(packed.dtype), offset, activation).to(x.dtype)
    if way == PIXELS:
        return mkldnn.by_pixels(x, packed, bias, activation)
    if mkldnn.slower_inside(activation.name):
        return activation.write(mkldnn.linear(x, packed, bias, NONE))
    return mkldnn.linear(x, packed, bias, activation)
