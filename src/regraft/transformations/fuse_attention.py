"""`FuseAttention`: attention written out becomes `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch.fx import Node

from regraft.core.edit import Edit
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.tree import Op, Through, Tree, TreeMatch, Value
from regraft.core.values import value_of
from regraft.core.vocabulary import CAST, DROPOUT, MATMUL, MULTIPLY, RESHAPE, SOFTMAX, Call, read
from regraft.transformations._attention import along_last, fits, precise, read_scores, straightened, unscaled
from regraft.transformations._attention_calls import (
    Attentions,
    batches_of,
    drop,
    grouped,
    is_causal,
    lighten,
    put,
    repeats_in_vain,
)
from regraft.transformations._attention_flat import fuse_merged
from regraft.transformations._attention_masks import maskable, one_mask

_WEIGHTS = Op(SOFTMAX, Value("scores"), dim=Value("dim"), dtype=Value("dtype"))


class FuseAttention(Rewrite):
    """Fuse softmax attention that is written out into `F.scaled_dot_product_attention`.

    `softmax(c Q K^T + M) V = attention(Q, K, V, mask=M, scale=c)` (Vaswani et al. 2017, arXiv:1706.03762): with exactly
    the scale and the masks of the model, added or filled in, and NaN in the rows where the model has NaN because every
    key is hidden. Refused where the weights are read elsewhere, and what the fused call computes less precisely. The
    scales of the query and the key join that of the scores. A scale that is a tensor, one element for each head,
    multiplies the query, but not in half precision; a mask that was added to a view of the scores, as for the windows
    of Swin V2, gets their axes; and of more than four axes the first become one: torch has no fast kernel for those.

    Keys and values that are repeated for groups of queries (Ainslie et al. 2023, arXiv:2305.13245) are given to the
    call as they were before, on the CPU; and a mask that is known to hide the later positions alone is not made at all.
    Calls that are fused already get the same, and four axes where they or their mask have others.

    The fused call lays its result otherwise than a product does; where a reader may tell, a `view` of a sum of it, say,
    a copy with the product's order follows.

    What is not finite may come out otherwise: torch's kernels give zeros for a query of NaNs, and a number that is
    filled in is added by them, which leaves the NaN of a hidden key where it was. Of a row whose keys are all hidden by
    such a number, gradients reach the query and the keys.

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
    pattern = Attentions(Tree(Op(MATMUL, Through((CAST, DROPOUT, RESHAPE), _WEIGHTS), Value("value")), SOFTMAX))

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        if not isinstance(match, TreeMatch):
            return lighten(match, edit, facts)
        result, on_the_way = match.result, [call for node in match.inner if (call := read(node, match.owner))]
        require(*(facts.evaluating(call) for call in on_the_way if call.operation is DROPOUT))
        if any(call.operation is RESHAPE for call in on_the_way):
            return fuse_merged(match, edit, facts)
        scores = read_scores(match.values["scores"], match.owner, facts)
        inner = sorted({*match.inner, *scores.nodes})
        value, masks = match.values["value"], [mask.node for mask in scores.masks]
        read_too = [*masks, *(factor.node for factor in scores.factors)]
        query, scale, above = unscaled(scores.product["input"], scores.scale, match, facts)
        key, straight, scale, below = straightened(scores.product["other"], scale, match, facts)
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
            maskable(scores.masks, q, facts),
            facts.unchanged(query, min([*inner, *above]), result),
            facts.unchanged(straight or key, min([*inner, *below]), result),
            *(facts.unchanged(node, min(inner), result) for node in (key, value, *read_too)),
        )

        whole = [straight or key, value]
        pair = grouped(whole[0], value, match.owner)
        if pair is not None and repeats_in_vain(query, pair, whole, result, facts) is not None:
            pair = None
        causal = is_causal(scores.masks, scale, query, value, match.owner, facts)
        for factor in scores.factors:
            by = torch.mul if factor.call.operation is MULTIPLY else torch.div
            query = edit.insert(result, by, query, factor.node)
        operands = [query, *(pair or (straight or edit.insert(result, torch.transpose, key, -2, -1), value))]
        mask, lost = one_mask(scores.masks if not causal else [], q, edit, result, facts)
        given = {"attn_mask": mask, "is_causal": causal or None, "scale": scale, "enable_gqa": pair and True}
        keywords = {name: one for name, one in given.items() if one is not None}
        ordered = facts.order_free(result) is not None
        put(edit, result, operands, keywords, batches_of(q, mask), lost, ordered)
        edit.erase_unread({*inner, *above, *below})
        for left in (*(whole if pair else ()), *(masks if causal else ())):
            drop(left, edit)
        what = ", causal" if causal else f", masks: {len(masks)}" if masks else ""
        return f"fused attention, scale {scale:.6g}{what}" + (", keys and values not repeated" if pair else "")


def _softmax_of(calls: list[Call]) -> Node:
    """The softmax."""
    return next(call.node for call in calls if call.operation is SOFTMAX)
