"""What a graph computes for nothing: results that are their own argument, that are there already, that nobody reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.flow import known
from regraft.core.mutation import writes
from regraft.core.pattern import Match, Pattern, near_miss
from regraft.core.strides import order_readers
from regraft.core.values import called_name, same_shape, value_of
from regraft.core.vocabulary import DIVIDE, DROPOUT, FLATTEN, IDENTITY, LINEAR, MULTIPLY, PAD, RESHAPE, read
from regraft.transformations._constants import can_be_folded, constants

_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "_to_copy"}
_VIEWS = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "expand", "expand_as", "squeeze", "ravel"}
_VIEWS |= {"broadcast_to"}


class Redundant(Pattern):
    """Nodes whose value another node has already, each with that node; then constants, and what nobody reads.

    Args:
        largest_constant: The most bytes that a folded constant may take.
    """

    def __init__(self, largest_constant: int) -> None:
        self._limit = largest_constant

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        same = dict(_repeated(owner))
        yield from same.items()
        yield from ((node,) for node in constants(owner, same, self._limit))
        yield from ((node,) for node in owner.graph.nodes if node.users and _stranger(node, owner) is not None)
        wanted: set[Node] = set()
        for node in reversed(owner.graph.nodes):
            alive = node in wanted or node.op == "output" or node.is_impure(False) or bool(writes(node, owner))
            if node in same and alive:
                wanted.add(same[node])
            elif alive:
                wanted.update(node.all_input_nodes)
            else:  # fx calls inputs impure, so that they are alive; a copy that had to stay may be read by nobody now
                yield (node,)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        if len(nodes) == 1 and nodes[0].users and (stranger := _stranger(nodes[0], owner)) is not None:
            return stranger
        if len(nodes) == 1 and nodes[0].users and not can_be_folded(nodes[0], owner):
            return None  # whoever reads it was to go, and was refused
        return Match(owner, (), nodes)


def _stranger(node: Node, owner: GraphModule) -> Match | None:
    """A module that derives from an identity or from dropout, of which it is not known that it does nothing."""
    miss = near_miss(node, owner)
    return miss if miss is not None and miss.call.operation in (IDENTITY, DROPOUT) else None


def _repeated(owner: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Each node whose value an earlier node has, and the earliest such node."""
    leader: dict[Node, Node] = {}
    seen: dict[Hashable, Node] = {}
    for node in owner.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and not known(node):
            seen.clear()  # it may have switched autocast or gradients on or off
            continue
        source = unchanged_value(node, owner)
        first = leader.get(source, source) if source is not None else None
        if first is None and (key := identity_of(node, lambda n: leader.get(n, n))) is not None:
            first = seen.setdefault(key, node)
        if first is not None and first is not node:
            leader[node] = first
            yield node, first


def identity_of(node: Node, leader: Callable[[Node], Node] = lambda node: node) -> Hashable | None:
    """Equal for two nodes that make the same call with the same arguments; None where that cannot be told."""
    try:
        return node.op, node.target, _key(node.args, leader), _key(dict(node.kwargs), leader)
    except TypeError:
        return None


def _key(value: Any, leader: Callable[[Node], Node]) -> Hashable:
    if isinstance(value, Node):
        return leader(value)
    if isinstance(value, (list, tuple)):
        return (list, *(_key(item, leader) for item in value))
    if isinstance(value, slice):
        return (slice, *(_key(item, leader) for item in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return (dict, *((name, _key(value[name], leader)) for name in sorted(value)))
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError
    if isinstance(value, float):
        return float, value.hex()  # 0.0 is not -0.0, and NaN is NaN
    hash(value)
    return type(value), value


def unchanged_value(node: Node, owner: GraphModule) -> Node | None:
    """The argument of which `node` is only another name or a copy; None where it computes something."""
    source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    if not isinstance(source, Node):
        return None
    call = read(node, owner)
    if call is not None and call.operation in (IDENTITY, DROPOUT):
        return source  # dropout may still be training: the rule asks, and says so
    if node.op == "call_module":
        return None
    name = called_name(node)
    if name in ("permute", "transpose", "swapaxes", "swapdims"):
        return source if _permutes_nothing(node, name) else None
    if name == "contiguous":
        return source if not _needs_layout(node, source, owner) else None
    if call is not None and call.operation in (RESHAPE, FLATTEN):
        return _before_reshaping(node, owner)
    before, after = value_of(source), value_of(node)
    if before is None or after is None or not _like(before, after):
        return None
    if call is not None and call.operation is PAD:
        return source if _pads_nothing(call["pad"]) else None
    if call is not None and call.operation in (MULTIPLY, DIVIDE):
        return source if _is_one(call["other"]) and call["rounding_mode"] is None else None
    if name in _CASTS:
        return source if "memory_format" not in node.kwargs else None
    if name == "clone":
        return source if not node.kwargs and len(node.args) == 1 else None
    if name in _VIEWS:
        return source if name != "squeeze" or _squeezes_nothing(node, before) else None
    return source if node.target is operator.getitem and _only_slices(node.args[1]) else None


def copies(node: Node, source: Node, owner: GraphModule) -> bool:
    """Whether the result of a node with an unchanged value may have memory of its own."""
    name = called_name(node)
    if name == "contiguous":
        return not _laid_out(source, owner)
    if name in ("mul", "truediv", "div", "pad", "constant_pad_nd") or node.all_input_nodes[0] is not source:
        return True  # the first of several reshapes may have copied
    return (
        name in ("clone", "_to_copy") or bool(node.kwargs.get("copy")) or any(value is True for value in node.args[1:])
    )


def _before_reshaping(node: Node, owner: GraphModule) -> Node | None:
    """The value that `node` is, maybe behind other reshapes: `x.view(a).view(x.shape)` is x."""
    source, viewed = node, True
    value = after = value_of(node)
    call = read(node, owner)
    while value is not None and after is not None and call is not None and call.operation in (RESHAPE, FLATTEN):
        source, before = call.input, value_of(call.input)
        # to the same shape any of them views, and `view` always does; others may copy, in an order of their own
        viewed = viewed and before is not None and (called_name(call.node) == "view" or _like(before, value))
        if before is not None and _like(before, after):
            as_it_was = viewed or after.ndim < 2 or _laid_out(source, owner)
            return source if as_it_was or not any(order_readers(node, owner)) else None
        value, call = before, read(source, owner)
    return None


def _pads_nothing(pad: Any) -> bool:
    return isinstance(pad, (list, tuple)) and all(isinstance(width, int) and width == 0 for width in pad)


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


def _like(before: Tensor, after: Tensor) -> bool:
    """Same dtype, device and shape, for every size that symbols may stand for."""
    same_kind = (before.dtype, before.device) == (after.dtype, after.device)
    return same_kind and same_shape(before.shape, after.shape)


def _permutes_nothing(node: Node, name: str) -> bool:
    value = value_of(node)
    rank = value.ndim if value is not None else None
    given = node.args[1:] if len(node.args) > 2 else (node.args[1] if len(node.args) == 2 else node.kwargs.get("dims"))
    if not isinstance(given, (list, tuple)):
        return False
    axes = [axis % rank if rank and isinstance(axis, int) else axis for axis in given]
    return axes == list(range(len(axes))) if name == "permute" else len(axes) == 2 and axes[0] == axes[1]


def _squeezes_nothing(node: Node, before: Tensor) -> bool:
    """Whether none of the axes can be one element long: a size that is a symbol stands for one, too."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", range(before.ndim))
    axes = [given] if isinstance(given, int) else given
    return all(type(before.shape[axis]) is int and before.shape[axis] != 1 for axis in axes)


def _needs_layout(node: Node, source: Node, owner: GraphModule) -> bool:
    """Whether `contiguous` may matter: its argument is not laid out so for certain, and a reader may notice."""
    if len(node.args) > 1 or node.kwargs:
        return True
    if _laid_out(source, owner):
        return False
    # Fake strides are those of the capture, which later rewrites may have changed. Only `reshape` takes any, and what
    # it gives may be a view, whose order then goes on.
    readers = list(node.users)
    return not readers or any(not _reshapes(user, owner) or any(order_readers(user, owner)) for user in readers)


def _reshapes(node: Node, owner: GraphModule) -> bool:
    call = read(node, owner)
    return call is not None and call.operation is RESHAPE and called_name(node).startswith("reshape")


def _laid_out(source: Node, owner: GraphModule) -> bool:
    """Whether a value is contiguous whatever the layout of what it was computed from."""
    maker = read(source, owner)
    if maker is not None:
        return maker.operation is LINEAR
    return called_name(source) == "contiguous" and len(source.args) == 1 and not source.kwargs


def _only_slices(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(item, slice) or item is Ellipsis for item in items)
