"""What writes into its argument, as what makes a new tensor: how such a tensor lies in memory is what a trace has seen.

TorchScript takes such writes out as well, but forgets then in which order the result lies, and oneDNN Graph gives it in
another one than the graph was traced with.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Container, Iterator
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from regraft.core.flow import draws
from regraft.core.mutation import is_own, may_alias, read_later, writes
from regraft.core.vocabulary import attribute


def out_of_place(gm: GraphModule) -> dict[Node, tuple[Node, Callable[..., Any]]]:
    """For each node that writes into memory that nobody reads later but through it: its argument, and what to call.

    That takes the arguments of the node. Its result may be of another size or type than what would be written to.

    Args:
        gm: The graph.
    """
    found: dict[Node, tuple[Node, Callable[..., Any]]] = {}
    for node in gm.graph.nodes:
        written = writes(node, gm)
        if len(written) != 1 or draws(node, gm):
            continue
        own = is_own(written[0], gm, found) or _is_own_part(written[0], node, gm, found)
        if own and read_later(written[0], node, gm) is None:
            instead = _instead(node, gm)
            if callable(instead):
                found[node] = written[0], instead
    return found


def _is_own_part(value: Node, last: Node, gm: GraphModule, found: Container[Node]) -> bool:
    """Whether a value is a part of a tensor of which nobody reads that part after `last`, as of a merged layer's."""
    if value.target is not operator.getitem:
        return False
    whole: Node = value.args[0]  # type: ignore[assignment]
    others = (user for user in whole.users if user is not value and not _are_apart(user, value))
    return is_own(whole, gm, found) and all(user < last and not may_alias(user, gm) for user in others)


def _are_apart(one: Node, other: Node) -> bool:
    """Whether two slices of one tensor have no element in common."""
    if one.target is not operator.getitem or one.args[0] is not other.args[0]:
        return False
    indices = [index if isinstance(index, tuple) else (index,) for index in (one.args[1], other.args[1])]
    one_axis_each = all(type(each) in (slice, int, EllipsisType) for index in indices for each in index)
    if not one_axis_each or [each is ... for each in indices[0]] != [each is ... for each in indices[1]]:
        return False
    return any(stop <= begin or end <= start for (start, stop), (begin, end) in zip(*map(_ranges, indices)))


def _ranges(index: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """Between which places a slice of each axis lies, as far as that is known without the axis's size."""
    for each in index:
        start, stop = (each.start or 0, each.stop) if isinstance(each, slice) else (0, None)
        stop = sys.maxsize if stop is None else stop
        known = isinstance(start, int) and isinstance(stop, int) and start >= 0 and stop >= 0
        yield (start, stop) if known else (0, sys.maxsize)


def _instead(node: Node, gm: GraphModule) -> object:
    target: Any = node.target
    if node.op == "call_module":
        layer = attribute(gm, target)
        if layer.__dict__.get("inplace") is not True:  # a layer of which nothing is known
            return None
        layer = copy.copy(layer)
        layer.inplace = False
        return layer
    if node.kwargs.get("inplace") is True:
        return lambda *args, **kwargs: target(*args, **{**kwargs, "inplace": False})
    if node.op == "call_method":
        return getattr(Tensor, target.removesuffix("_"), None)
    name = getattr(target, "__name__", "")
    if isinstance(target, OpOverload):
        name, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.aten, name[:-1], None), overload, None)
    for library, plain in ((operator, name[1:]), (torch, name[:-1]), (F, name[:-1])):
        if getattr(library, name, None) is target:
            return getattr(library, plain, None)
    return None
