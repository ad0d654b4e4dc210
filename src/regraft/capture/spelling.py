"""ATen calls in Python's words: `operator.add`, `torch.matmul`, `torch.nn.functional.layer_norm`, `x[:, 0]`.

What has no spelling that means the same for every argument stays an ATen call.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional as F

from regraft.capture.spelling_table import FUNCTIONS, METHODS, OPERATORS

aten = torch.ops.aten

#: a node's op, target, positional and keyword arguments
Spelling = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def spell(graph: Graph) -> None:
    """Give every ATen call of a graph its Python spelling where it has one, in place.

    Args:
        graph: a graph with `meta["val"]`.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        spelling = _spelled(node)
        if spelling is None:
            continue
        op, target, args, kwargs = spelling
        with graph.inserting_before(node):
            new = graph.create_node(op, target, args, kwargs)
        new.meta = node.meta
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _spelled(node: Node) -> Spelling | None:
    target = node.target
    if target in _SPECIAL:
        return _SPECIAL[target](node)
    kwargs = _told(node.kwargs)
    if target in OPERATORS:
        return None if kwargs or len(node.args) > 2 else ("call_function", OPERATORS[target], node.args, {})
    if target in FUNCTIONS:
        return "call_function", FUNCTIONS[target], node.args, kwargs
    if target in METHODS:
        return "call_method", METHODS[target], _unpacked(node), kwargs
    return None


def _told(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without those that say nothing."""
    silent = {"pin_memory": (False, None), "layout": (torch.strided, None), "non_blocking": (False,), "copy": (False,)}
    return {name: value for name, value in kwargs.items() if name not in silent or value not in silent[name]}


def _unpacked(node: Node) -> tuple[Any, ...]:
    """`x.view(2, 3)` rather than `x.view([2, 3])`, as people write it."""
    sizes = node.args[1] if len(node.args) == 2 else None
    if isinstance(sizes, (list, tuple)) and sizes and METHODS[node.target] in ("view", "expand", "repeat"):
        return (node.args[0], *sizes)
    return node.args


def _values(node: Node) -> dict[str, Any]:
    """The arguments of an ATen call by name, defaults included."""
    found = {}
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = parameter.default_value if parameter.has_default_value() else None
        found[parameter.name] = (
            node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name, default)
        )
    return found


def _rank(value: Any) -> int | None:
    val = value.meta.get("val") if isinstance(value, Node) else None
    return val.dim() if isinstance(val, torch.Tensor) else None


def _slice(node: Node) -> Spelling | None:
    given = _values(node)
    source, rank = given["self"], _rank(given["self"])
    if rank is None:
        return None
    end = None if given["end"] == sys.maxsize else given["end"]
    start = None if type(given["start"]) is int and given["start"] == 0 else given["start"]
    step = None if given["step"] == 1 else given["step"]
    return _indexed(source, given["dim"] % rank, slice(start, end, step))


def _select(node: Node) -> Spelling | None:
    given = _values(node)
    rank = _rank(given["self"])
    return None if rank is None else _indexed(given["self"], given["dim"] % rank, given["index"])


def _indexed(source: Any, axis: int, item: Any) -> Spelling:
    index = (*[slice(None)] * axis, item) if axis else item
    return "call_function", operator.getitem, (source, index), {}


def _index(node: Node) -> Spelling | None:
    given = _values(node)
    items = tuple(slice(None) if item is None else item for item in given["indices"])
    for item in items:
        # Python's indexing reads a number out of a tensor without axes; ATen's does not
        if isinstance(item, Node) and not _rank(item):
            return None
    return "call_function", operator.getitem, (given["self"], items if len(items) > 1 else items[0]), {}


def _size(node: Node) -> Spelling | None:
    return "call_method", "size", (node.args[0], node.args[1]), {}


def _to(node: Node) -> Spelling | None:
    """A cast by type alone where the device stays, so that the graph can be moved."""
    given = _values(node)
    before = given["self"].meta.get("val")
    if given.get("memory_format") is not None or not isinstance(before, torch.Tensor):
        return None
    kwargs: dict[str, Any] = {}
    if given.get("device") is not None and torch.device(given["device"]) != before.device:
        kwargs["device"] = given["device"]
    if given.get("dtype") is not None:
        kwargs["dtype"] = given["dtype"]
    if given.get("copy"):
        kwargs["copy"] = True
    if given.get("layout") not in (None, before.layout):
        return None
    if not kwargs:
        kwargs["dtype"] = before.dtype
    if set(kwargs) == {"dtype"}:
        return "call_method", "to", (given["self"], kwargs["dtype"]), {}
    return "call_method", "to", (given["self"],), kwargs


def _reordered(function: Callable[..., Any], *names: str) -> Callable[[Node], Spelling | None]:
    """The same operation with its arguments in another order, or without those that name a backend."""

    def spelled(node: Node) -> Spelling | None:
        given = _values(node)
        return "call_function", function, tuple(given[name] for name in names), {}

    return spelled


def _softmax(function: Callable[..., Any]) -> Callable[[Node], Spelling | None]:
    def spelled(node: Node) -> Spelling | None:
        given = _values(node)
        kwargs = {"dim": given["dim"]}
        if given["dtype"] is not None:
            kwargs["dtype"] = given["dtype"]
        return "call_function", function, (given["self"],), kwargs

    return spelled


def _embedding(node: Node) -> Spelling | None:
    given = _values(node)
    kwargs: dict[str, Any] = {}
    if given["padding_idx"] != -1:
        kwargs["padding_idx"] = given["padding_idx"]
    if given["scale_grad_by_freq"]:
        kwargs["scale_grad_by_freq"] = True
    if given["sparse"]:
        kwargs["sparse"] = True
    return "call_function", F.embedding, (given["indices"], given["weight"]), kwargs


def _elu(node: Node) -> Spelling | None:
    given = _values(node)
    scaled = (
        given["scale"] != 1 or given["input_scale"] != 1
    )  # which SELU and CELU are made of, and Python has no word for
    return None if scaled else ("call_function", F.elu, (given["self"], given["alpha"]), {})


def _rsub(node: Node) -> Spelling | None:
    given = _values(node)
    return ("call_function", operator.sub, (given["other"], given["self"]), {}) if given["alpha"] == 1 else None


def _fresh_copy(node: Node) -> Spelling | None:
    return "call_function", torch.clone, (node.args[0],), {}


_SPECIAL: dict[Any, Callable[[Node], Spelling | None]] = {
    aten.lift_fresh_copy.default: _fresh_copy,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.sym_size.int: _size,
    aten.to.dtype: _to,
    aten.to.device: _to,
    aten.to.dtype_layout: _to,
    aten.softmax.int: _softmax(F.softmax),
    aten.log_softmax.int: _softmax(F.log_softmax),
    aten.embedding.default: _embedding,
    aten.elu.default: _elu,
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.layer_norm.default: _reordered(F.layer_norm, "input", "normalized_shape", "weight", "bias", "eps"),
    aten.group_norm.default: _reordered(F.group_norm, "input", "num_groups", "weight", "bias", "eps"),
    aten.instance_norm.default: _reordered(
        F.instance_norm, "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"
    ),
    aten.batch_norm.default: _reordered(
        F.batch_norm, "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
    ),
}
