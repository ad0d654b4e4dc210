"""Attention whose heads were merged with the batch before its products, with a bias for each head perhaps: Bloom's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.query import Facts, require, that
from regraft.core.tree import TreeMatch
from regraft.core.values import same_shape, value_of
from regraft.core.vocabulary import ADD, CAST, PRODUCT_AND_SUM, RESHAPE, SOFTMAX, read
from regraft.transformations._attention import Mask, along_last, precise, read_scores, untransposed
from regraft.transformations._attention_calls import drop
from regraft.transformations._attention_masks import maskable, one_mask

_DEEPEST = 12


@dataclass
class _Scores:
    """The scores: those of the merged heads, the reshape that parts them, the masks, and the bias of each head."""

    query: Any
    key: Any
    scale: float
    bias: Node | None = None
    masks: list[Mask] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


def fuse_merged(match: TreeMatch, edit: Edit, facts: Facts) -> str:
    """Fuse attention of merged heads, on the heads as they were before they were merged.

    Args:
        match: From the softmax to the product with the values, with one reshape of the weights between.
        edit: The site's transaction.
        facts: The safety oracle.
    """
    result, owner = match.result, match.owner
    calls = [call for node in match.inner if (call := read(node, owner)) is not None]
    softmax = next(call.node for call in calls if call.operation is SOFTMAX)
    weights, (merging, *more) = value_of(softmax), [call for call in calls if call.operation is RESHAPE]
    refusal = f"{merging.where} reshapes the weights"
    require(that(weights is not None and weights.ndim == 4 and not more, refusal))
    assert weights is not None
    scores = _read(match.values["scores"], weights, owner, facts)
    flat = scores.query, scores.key, match.values["value"]
    operands = [node for value in flat if (node := _before_merging(value, weights, owner)) is not None]
    sizes = value_of(merging.node)
    alike = sizes is not None and sizes.ndim == 3 and same_shape(sizes.shape[1:], weights.shape[2:])
    require(that(len(operands) == 3 and alike, f"{refusal}, and not by merging the heads with the batch"))
    query = value_of(operands[0])
    assert query is not None
    inner = sorted({*match.inner, *scores.nodes})
    read_too = [*operands, *(mask.node for mask in scores.masks), *([scores.bias] if scores.bias is not None else [])]
    first = min([*inner, *(node for node in flat if isinstance(node, Node))])
    require(
        along_last(softmax, match.values["dim"]),
        facts.closed(inner, result),
        precise(operands, [*inner, result]),
        maskable(scores.masks, query, facts),
        _addable(scores, query, weights),
        *(facts.unchanged(node, first, result) for node in read_too),
    )

    masks = scores.masks
    if scores.bias is not None:
        heads = (-1, weights.shape[1])
        masks = [Mask(edit.insert(result, torch.unflatten, scores.bias, 0, heads)), *masks]
    mask, lost = one_mask(masks, query, edit, result, facts)
    keywords = {"scale": scores.scale} if mask is None else {"attn_mask": mask, "scale": scores.scale}
    value = edit.insert(result, F.scaled_dot_product_attention, *operands, name="attention", **keywords)
    if lost is not None:
        value = edit.insert(result, torch.masked_fill, value, lost, float("nan"))
    value = edit.insert(result, torch.flatten, value, 0, 1)
    edit.replace(result, torch.ops.aten.contiguous.default, value)
    edit.erase_unread(inner)
    for left in flat:
        drop(left, edit)
    return f"fused attention of merged heads, scale {scores.scale:.6g}, masks: {len(masks)}"


def _read(value: Any, weights: Tensor, owner: GraphModule, facts: Facts) -> _Scores:
    """The scores that `value` is, or a refusal that names what is not understood."""
    masks, nodes = list[Mask](), list[Node]()
    while True:
        call = read(value, owner)
        known = call is not None and _leads(value, owner)
        require(that(known, f"{value.name!r} is no scores of merged heads, nor a mask"))
        assert call is not None
        nodes.append(call.node)
        if call.operation is RESHAPE:
            break
        value, mask = call["input"], call["other"]
        if call.operation is ADD:
            value, mask = (value, mask) if _leads(value, owner) else (mask, value)
            plain = call["alpha"] in (None, 1) and isinstance(mask, Node)
            require(that(plain, f"{call.where} adds a multiple of a mask, or a number"))
            masks.append(Mask(mask))
    parted, product = value_of(call.node), read(call.input, owner)
    require(that(parted is not None and same_shape(parted.shape, weights.shape), f"{call.where} parts other heads"))
    if product is not None and product.operation is PRODUCT_AND_SUM:
        scale, bias = product["alpha"], product["bias"]
        plain = product["beta"] == 1 and isinstance(scale, (int, float)) and isinstance(bias, Node)
        require(that(plain, f"{product.where} adds a multiple of its bias, or scales by no number"))
        found = _Scores(product["input"], product["other"], float(scale), bias)
        product_node, more = product.node, [product.node]
    else:
        inner = read_scores(call.input, owner, facts)
        plain = not inner.masks and not inner.factors
        require(that(plain, f"{call.where} parts heads that are masked already, or scaled by a tensor"))
        found = _Scores(inner.product["input"], inner.product["other"], inner.scale)
        product_node, more = inner.product.node, inner.nodes
    flat = value_of(product_node)
    require(that(flat is not None and same_shape(flat.shape[1:], weights.shape[2:]), f"{call.where} parts more"))
    transposed = read(found.key, owner)
    straight = untransposed(transposed) if transposed is not None else None
    require(that(straight is not None, f"the key of {product_node.name!r} is not transposed"))
    found.key, found.masks, found.nodes = straight, masks, [*nodes, *more]
    return found


def _leads(value: Any, owner: GraphModule, depth: int = _DEEPEST) -> bool:
    """Whether a value is parted from merged heads, cast and masked perhaps."""
    call = read(value, owner) if depth else None
    if call is None or call.operation not in (ADD, CAST, RESHAPE):
        return False
    if call.operation is RESHAPE:
        before, after = value_of(call.input), value_of(call.node)
        return before is not None and after is not None and (before.ndim, after.ndim) == (3, 4)
    return any(_leads(call[name], owner, depth - 1) for name in ("input", "other"))


def _before_merging(value: Any, weights: Tensor, owner: GraphModule) -> Node | None:
    """The value of (batch, heads, length, width) that was reshaped to (batch * heads, length, width)."""
    call, after = read(value, owner), value_of(value)
    source: Any = call["input"] if call is not None and call.operation is RESHAPE else None
    before = value_of(source)
    if before is None or after is None or (before.ndim, after.ndim) != (4, 3):
        return None
    return source if same_shape(before.shape, [*weights.shape[:2], *after.shape[1:]]) else None


def _addable(scores: _Scores, query: Tensor, weights: Tensor) -> str | None:
    """The bias of each head can be added to the masks."""
    if scores.bias is None:
        return None
    bias, merged, heads = value_of(scores.bias), value_of(scores.query), weights.shape[1]
    assert merged is not None
    fits = (
        bias is not None
        and bias.ndim == 3
        and same_shape(bias.shape[:1], merged.shape[:1])
        and bias.dtype == query.dtype
        and isinstance(heads, int)
    )
    whole = query.dtype is not torch.float16
    return that(fits, f"{scores.bias.name!r} is no bias of each head in {query.dtype}") or that(
        whole, "float16 rounds the scores of each step of the model, and the fused call does not"
    )
