"""Which pixels the elements of a convolution's kernel meet, and the sum of two kernels that meet the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regraft.core.padding import padded_ends, per_axis
from regraft.core.query import Answer, Facts, that
from regraft.core.vocabulary import CONV, Call
from regraft.core.weights import Derivation, wider

Places = tuple[tuple[int, int, int], ...]
"""For each axis of a kernel the first element, the one behind the last, and the step between them."""


def kernel_of(call: Call) -> Tensor:
    """The weight of a convolution that has one."""
    weight = call.weight("weight")
    assert weight is not None
    return weight.tensor


def places_in(whole: Call, other: Call) -> Places | None:
    """Where the elements of the other kernel meet what elements of the whole one meet; None where not all do.

    Element `j` of a kernel meets the pixel at `j dilation - padding` from the first, and both give as many results.
    """
    kernel = kernel_of(whole)
    axes = kernel.ndim - 2
    if other.operation is CONV:
        same = kernel_of(other).shape[:2] == kernel.shape[:2]
        theirs = _pixels(other, axes) if same else None
    else:
        mean = other.weight("running_mean")
        same = mean is not None and len(mean.tensor) == len(kernel) == kernel.shape[1] * int(whole["groups"])
        theirs = [(1, 1, 0, 1)] * axes if same else None
    found: list[tuple[int, int, int]] = []
    for ours, others in zip(_pixels(whole, axes), theirs or ()):
        (stride, size, padding, dilation), (its_stride, its_size, its_padding, its_dilation) = ours, others
        start, step = (padding - its_padding) / dilation, its_dilation / dilation if its_size > 1 else 1
        equally_many = 2 * padding - dilation * (size - 1) == 2 * its_padding - its_dilation * (its_size - 1)
        if stride == its_stride and equally_many and start >= 0 and start % 1 == 0 and step % 1 == 0:
            found.append((int(start), size - int(start), int(step)))  # as far from the end as from the beginning
    return tuple(found) if len(found) == axes else None


def same_channels(norm: Call, conv: Call, facts: Facts) -> Answer:
    """A batch norm takes the second axis for its channels, and a convolution of a single image the first."""
    axes = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}.get(type(norm.module), facts.rank(conv.input))  # type: ignore[arg-type]
    return that(
        axes == kernel_of(conv).ndim, f"{norm.where} may normalise another axis than the channels of {conv.where}"
    )


def _pixels(call: Call, axes: int) -> list[tuple[int, int, float, int]]:
    """For each axis the stride, the size of the kernel, the padding and the dilation."""
    sizes, dilations = kernel_of(call).shape[2:], per_axis(call["dilation"], axes)
    paddings = [(start + end) / 2 for start, end in padded_ends(call["padding"], sizes, dilations)]
    return list(zip(per_axis(call["stride"], axes), sizes, paddings, dilations, strict=True))


@dataclass(frozen=True)
class Sum(Derivation):
    """The weight or the bias of a convolution and another, or a batch norm, whose results are added.

    Args:
        part: `"weight"` or `"bias"`.
        names: The sources, in order: those of the whole kernel, and the other's.
        places: For each axis the elements of the kernel to which the other's are added.
        eps: What the other adds to its variance; None where it is a convolution.
    """

    part: str
    names: tuple[str, ...]
    places: Places
    eps: float | None

    def compute(self, *sources: Tensor) -> Tensor:
        given = {name: tensor.detach() for name, tensor in zip(self.names, sources, strict=True)}
        weight = given["whole_weight"]
        scale = self.scale(*sources) if self.eps is not None else None
        if self.part == "weight":
            return self._weight(weight.clone(), given, scale)
        total = torch.zeros(len(weight), dtype=wider(weight.dtype), device=weight.device)
        for name in ("whole_bias", "other_bias"):
            total = total + given[name] if name in given else total
        return (total if scale is None else total - given["other_running_mean"] * scale).to(weight.dtype)

    def scale(self, *sources: Tensor) -> Tensor:
        """What the batch norm multiplies each channel with, one precision up."""
        given = {name: tensor.detach() for name, tensor in zip(self.names, sources, strict=True)}
        scale = torch.rsqrt(given["other_running_var"].to(wider(given["whole_weight"].dtype)) + (self.eps or 0))
        return scale * given["other_weight"] if "other_weight" in given else scale

    def _weight(self, total: Tensor, given: dict[str, Tensor], scale: Tensor | None) -> Tensor:
        inner = total[(slice(None), slice(None), *(slice(*place) for place in self.places))]
        if scale is None:
            inner += given["other_weight"]
        else:  # each channel is added to itself, which is one of the inputs of its group
            channels = torch.arange(len(total), device=total.device)
            own = channels % total.shape[1]
            inner[channels, own] = (inner[channels, own] + scale.reshape(-1, *[1] * (total.ndim - 2))).to(total.dtype)
        return total
