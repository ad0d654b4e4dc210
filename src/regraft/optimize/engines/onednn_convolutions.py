"""Convolutions that oneDNN Graph does not know, or has a slow kernel for, in a form for which it has a fast one."""

from __future__ import annotations

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
    given, weight, groups = call.input, from_env(call["weight"], env), call["groups"]
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
    by_channel = groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1
    before: list[Ends] = [(start, end) if start != end else (0, 0) for start, end in ends]
    if by_channel and len(sizes) < 3 and before[-1] == (0, 0):
        before[-1] = (padding_apart([end for _, end in ends], dilation),) * 2
    around = [end for pair in reversed(before) for end in pair]
    parts = any(kept != slice(0, size) for kept, size in zip(seeing, sizes, strict=True))
    row = by_channel and len(sizes) == 1
    if not any(around) and not parts and not row and not isinstance(call["padding"], str):
        return None
    padding = [end - put for (_, end), (_, put) in zip(ends, before, strict=True)]
    function = getattr(F, f"conv{len(sizes)}d")

    def compute(env: Env) -> Tensor:
        weight, bias = (from_env(call[name], env) for name in ("weight", "bias"))
        weight = weight[(..., *seeing)] if parts else weight
        x = F.pad(env[given], around) if any(around) else env[given]
        if row:
            image = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
            geometry = ((1, *stride), (0, *padding), (1, *dilation), groups)
            return F.conv2d(image, weight.unsqueeze(2), bias, *geometry).squeeze(2)
        result: Tensor = function(x, weight, bias, stride, padding, dilation, groups)
        return result

    return compute


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
