"""Layers whose weights are packed for the CPU at the first call: what `PrepackForCpu` puts in the place of plain ones.

The plain weight stays the parameter. The packed copy is made when it is first needed, and again when the weight has
changed; it is neither saved nor copied. Whatever the operators do not cover (gradients, autocast, tracing, other
devices and dtypes) is computed by the plain layer. A change that goes behind torch's back, `weight.data[0] = 1`,
is not seen: call `repack()` after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regraft.core.clone import clone_module
from regraft.core.freed import Memory
from regraft.core.padding import padded_ends
from regraft.core.stepped import Steps
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations._activations import NONE, Activation

Layer = TypeVar("Layer", bound="Packed")

SIZES = 64
"""So many input sizes of a layer are remembered."""


@dataclass
class _Copies:
    """The packed copies of a weight, and what it was when they were made."""

    weight: Tensor | None = None
    state: tuple[int, int, int] | None = None  # how often it was written, as torch and optimizers count; its address
    memory: Memory = field(default_factory=lambda: Memory(()))  # at which address it was
    rows: int = 0  # of the last input
    packs: dict[Any, Any] = field(default_factory=dict)


class Packed(nn.Module):
    """A layer with a packed copy of its weight and an activation of its own."""

    made_how = "which PrepackForCpu has made; apply that one last"
    regraft_pure = True
    inplace = False
    activation: Activation
    _copies: _Copies

    @classmethod
    def of(cls: type[Layer], plain: nn.Module, activation: Activation = NONE, inplace: bool = False) -> Layer:
        """A layer that shares the weights of `plain`."""
        layer = cls.__new__(cls)
        layer.__dict__.update(clone_module(plain).__dict__)
        layer.activation, layer.inplace, layer.regraft_pure = activation, inplace, not inplace
        layer.repack()
        return layer

    def repack(self) -> None:
        """Drop the packed copies; the next call makes them again."""
        self._copies = _Copies()

    def extra_repr(self) -> str:
        named = "" if self.activation is NONE else f", activation={self.activation.name}"
        return f"{super().extra_repr()}{named}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_copies"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.repack()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.repack()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _fresh(self, weight: Tensor) -> dict[Any, Any]:
        """The packed copies of this weight as it is now."""
        copies, state = self._copies, (weight._version, Steps.counted().of(weight), weight.data_ptr())
        if copies.weight is not weight or copies.state != state or copies.memory.freed:
            copies = self._copies = _Copies(weight, state, Memory([weight]))
        return copies.packs


class _PackedConv(Packed):
    """`activation(conv(x) + other)`, channels last; with `inplace`, written into `other` where that is possible."""

    axes: int

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:  # noqa: A002
        """`input` is (batch, in, height, width), with a depth before the height in 3d, and `other` like the result."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if weight is None or input.ndim != self.axes + 2 or not mkldnn.usable(input, weight, bias) or not input.numel():
            return self._plain(input, other)
        packs = self._fresh(weight)
        entry = packs.get(input.shape) or self._entry(input.shape, weight, packs)
        if entry is None:
            return self._plain(input, other)
        packed, size = entry
        around = self._around()
        given = F.pad(input, (around, around)) if around else input
        if packed.dtype is input.dtype:
            return self._fused(given, other, packed, bias, size)
        x, offset, added = (None if t is None else t.to(packed.dtype) for t in (given, bias, other))
        assert x is not None
        if other is None or other.dtype is input.dtype:
            return self._fused(x, added, packed, offset, size).to(input.dtype)
        return self.activation.plain(self._compute(x, packed, offset, NONE).to(input.dtype) + other)

    def _fused(self, x: Tensor, other: Tensor | None, packed: Tensor, bias: Tensor | None, size: torch.Size) -> Tensor:
        """What oneDNN computes at once, all tensors of one type; `size` is that of the result."""
        if other is None:
            return self._compute(x, packed, bias, self.activation)
        like = type(other) is Tensor and other.shape == size and other.dtype is x.dtype
        kind = mkldnn.CONV_SUM if self.inplace else mkldnn.CONV_ADD
        if (
            not like
            or not other.is_contiguous(memory_format=mkldnn.channels_last(self.axes))
            or not mkldnn.works(kind, x.dtype, axes=self.axes)
        ):
            return self.activation.plain(self._compute(x, packed, bias, NONE) + other)
        add = mkldnn.conv_sum if self.inplace else mkldnn.conv_add
        if self.activation is NONE or mkldnn.works(kind, x.dtype, self.activation, self.axes):
            return add(other, x, packed, bias, self._geometry(), self.activation)
        return self.activation.write(add(other, x, packed, bias, self._geometry(), NONE))

    def _plain(self, x: Tensor, other: Tensor | None) -> Tensor:
        result = super().forward(x)
        return self.activation.plain(result if other is None else result + other)

    def _entry(self, shape: torch.Size, weight: Tensor, packs: dict[Any, Any]) -> tuple[Tensor, torch.Size] | None:
        """The weight packed for inputs of this size, and the size of the result."""
        dtype = self._computed_in(weight.dtype)
        if dtype is None:
            return None
        padded = torch.Size((*shape[:-1], shape[-1] + 2 * self._around()))
        size = self._size(torch.empty(padded, device="meta"), torch.empty(weight.shape, device="meta"))
        if not size.numel():
            return None
        if len(packs) >= SIZES:
            packs.clear()
        packed = self._pack(weight.to(dtype), padded)
        known = {mkldnn.layout(other): other for other, _ in list(packs.values())}  # other threads may add some
        entry = packs[shape] = (known.get(mkldnn.layout(packed), packed), size)
        return entry

    def _computed_in(self, dtype: torch.dtype) -> torch.dtype | None:
        return mkldnn.computed_in(mkldnn.CONV, dtype, self.activation, self.axes)

    def _size(self, x: Tensor, weight: Tensor) -> torch.Size:
        padding, stride, dilation, groups = self._geometry()
        function = F.conv3d if self.axes == 3 else F.conv2d
        return function(x, weight, None, stride, padding, dilation, groups).shape

    def _pack(self, weight: Tensor, shape: torch.Size) -> Tensor:
        return mkldnn.pack_conv(weight, self._geometry(), shape)

    def _compute(self, x: Tensor, packed: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return mkldnn.conv(x, packed, bias, self._geometry(), activation)

    def _geometry(self) -> tuple[Any, ...]:
        return self._numbers()[0]

    def _around(self) -> int:
        """So many zeros are put at both ends of each row before."""
        return self._numbers()[1]

    def _numbers(self) -> tuple[tuple[Any, ...], int]:
        numbers: tuple[tuple[Any, ...], int] | None = self.__dict__.get("_known_numbers")
        if numbers is None:
            numbers = self.__dict__["_known_numbers"] = self._numbers_of_it()
        return numbers

    def _numbers_of_it(self) -> tuple[tuple[Any, ...], int]:
        return self._numbers_by_axis()

    def _numbers_by_axis(self) -> tuple[tuple[Any, ...], int]:
        conv: Any = self
        padding, dilation, around = _padding(conv), list(conv.dilation), 0
        if self.axes < 3 and conv.groups == conv.in_channels == conv.out_channels:
            around = mkldnn.padding_apart(padding, dilation)
            padding[-1] -= around
        return (padding, list(conv.stride), dilation, conv.groups), around


class PackedConv1d(_PackedConv, nn.Conv1d):
    """A convolution over one axis, computed as one over two, the first of one element; nothing is added to it."""

    axes = 1

    def _computed_in(self, dtype: torch.dtype) -> torch.dtype | None:
        return mkldnn.computed_in(mkldnn.CONV, dtype, self.activation)

    def _size(self, x: Tensor, weight: Tensor) -> torch.Size:
        (_, padding), (_, stride), (_, dilation), groups = self._geometry()
        return F.conv1d(x, weight, None, stride, padding, dilation, groups).shape

    def _pack(self, weight: Tensor, shape: torch.Size) -> Tensor:
        return mkldnn.pack_conv(weight.unsqueeze(2), self._geometry(), (*shape[:2], 1, shape[2]))

    def _compute(self, x: Tensor, packed: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return mkldnn.conv(x.unsqueeze(2), packed, bias, self._geometry(), activation).squeeze(2)

    def _numbers_of_it(self) -> tuple[tuple[Any, ...], int]:
        (padding, stride, dilation, groups), around = self._numbers_by_axis()
        return ([0, *padding], [1, *stride], [1, *dilation], groups), around


class PackedConv2d(_PackedConv, nn.Conv2d):
    """A convolution over two axes."""

    axes = 2


class PackedConv3d(_PackedConv, nn.Conv3d):
    """A convolution over three axes."""

    axes = 3


class PackedConvTranspose2d(_PackedConv, nn.ConvTranspose2d):  # type: ignore[misc]  # no output_size: no graph has it
    """A transposed convolution over two axes; nothing is added to it."""

    axes = 2

    def _computed_in(self, dtype: torch.dtype) -> torch.dtype | None:
        return mkldnn.computed_in(mkldnn.TRANSPOSED, dtype, self.activation)

    def _size(self, x: Tensor, weight: Tensor) -> torch.Size:
        padding, output_padding, stride, dilation, groups = self._geometry()
        return F.conv_transpose2d(x, weight, None, stride, padding, output_padding, groups, dilation).shape

    def _pack(self, weight: Tensor, shape: torch.Size) -> Tensor:
        return mkldnn.pack_transposed(weight, self._geometry(), shape)

    def _compute(self, x: Tensor, packed: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return mkldnn.transposed(x, packed, bias, self._geometry(), activation)

    def _numbers_of_it(self) -> tuple[tuple[Any, ...], int]:
        conv: Any = self
        geometry = list(conv.padding), list(conv.output_padding), list(conv.stride), list(conv.dilation), conv.groups
        return geometry, 0


CONVOLUTIONS = (PackedConv1d, PackedConv2d, PackedConv3d, PackedConvTranspose2d)


def packed_kind(module: nn.Module) -> type[Packed] | None:
    """The packed form of a convolution; None where it has none."""
    kinds: dict[type[nn.Module], type[Packed]] = {
        nn.Conv1d: PackedConv1d,
        nn.Conv2d: PackedConv2d,
        nn.Conv3d: PackedConv3d,
        nn.ConvTranspose2d: PackedConvTranspose2d,
    }
    return kinds.get(type(module))


def _padding(conv: Any) -> list[int]:
    """What both ends of each axis are padded by."""
    return [end for _, end in padded_ends(conv.padding, conv.kernel_size, conv.dilation)]


def even_padding(conv: Any) -> bool:
    """Whether both ends of each axis are padded alike, and with zeros."""
    alike = all(start == end for start, end in padded_ends(conv.padding, conv.kernel_size, conv.dilation))
    return bool(alike and conv.padding_mode == "zeros")
