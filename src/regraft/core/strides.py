"""Who needs a tensor to lie as it does: those who read it, or a view of it, or what takes its order over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from regraft.core.mutation import may_alias
from regraft.core.values import called_name, reads_shape_only, value_of
from regraft.core.vocabulary import LAYER_NORM, LINEAR, MATMUL, attribute, read

_VIEWS = {"view", "_unsafe_view"}
_STRIDED = {"view_as", "as_strided", "as_strided_", "stride", "sym_stride", "is_contiguous", "data_ptr"}
_STRIDED |= {"storage_offset", "sym_storage_offset", "view_as_complex", *_VIEWS}
_CONTIGUOUS = {"contiguous", "clone"}
_FAR = 400  # so many values that take an order over are followed; convolutions do, down to the head of a network

OWN_ORDER = (LAYER_NORM, LINEAR, MATMUL)
"""Operations whose results lie as they always do; other results may take over the order of an argument."""


def strided_reader(value: Node, width: int, owner: GraphModule) -> Node | None:
    """A node that needs more of `value` than that its last axis, of `width` elements, is contiguous."""
    for user in value.users:
        if _needs_strides(user, value, owner) and not _splits_last_axis(user, width):
            return user
    pending, seen = [value], {value}
    while pending:
        for view in _views(pending.pop(), owner):
            if view not in seen:
                seen.add(view)
                pending.append(view)
                for user in view.users:
                    if _needs_strides(user, view, owner):
                        return user
    return None


def depends_on_strides(user: Node, value: Node, owner: GraphModule) -> bool:
    """Whether `user` itself may fail, or answer otherwise, where `value` has other strides."""
    return _needs_strides(user, value, owner)


def order_readers(value: Node, owner: GraphModule) -> Iterator[Node]:
    """The nodes that may notice in which order the elements of `value` lie in memory; an output, since the caller may.

    Others than views take that order over, too: a sum, say, is laid as what is added.
    """
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        for user in current.users:
            if user.op == "output" or _needs_strides(user, current, owner) or len(seen) > _FAR:
                yield user
            elif user not in seen and _takes_order_over(user, current, owner):
                seen.add(user)
                pending.append(user)


def _takes_order_over(user: Node, value: Node, owner: GraphModule) -> bool:
    call = read(user, owner)
    own = call is not None and call.operation in OWN_ORDER
    return not own and not reads_shape_only(user, value) and called_name(user) != "contiguous"


def _views(value: Node, owner: GraphModule) -> Iterator[Node]:
    """What may lie in the memory of `value`, with strides that come from its own."""
    for user in value.users:
        if may_alias(user, owner) and not reads_shape_only(user, value) and called_name(user) not in _CONTIGUOUS:
            yield user


def _needs_strides(user: Node, value: Node, owner: GraphModule) -> bool:
    if user.op == "call_module":
        return _module_may_need(attribute(owner, str(user.target)))
    if user.op not in ("call_method", "call_function") or value not in (*user.args[:1], *user.kwargs.values()):
        return False
    return called_name(user) in _STRIDED


def _module_may_need(module: Any) -> bool:
    """Whether a module may view its input: one that is not torch's own may do anything."""
    if isinstance(module, GraphModule):
        return any(called_name(node) in _STRIDED for node in module.graph.nodes)
    return not hasattr(module, "regraft_pure") and not type(module).__module__.startswith("torch.")


def _splits_last_axis(view: Node, width: int) -> bool:
    """Whether a view only divides the last axis: its trailing sizes multiply to `width`."""
    sizes: Sequence[Any] = view.args[1:]
    shape: Iterable[Any] = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)) else sizes
    known = value_of(view)
    if called_name(view) not in _VIEWS:
        return False
    if known is not None:
        shape = tuple(known.shape)
    product = 1
    for size in reversed(list(shape)):
        if not isinstance(size, int) or size < 1:
            return False
        product *= size
        if product == width:
            return True
    return False
