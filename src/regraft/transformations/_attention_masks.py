"""The masks of attention: what they may hold, and the one mask that stands for all of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from regraft.core.edit import Edit
from regraft.core.query import Facts, that
from regraft.core.values import value_of
from regraft.core.vocabulary import (
    ADD,
    EMBEDDING,
    EXPAND,
    MASKED_FILL,
    PERMUTE,
    RESHAPE,
    TRANSPOSE,
    UNSQUEEZE,
    WHERE,
    Operation,
    attribute,
    read,
)
from regraft.transformations._attention import Mask, constant

_BOUNDED_BY: dict[Operation, tuple[str, ...]] = {
    ADD: ("input", "other"),
    WHERE: ("input", "other"),
    MASKED_FILL: ("input", "value"),
    EMBEDDING: ("weight",),
    **dict.fromkeys((RESHAPE, EXPAND, UNSQUEEZE, TRANSPOSE, PERMUTE), ("input",)),
}
_DEEPEST = 12
_NO_MASK = 1e3
"""Below this a bias is a bias; a score hidden by it would still have weight."""


def largest(value: Any, facts: Facts, depth: int = _DEEPEST) -> float:
    """A bound of the magnitude of every element; infinity where there is none for certain."""
    number = constant(value, facts)
    if number is not None or isinstance(value, Tensor):
        return abs(number) if number is not None else _largest_of(value)
    if not depth or not isinstance(value, Node) or facts.untouched(value) is not None:
        return math.inf
    owner = facts.owner(value)
    if value.op == "get_attr":
        return _largest_of(attribute(owner, str(value.target)))
    if value.target in (torch.unflatten, torch.clone):
        return largest(value.args[0], facts, depth - 1)
    call = read(value, owner)
    if call is None:
        return math.inf
    bounds = [largest(call[name], facts, depth - 1) for name in _BOUNDED_BY.get(call.operation, ())]
    return sum(bounds) if call.operation is ADD else max(bounds, default=math.inf)


def _largest_of(tensor: Any) -> float:
    if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
        return math.inf
    return float(tensor.detach().abs().max()) if tensor.isfinite().all() else math.inf


def maskable(masks: list[Mask], query: Tensor, facts: Facts) -> str | None:
    """The masks can be given to the fused call, and mean the same there."""
    added = [mask for mask in masks if mask.fill is None]
    filled = [mask for mask in masks if mask.fill is not None]
    if filled and len(masks) > 1 and any(mask.fill != -math.inf for mask in filled):
        return f"{filled[0].node.name!r} fills in a finite score beside another mask, and a hidden row would differ"
    if filled and added:
        return f"{filled[0].node.name!r} and {added[0].node.name!r} mask in two ways, one filled in and one added"
    for mask in masks:
        value = value_of(mask.node)
        wanted = query.dtype if mask.fill is None else torch.bool
        if value is None or value.dtype != wanted or (value.ndim > query.ndim and not mask.parts):
            return f"the mask {mask.node.name!r} is not of {wanted}, or has more axes than the scores"
    # in float16 a finite mask swallows the scores of a row that is hidden whole, and in the fused float32 it does not
    finite = any(mask.fill != -math.inf for mask in filled)
    finite |= sum(largest(mask.node, facts) for mask in added) > _NO_MASK
    half = query.dtype is torch.float16 and finite
    return that(not half, "float16 rounds away the scores of a row that a finite mask hides; the fused call does not")


def one_mask(masks: list[Mask], like: Tensor, edit: Edit, before: Node, facts: Facts) -> tuple[Any, Any]:
    """One mask for all of them, and which rows it hides whole, where the model has NaN there."""
    if not masks:
        return None, None
    nodes = [_of_scores(mask, like, edit, before) for mask in masks]
    if masks[0].fill is None:
        added = nodes[0]
        for node in nodes[1:]:
            added = edit.insert(before, torch.add, added, node)
        bound = sum(largest(mask.node, facts) for mask in masks)
        if bound <= torch.finfo(like.dtype).max * (1 + torch.finfo(like.dtype).eps / 4):
            return added, None
        return added, edit.insert(before, torch.all, edit.insert(before, torch.eq, added, -math.inf), -1, True)
    hidden = [edit.insert(before, torch.logical_not, n) if m.keeps else n for m, n in zip(masks, nodes, strict=True)]
    every = hidden[0]
    for node in hidden[1:]:
        every = edit.insert(before, torch.logical_or, every, node)
    if masks[0].fill == -math.inf:
        return edit.insert(before, torch.logical_not, every), edit.insert(before, torch.all, every, -1, True)
    zeros = edit.insert(before, torch.zeros_like, every, dtype=like.dtype)
    return edit.insert(before, torch.masked_fill, zeros, every, torch.finfo(like.dtype).min), None


def _of_scores(mask: Mask, like: Tensor, edit: Edit, before: Node) -> Node:
    """A mask with the axes of the scores, where it was one of a view of them; of two axes at least."""
    if not mask.parts:
        value, node = value_of(mask.node), mask.node
        for _ in range(2 - value.ndim if value is not None else 0):  # the fused call broadcasts no fewer
            node = edit.insert(before, torch.unsqueeze, node, 0)
        return node
    wide = edit.insert(before, torch.broadcast_to, mask.node, (*mask.parts, *[-1] * (like.ndim - 1)))
    return edit.insert(before, torch.flatten, wide, 0, len(mask.parts) - 1)
