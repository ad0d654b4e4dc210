"""`FusePad`: zeros put around the input of a convolution become the convolution's own padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.padding import padded_ends
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import CONV, PAD, Call
from regraft.core.weights import Derivation

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FusePad(Rewrite):
    """Fuse zero padding into the convolution that follows, which then reads its input without a padded copy of it.

    `conv(pad(x, l, r), W) = conv(x, [0, W], padding=r)` with `r - l` zeros before each row of the kernel: for finite
    inputs the sums are the same, because the zeros meet what is added on the left and nothing more. Padding of equal
    ends needs no zeros. TensorFlow's "same" padding at stride two, which MobileNet has, is one longer at the end.

    Example:
        >>> import torch, regraft as rg
        >>> class Padded(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = torch.nn.Conv2d(3, 8, 3, stride=2)
        ...     def forward(self, x):
        ...         return self.conv(torch.nn.functional.pad(x, (0, 1, 0, 1)))
        >>> rg.FusePad()(rg.symbolic_trace(Padded())).conv
        Conv2d(3, 8, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1))
    """

    preserves_computation = True
    pattern = Calls(PAD)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        pad = match.call
        ends = _ends(pad)
        reader = next(iter(pad.node.users)) if len(pad.node.users) == 1 else None
        conv = match.producer(reader)
        require(
            that(ends is not None, f"{pad.where} pads by sizes that are computed, or not with zeros"),
            that(
                conv is not None and conv.operation is CONV,
                match.unlike(reader) or f"{pad.where} does not end in one convolution alone",
            ),
        )
        assert ends is not None
        assert conv is not None
        module, weight = conv.module, conv.weight("weight")
        require(that(isinstance(module, _CONVS), f"{conv.where} is a function call, not a module"))
        assert module is not None
        assert weight is not None
        require(facts.plain(pad), facts.plain(conv), facts.alone(conv), facts.unchanged(pad.input, pad.node, conv.node))
        own, axes = conv["padding"], weight.tensor.ndim - 2
        unpadded = not any(map(any, padded_ends(own, weight.tensor.shape[2:], conv["dilation"])))
        require(
            that(unpadded, f"{conv.where} pads its input itself, by {own}"),
            that(len(ends) <= axes, f"{pad.where} pads more than the {axes} axes of {conv.where}"),
        )
        ends = (*((0, 0),) * (axes - len(ends)), *ends)
        require(
            that(all(0 <= left <= right for left, right in ends), f"{pad.where} pads the start more than the end"),
            that(
                all(left == right or d == 1 for (left, right), d in zip(ends, conv["dilation"], strict=True)),
                f"{conv.where} is dilated, and the ends of its padding are unequal",
            ),
        )

        zeros = tuple(right - left for left, right in ends)
        kept: dict[str, Any] = {"weight": (_LeadingZeros(zeros), [weight])}
        kernel = tuple(size + extra for size, extra in zip(weight.tensor.shape[2:], zeros, strict=True))
        padding = tuple(right for _, right in ends)
        settings = {"kernel_size": kernel, "padding": padding, "padding_mode": "zeros"}
        settings["_reversed_padding_repeated_twice"] = [size for size in reversed(padding) for _ in (0, 1)]
        edit.put_module(conv.where, module, kept if any(zeros) else {}, **settings)
        edit.replace_with_module(conv.node, conv.where, pad.input)
        edit.erase(pad.node)
        return f"padding {ends} became part of {conv.where}"


@dataclass(frozen=True)
class _LeadingZeros(Derivation):
    """The kernel with so many zeros before it along each of its axes."""

    zeros: tuple[int, ...]

    def compute(self, *sources: Tensor) -> Tensor:
        return F.pad(sources[0], [size for extra in reversed(self.zeros) for size in (extra, 0)])

    def invert(self, derived: Tensor) -> tuple[Tensor, ...] | None:
        inner = derived[(slice(None), slice(None), *(slice(extra, None) for extra in self.zeros))].contiguous()
        same = int(inner.count_nonzero()) == int(derived.count_nonzero())
        return (inner,) if same else None  # what was trained in the place of the zeros has no place in the original


def _ends(pad: Call) -> tuple[tuple[int, int], ...] | None:
    """What is added before and after each axis, the first of them first; None where it isn't known, or isn't zeros."""
    sizes, value = pad["pad"], pad["value"]
    if pad["mode"] not in (None, "constant") or value not in (None, 0) or not isinstance(sizes, (list, tuple)):
        return None
    if len(sizes) % 2 or not all(type(size) is int for size in sizes):
        return None
    return tuple((sizes[i], sizes[i + 1]) for i in range(len(sizes) - 2, -1, -2))
