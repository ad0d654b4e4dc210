"""Of which arguments a node needs the same rows alone that are read of its result, and along which of their axes.

A row is what one index along an axis selects, whichever axis that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core import vocabulary as v
from regraft.core.values import JOINING, called_name, same_shape, value_of
from regraft.core.vocabulary import Call, attribute, read

LAYERS = (v.LINEAR, v.MATMUL, v.ADDMM, v.ATTENTION)
"""What is worth it: the rest costs about as much as to take the rows out."""
_ELEMENTWISE = (
    *(v.ADD, v.SUBTRACT, v.MULTIPLY, v.DIVIDE, v.NEGATE, v.POWER, v.SQUARE, v.SQRT, v.RSQRT, v.ERF),
    *(v.RELU, v.RELU6, v.HARDTANH, v.GELU, v.SILU, v.HARDSWISH, v.HARDSIGMOID, v.LEAKY_RELU, v.SIGMOID, v.TANH),
    *(v.DROPOUT, v.IDENTITY, v.MASKED_FILL, v.WHERE),
)
_COPYING = ("contiguous", "clone")
SPLITTING = ("chunk", "split", "split_with_sizes", "tensor_split")
"""What gives several tensors."""


def rows_needed(node: Node, axis: int, owner: GraphModule) -> dict[Node, int] | None:
    """The arguments of which `node` needs only the rows that are read of its result, each with the axis.

    Args:
        node: The node.
        axis: The axis of its result, from the front.
        owner: The graph module.

    Returns:
        None where it needs other rows, too, or that is not known.
    """
    value, call = _tensor(node, owner), read(node, owner)
    if value is None or axis >= value.ndim:
        return None
    if call is None:
        found = _of_others(node, value, axis)
    else:
        rule = _RULES.get(call.operation)
        axes = rule(call, value, axis) if rule is not None else None
        if axes is None:
            return None
        found = {call.arguments[name]: its for name, its in axes.items()}
        whole = (given for name, given in call.arguments.items() if name not in axes)
        if any(given in found for given in whole if isinstance(given, Node)):
            return None  # attention of a tensor with itself
    fits = found and all(
        (tensor := _tensor(given, owner)) is not None
        and its < tensor.ndim
        and same_shape((tensor.shape[its],), (value.shape[axis],))
        for given, its in found.items()
    )
    return found if fits else None


def _of_others(node: Node, value: Tensor, axis: int) -> dict[Node, int]:
    name = called_name(node)
    if name in _COPYING:
        return dict.fromkeys(node.all_input_nodes, axis)
    place = 1 if name in JOINING else 2 if name in SPLITTING else None
    if place is not None:
        along = node.kwargs.get("dim", node.args[place] if len(node.args) > place else 0)
        if isinstance(along, int) and along % value.ndim != axis:
            return dict.fromkeys(node.all_input_nodes, axis)
    return {}


def _tensor(node: Any, owner: GraphModule) -> Tensor | None:
    """A tensor like the value of a node; like the first of its parts, where it has been split."""
    if isinstance(node, Node) and node.op == "get_attr":
        held = attribute(owner, str(node.target))
        return held if isinstance(held, Tensor) else None
    parts = node.meta.get("val") if isinstance(node, Node) and called_name(node) in SPLITTING else None
    return parts[0] if isinstance(parts, (tuple, list)) and parts else value_of(node)


_Axes = dict[str, int] | None


def _elementwise(call: Call, value: Tensor, axis: int) -> _Axes:
    axes: dict[str, int] = {}
    for name, given in call.arguments.items():
        if not isinstance(given, Node):
            continue
        tensor = _tensor(given, call.owner)
        if tensor is None:
            if isinstance(given.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)):
                continue
            return None
        its = axis - (value.ndim - tensor.ndim)
        if its >= 0 and not _is_one(tensor.shape[its]):
            axes[name] = its
    return axes


def _cast(_call: Call, _value: Tensor, axis: int) -> _Axes:
    return {"input": axis}


def _linear(_call: Call, value: Tensor, axis: int) -> _Axes:
    return {"input": axis} if axis < value.ndim - 1 else None


def _norm(call: Call, value: Tensor, axis: int) -> _Axes:
    shape = call["normalized_shape"]
    normed = 1 if isinstance(shape, int) else len(shape)
    return {"input": axis} if axis < value.ndim - normed else None


def _softmax(call: Call, value: Tensor, axis: int) -> _Axes:
    dim = call["dim"]
    return {"input": axis} if isinstance(dim, int) and dim % value.ndim != axis else None


def _reduction(call: Call, value: Tensor, axis: int) -> _Axes:
    dims = (call["dim"],) if isinstance(call["dim"], int) else call["dim"]
    if call["keepdim"] is not True or not isinstance(dims, Sequence) or not dims:
        return None
    return {"input": axis} if axis not in [dim % value.ndim for dim in dims] else None


def _matmul(call: Call, value: Tensor, axis: int) -> _Axes:
    tensor = _tensor(call.input, call.owner)
    return {"input": axis} if tensor is not None and tensor.ndim == value.ndim and axis == value.ndim - 2 else None


def _addmm(call: Call, _value: Tensor, axis: int) -> _Axes:
    bias = _tensor(call["bias"], call.owner)
    return {"input": 0} if bias is not None and bias.ndim == 1 and axis == 0 else None


def _attention(call: Call, value: Tensor, axis: int) -> _Axes:
    if axis != value.ndim - 2:
        return None
    axes, mask = {"input": axis}, call["attn_mask"]
    if mask is not None:
        tensor = _tensor(mask, call.owner)
        if tensor is None or tensor.ndim < 2:
            return None
        if not _is_one(tensor.shape[-2]):
            axes["attn_mask"] = tensor.ndim - 2
    return axes


def _transpose(call: Call, value: Tensor, axis: int) -> _Axes:
    dims = (call["dim0"], call["dim1"])
    if not all(isinstance(dim, int) for dim in dims):
        return None
    first, second = (dim % value.ndim for dim in dims)
    return {"input": {first: second, second: first}.get(axis, axis)}


def _permute(call: Call, value: Tensor, axis: int) -> _Axes:
    dims = call["shape"]
    known = isinstance(dims, Sequence) and len(dims) == value.ndim and all(isinstance(dim, int) for dim in dims)
    return {"input": dims[axis] % value.ndim} if known else None


def _unsqueeze(call: Call, value: Tensor, axis: int) -> _Axes:
    if not isinstance(call["dim"], int) or call["dim"] % value.ndim == axis:
        return None
    return {"input": axis - (call["dim"] % value.ndim < axis)}


def _reshape(call: Call, value: Tensor, axis: int) -> _Axes:
    """A new shape that leaves the axis alone: it has as many elements before it as it had."""
    before, shape = _tensor(call.input, call.owner), call["shape"]
    if before is None or not (shape is None or isinstance(shape, Sequence)):  # another tensor's shape, or a type
        return None
    for its in range(before.ndim):
        same = same_shape((before.shape[its],), (value.shape[axis],))
        if same and same_shape((math.prod(before.shape[:its]),), (math.prod(value.shape[:axis]),)):
            return {"input": its}
    return None


def _index(call: Call, _value: Tensor, axis: int) -> _Axes:
    if called_name(call.input) in SPLITTING:
        return {"input": axis} if isinstance(call["index"], int) else None
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if not all(isinstance(item, slice) for item in index):
        return None
    return {"input": axis} if index[axis : axis + 1] in ((), (slice(None),)) else None


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


_RULES: dict[v.Operation, Callable[[Call, Tensor, int], _Axes]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    v.CAST: _cast,
    v.LINEAR: _linear,
    v.LAYER_NORM: _norm,
    v.RMS_NORM: _norm,
    v.SOFTMAX: _softmax,
    v.MEAN: _reduction,
    v.VARIANCE: _reduction,
    v.MATMUL: _matmul,
    v.ADDMM: _addmm,
    v.ATTENTION: _attention,
    v.TRANSPOSE: _transpose,
    v.PERMUTE: _permute,
    v.UNSQUEEZE: _unsqueeze,
    v.RESHAPE: _reshape,
    v.FLATTEN: _reshape,
    v.INDEX: _index,
}
