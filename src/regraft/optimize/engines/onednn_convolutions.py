"""Convolutions that oneDNN Graph does not know, or has a slow kernel for, in a form for which it has a fast one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from regraft.core.padding import padded_ends, per_axis
from regraft.core.vocabulary import Call
from regraft.optimize.engines.onednn_single import Env, Spelling, from_env
from regraft.transformations._mkldnn import padding_apart

Ends = tuple[int, int]


def convolution(call: Call, env: Env) -> Spelling | None:
    """A convolution in another form; None where it can stay as it is.

    With numbers for padding that is a word. Without padding that its kernel cannot do, which is put around the input
    before. Without the elements of the kernel that see nothing but zeros, as all but the middle one do where the steps
    between them are as wide as the image. One by channel over a single axis is over the pixels of a row: its kernels
    by channel are for images alone.

    Args:
        call: The convolution.
        env: The values of the nodes.
    """
    if _by_channel(call, env) and (row := row_convolution(call, env)) is not None:
        return lambda env: row(env).squeeze(2)
    geometry = _Geometry.of(call, env)
    if geometry is None or not (geometry.differs or isinstance(call["padding"], str)):
        return None
    return lambda env: geometry.compute(call, env)


def row_convolution(call: Call, env: Env) -> Spelling | None:
    """A convolution over one axis as one over the pixels of a row: its image; None where it is over several.

    Args:
        call: The convolution.
        env: The values of the nodes.
    """
    geometry = _Geometry.of(call, env)
    return (lambda env: geometry.of_a_row(call, env)) if geometry is not None and len(geometry.stride) == 1 else None


def as_row(x: Tensor) -> Tensor:
    """(batch, channels, length) as an image of one row, (batch, channels, 1, length), with its channels last.

    Args:
        x: The tensor.
    """
    return x.unsqueeze(2).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class _Geometry:
    """What a convolution does along its axes.

    Args:
        seeing: The elements of its kernel that see anything.
        around: What is put around its input before, as `F.pad` has it.
        padding: What it pads itself.
        stride: Its steps.
        dilation: The steps between the elements of its kernel.
        differs: Whether that is something else than the call says.
    """

    seeing: tuple[slice, ...]
    around: list[int]
    padding: list[int]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    differs: bool

    @classmethod
    def of(cls, call: Call, env: Env) -> _Geometry | None:
        """That of a call; None for one that pads with something else than zeros, or is given no batch."""
        given, weight = call.input, from_env(call["weight"], env)
        sizes = weight.shape[2:]
        if getattr(call.module, "padding_mode", "zeros") != "zeros" or env[given].ndim != weight.ndim:
            return None
        ends = padded_ends(call["padding"], sizes, call["dilation"])
        stride, dilation = (per_axis(call[name], len(sizes)) for name in ("stride", "dilation"))
        seeing = [_seeing(*axis) for axis in zip(env[given].shape[2:], sizes, dilation, ends, strict=True)]
        ends = tuple(
            (start - kept.start * step, end - (size - kept.stop) * step)
            for kept, size, step, (start, end) in zip(seeing, sizes, dilation, ends, strict=True)
        )
        before: list[Ends] = [(start, end) if start != end else (0, 0) for start, end in ends]
        if _by_channel(call, env) and len(sizes) < 3 and before[-1] == (0, 0):
            before[-1] = (padding_apart([end for _, end in ends], dilation),) * 2
        around = [end for pair in reversed(before) for end in pair]
        parts = any(kept != slice(0, size) for kept, size in zip(seeing, sizes, strict=True))
        padding = [end - put for (_, end), (_, put) in zip(ends, before, strict=True)]
        return cls(tuple(seeing), around, padding, stride, dilation, parts or any(around))

    def compute(self, call: Call, env: Env) -> Tensor:
        """The convolution, from the values of the nodes."""
        weight, bias = self._weights(call, env)
        x = env[call.input]
        function = getattr(F, f"conv{len(self.stride)}d")
        geometry = (self.stride, self.padding, self.dilation, call["groups"])
        result: Tensor = function(self._padded(x), weight, bias, *geometry)
        return result

    def of_a_row(self, call: Call, env: Env) -> Tensor:
        """The same of a row."""
        weight, bias = self._weights(call, env)
        geometry = ((1, *self.stride), (0, *self.padding), (1, *self.dilation), call["groups"])
        return F.conv2d(self._padded(as_row(env[call.input])), weight.unsqueeze(2), bias, *geometry)

    def _weights(self, call: Call, env: Env) -> tuple[Tensor, Tensor | None]:
        weight, bias = (from_env(call[name], env) for name in ("weight", "bias"))
        return weight[(..., *self.seeing)] if self.differs else weight, bias

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.around) if any(self.around) else x


def _by_channel(call: Call, env: Env) -> bool:
    weight, groups = from_env(call["weight"], env), call["groups"]
    return bool(groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1)


def _seeing(pixels: int, size: int, step: int, ends: Ends) -> slice:
    """Which elements of a kernel may see a pixel along an axis.

    All, where leaving some out would cut into the image, or leave more padding at one end than at the other.

    Args:
        pixels: How many pixels there are.
        size: The size of the kernel.
        step: The dilation.
        ends: The padding.
    """
    start, end = ends
    last = pixels + end - step * (size - 1) - 1  # where the kernel begins then
    seen = [place for place in range(size) if last + place * step >= 0 and place * step - start < pixels]
    kept = slice(seen[0], seen[-1] + 1) if seen else slice(0, size)
    before, after = start - kept.start * step, end - (size - kept.stop) * step
    return kept if min(before, after) >= 0 and (before == after or start != end) else slice(0, size)
