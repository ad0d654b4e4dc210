"""`FuseAttention`: attention written out becomes `scaled_dot_product_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.tree import Op, Through, Tree, TreeMatch, Value
from regraft.core.values import value_of
from regraft.core.vocabulary import CAST, DIVIDE, DROPOUT, MATMUL, MULTIPLY, RESHAPE, SOFTMAX, Call, read
from regraft.transformations._attention import along_last, constant, fits, precise, read_scores, scaled, untransposed
from regraft.transformations._attention_masks import maskable, one_mask

_WEIGHTS = Op(SOFTMAX, Value("scores"), dim=Value("dim"), dtype=Value("dtype"))


class FuseAttention(Rewrite):
    """Fuse softmax attention that is written out into `F.scaled_dot_product_attention`.

    `softmax(c Q K^T + M) V = attention(Q, K, V, mask=M, scale=c)` (Vaswani et al. 2017, arXiv:1706.03762): with exactly
    the scale and the masks of the model, added or filled in, and NaN in the rows where the model has NaN because every
    key is hidden. Refused where the weights are read elsewhere, and what the fused call computes less precisely.

    Example:
        >>> import torch, regraft as rg
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        >>> gm = rg.FuseAttention()(rg.trace(Attention(), tuple(torch.randn(3, 1, 2, 5, 4))))
        >>> [(node.name, node.kwargs["scale"]) for node in gm.graph.nodes if node.op == "call_function"]
        [('matmul_1', 0.5)]
    """

    preserves_computation = True
    pattern = Tree(Op(MATMUL, Through((CAST, DROPOUT, RESHAPE), _WEIGHTS), Value("value")), SOFTMAX)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        assert isinstance(match, TreeMatch)
        require(match.reason)
        result, on_the_way = match.result, [call for node in match.inner if (call := read(node, match.owner))]
        require(
            *(facts.evaluating(call) for call in on_the_way if call.operation is DROPOUT),
            *(f"{call.where} reshapes the weights" for call in on_the_way if call.operation is RESHAPE),
        )
        scores = read_scores(match.values["scores"], match.owner)
        inner = sorted({*match.inner, *scores.nodes})
        key, value, masks = scores.product["other"], match.values["value"], [mask.node for mask in scores.masks]
        query, scale, above = _unscaled(scores.product["input"], scores.scale, match)
        shapes = tuple(value_of(node) for node in (query, key, value))
        q, k, v = shapes
        require(that(None not in shapes, f"the shapes around {result.name!r} are not known; capture with rg.trace"))
        assert q is not None
        assert k is not None
        assert v is not None
        softmax = _softmax_of(on_the_way)
        require(
            along_last(softmax, match.values["dim"]),
            facts.closed(inner, result),
            precise([query, key, value], [*inner, result]),
            fits(q, k, v, scores, softmax),
            maskable(scores.masks, q, match.owner),
            *(facts.unchanged(node, min(inner), result) for node in (query, key, value, *masks)),
        )

        transposed = read(key, match.owner)
        straight = untransposed(transposed) if transposed is not None else None
        operands = [query, straight or edit.insert(result, torch.transpose, key, -2, -1), value]
        mask, lost = one_mask(scores.masks, q, edit, result, match.owner)
        if q.ndim == 3:  # the fast kernels take four axes
            operands = [edit.insert(result, torch.unsqueeze, operand, 0) for operand in operands]
        keywords = {"attn_mask": mask, "scale": scale} if mask is not None else {"scale": scale}
        _put(edit, result, operands, keywords, q.ndim == 3, lost)
        edit.erase_unread({*inner, *above, *([key] if straight is not None else [])})
        return f"fused attention, scale {scale:.6g}" + (f", masks: {len(masks)}" if masks else "")


def _softmax_of(calls: list[Call]) -> Node:
    """The softmax."""
    return next(call.node for call in calls if call.operation is SOFTMAX)


def _unscaled(query: Node, scale: float, match: TreeMatch) -> tuple[Node, float, list[Node]]:
    """The query without a scale of its own, which joins that of the scores."""
    call = read(query, match.owner)
    if call is None or call.operation not in (MULTIPLY, DIVIDE) or len(query.users) > 1:
        return query, scale, []
    operands = [constant(call[name], match.owner) for name in ("input", "other")]
    if operands == [None, None] or (call.operation is DIVIDE and not operands[1]):
        return query, scale, []
    inner, factor = scaled(call)
    return inner, scale * factor, [query]


def _put(
    edit: Edit, result: Node, operands: list[Node], keywords: dict[str, Any], flat: bool, lost: Node | None
) -> None:
    """The fused call in the place of `result`; `lost` are the rows that are NaN."""
    if not flat and lost is None:
        edit.replace(result, F.scaled_dot_product_attention, *operands, **keywords)
        return
    fused = edit.insert(result, F.scaled_dot_product_attention, *operands, name="attention", **keywords)
    if lost is None:
        edit.replace(result, torch.squeeze, fused, 0)
        return
    whole = edit.insert(result, torch.squeeze, fused, 0) if flat else fused
    edit.replace(result, torch.masked_fill, whole, lost, math.nan)
