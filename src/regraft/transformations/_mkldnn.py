"""torch's private oneDNN and MKL operators: the one file that knows them.

They are what Inductor's freezing calls, and have no public name. So `works` asks before the first use of each kind and
dtype whether the operator is there and computes the right numbers; where it does not, the callers use plain torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from regraft.core.ordinary import ORDINARY, copies_last, ordinary_call, records_gradient
from regraft.transformations._activations import NONE, Activation
from regraft.transformations._pixels import image_of, kernel_of, rows_of

LINEAR, MKL, CONV = "linear", "packed sgemm", "convolution"
PIXELS = "linear layer as a convolution"
CONV_ADD, CONV_SUM = "convolution with addition", "convolution with addition in place"
TRANSPOSED = "transposed convolution"
"""The kinds of operator."""

BY_PIXEL = ([0, 0], [1, 1], [1, 1], 1)
"""The geometry of a convolution whose kernel is one pixel."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_EXPONENTIAL = {"gelu", "swish", "tanh"}
_HALVES = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@cache
def works(kind: str, dtype: torch.dtype, activation: Activation = NONE, axes: int = 2) -> bool:
    """Whether this build and processor have the operator, and it agrees with plain torch on an example.

    Args:
        kind: Which operator.
        dtype: Of what tensors.
        activation: What it computes at the end.
        axes: Over how many axes a convolution goes.

    Which activations may follow which operator is not written down anywhere: it is tried too, and without a warning.
    """
    if dtype not in _TOLERANCE or not _has(kind, dtype):
        return False
    try:
        with torch.no_grad():
            found, expected = _example(kind, dtype, activation, axes)
        agrees = bool((found.double() - expected).abs().max() <= _TOLERANCE[dtype] * expected.abs().max())
        reason = "it disagrees with plain torch"
    except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        agrees, reason = False, str(error).partition("\n")[0]
    if not agrees and activation is NONE:
        warnings.warn(f"regraft does not use torch's {kind} operator in {dtype}: {reason}", stacklevel=2)
    return agrees


def computed_in(kind: str, dtype: torch.dtype, activation: Activation = NONE, axes: int = 2) -> torch.dtype | None:
    """In which type the operator computes tensors of `dtype` here; None where it does not.

    Halves for which the processor has no instructions are computed in float32, which is exact but for the last
    rounding, and many times faster than what torch does with them.
    """
    if works(kind, dtype, activation, axes):
        return dtype
    wide = dtype in _HALVES and not _has(kind, dtype) and works(kind, torch.float32, activation, axes)
    return torch.float32 if wide else None


def slower_inside(activation: str) -> bool:
    """Whether an activation takes longer at the end of oneDNN's product than by itself after it.

    Without AVX-512, oneDNN computes an exponential several times slower than torch does.

    Args:
        activation: oneDNN's name of it.
    """
    return activation in _EXPONENTIAL and _without_avx512()


def padding_apart(padding: Sequence[int], dilation: Sequence[int]) -> int:
    """What to put around the rows of an image before a depthwise convolution; 0 where it pads them itself.

    oneDNN's kernel for dilated ones takes no more padding of rows than the pixels that it computes at a time
    (`jit_uni_dw_conv_kernel_utils.hpp`, `ur_w`). Beyond that it has one for sixteen channels to a group, or a product
    for each channel, which are many times slower.

    Args:
        padding: What both ends of each axis are padded by, the rows' last.
        dilation: The steps between the elements of the kernel.
    """
    at_a_time = 4 if _without_avx512() else 6
    return padding[-1] if max(dilation) > 1 and padding[-1] > at_a_time else 0


def usable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is one for these operators: ordinary tensors on the CPU, no gradient, nobody who traces."""
    if not ordinary_call() or type(x) not in ORDINARY or not copies_last(weight):
        return False
    if not (x.is_cpu and weight.is_cpu) or x.dtype is not weight.dtype or x.layout is not torch.strided:
        return False
    return not records_gradient(x, weight, bias)


def pack_linear(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, which is one for any number of rows but one."""
    return cast(Tensor, _op("mkldnn", "_reorder_linear_weight")(weight.detach().contiguous(), 128))


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """`activation(x weight^T + bias)`."""
    arguments = (activation.name, list(activation.scalars), activation.algorithm)
    return cast(Tensor, _op("mkldnn", "_linear_pointwise")(x, packed, bias, *arguments))


def pack_sgemm(weight: Tensor, rows: int) -> Tensor:
    """The float32 weight in MKL's layout, for inputs of `rows` rows and no others."""
    return cast(Tensor, _op("mkl", "_mkl_reorder_linear_weight")(weight.detach().contiguous(), rows))


def sgemm(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """`x weight^T + bias`, with the weight packed for `rows` rows."""
    return cast(Tensor, _op("mkl", "_mkl_linear")(x, packed, weight, bias, rows))


def pack_pixels(weight: Tensor, rows: int) -> Tensor:
    """The weight of a linear layer in the layout that oneDNN's convolution wants for inputs of `rows` rows."""
    return pack_conv(kernel_of(weight), BY_PIXEL, (1, weight.shape[1], 1, rows))


def by_pixels(x: Tensor, packed: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """`activation(x weight^T + bias)`, as a convolution for which each row is a pixel."""
    return rows_of(conv(image_of(x), packed, bias, BY_PIXEL, activation), x.shape[:-1])


def pack_conv(weight: Tensor, geometry: Sequence[Any], size: Sequence[int]) -> Tensor:
    """The weight in the layout that oneDNN wants for inputs of this size; others are computed too, some slowly.

    Args:
        weight: (out, in / groups, height, width), or with a depth before the height.
        geometry: Padding, stride, dilation, groups.
        size: (batch, in, height, width), or with a depth.
    """
    return cast(
        Tensor, _op("mkldnn", "_reorder_convolution_weight")(weight.detach().contiguous(), *geometry, list(size))
    )


def pack_transposed(weight: Tensor, geometry: Sequence[Any], size: Sequence[int]) -> Tensor:
    """The weight of a transposed convolution in the layout that oneDNN wants for inputs of this size.

    Args:
        weight: (in, out / groups, height, width).
        geometry: Padding, output padding, stride, dilation, groups.
        size: (batch, in, height, width).
    """
    reorder = _op("mkldnn", "_reorder_convolution_transpose_weight")
    return cast(Tensor, reorder(weight.detach().contiguous(), *geometry, list(size)))


def transposed(
    x: Tensor, packed: Tensor, bias: Tensor | None, geometry: Sequence[Any], activation: Activation
) -> Tensor:
    """`activation(conv_transpose2d(x))`, channels last."""
    arguments = (activation.name, list(activation.scalars), activation.algorithm)
    return cast(Tensor, _op("mkldnn", "_convolution_transpose_pointwise")(x, packed, bias, *geometry, *arguments))


def channels_last(axes: int) -> torch.memory_format:
    """The memory format of what a packed convolution over so many axes gives."""
    return torch.channels_last_3d if axes == 3 else torch.channels_last


def layout(packed: Tensor) -> bytes:
    """A packed weight's layout, to tell whether two are the same."""
    return bytes(_op("mkldnn", "_get_mkldnn_serialized_md")(packed).tolist())


def conv(x: Tensor, packed: Tensor, bias: Tensor | None, geometry: Sequence[Any], activation: Activation) -> Tensor:
    """`activation(conv2d(x))`, channels last."""
    arguments = (activation.name, list(activation.scalars), activation.algorithm)
    return cast(Tensor, _op("mkldnn", "_convolution_pointwise")(x, packed, bias, *geometry, *arguments))


def conv_add(
    other: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None, geometry: Sequence[Any], activation: Activation
) -> Tensor:
    """`activation(conv2d(x) + other)`, where `other` is channels last."""
    name = None if activation.name == "none" else activation.name
    arguments = ("add", 1.0, name, list(activation.scalars), activation.algorithm)
    return cast(
        Tensor, _op("mkldnn", "_convolution_pointwise", "binary")(x, other, packed, bias, *geometry, *arguments)
    )


def conv_sum(
    total: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None, geometry: Sequence[Any], activation: Activation
) -> Tensor:
    """`total = activation(conv2d(x) + total)`, in place, where `total` is channels last."""
    name = None if activation.name == "none" else activation.name
    arguments = ("add", 1.0, name, list(activation.scalars), activation.algorithm)
    return cast(
        Tensor, _op("mkldnn", "_convolution_pointwise_", "binary")(total, x, packed, bias, *geometry, *arguments)
    )


@cache
def _op(namespace: str, name: str, overload: str = "default") -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _has(kind: str, dtype: torch.dtype) -> bool:
    if kind == MKL:
        return dtype is torch.float32 and torch.backends.mkl.is_available()
    if not torch.backends.mkldnn.is_available() or not bool(torch._C._get_mkldnn_enabled()):
        return False
    if kind == PIXELS and not (dtype is torch.float32 and _without_avx512()):
        return False  # with AVX-512 it has not been measured
    return dtype is torch.float32 or bool(getattr(torch.ops.mkldnn, _HALVES[dtype], bool)())


def _without_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _example(kind: str, dtype: torch.dtype, activation: Activation, axes: int) -> tuple[Tensor, Tensor]:
    """One small case by the operator, and in float64."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    if kind in (LINEAR, MKL, PIXELS):
        x, weight, bias = (randn(*size).to(dtype) for size in [(5, 19), (18, 19), (18,)])
        expected = activation.plain(F.linear(x.double(), weight.double(), bias.double()))
        if kind == MKL:
            return sgemm(x, pack_sgemm(weight, 5), weight, bias, 5), expected
        if kind == PIXELS:
            return by_pixels(x, pack_pixels(weight, 5), bias, activation), expected
        return linear(x, pack_linear(weight), bias, activation), expected
    x, total = randn(2, 6, *(9, 7, 5)[:axes]).to(dtype), randn(2, 8, *(5, 4, 3)[:axes]).to(dtype)
    padding, stride, dilation, bias = [1] * axes, [2] * axes, [1] * axes, randn(8).to(dtype)
    if kind == TRANSPOSED:
        weight = randn(6, 4, *[3] * axes).to(dtype)
        shape = (padding, padding, stride, dilation, 2)  # the output's padding is one too
        result = transposed(x, pack_transposed(weight, shape, x.shape), bias, shape, activation)
        return result, activation.plain(F.conv_transpose2d(x.double(), weight.double(), bias.double(), 2, 1, 1, 2))
    weight = randn(8, 3, *[3] * axes).to(dtype)
    geometry = (padding, stride, dilation, 2)
    packed = pack_conv(weight, geometry, x.shape)
    function = F.conv3d if axes == 3 else F.conv2d
    expected = function(x.double(), weight.double(), bias.double(), 2, 1, 1, 2)
    if kind == CONV:
        return conv(x, packed, bias, geometry, activation), activation.plain(expected)
    expected = activation.plain(expected + total.double())
    add = conv_add if kind == CONV_ADD else conv_sum
    return add(total.to(memory_format=channels_last(axes)), x, packed, bias, geometry, activation), expected
