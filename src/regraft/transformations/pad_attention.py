"""`PadAttention`: fused attention whose values are of another width than its keys gets them of one width."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import value_of
from regraft.core.vocabulary import ATTENTION, Call, read
from regraft.transformations._attention_calls import settings_of

_HALF = (torch.float16, torch.bfloat16)


class _Uneven(Calls):
    """The calls whose values are of another width than their keys."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        for nodes in super().candidates(owner):
            call = read(nodes[0], owner)
            widths = _widths(call) if call is not None else None
            if widths is not None and widths[0] != widths[1]:
                yield nodes


class PadAttention(Rewrite):
    """Pad the values of fused attention with zeros to the width of the keys, or the keys and queries to that of values.

    On the CPU torch has a fast kernel for one width alone, and computes anything else by products that write all scores
    to memory. Zeros change none of the sums: what they add to the result is cut off again, and a score gets nothing
    from them; its scale stays that of the width which the queries had. DeepSeek's latent attention (DeepSeek-AI 2024,
    arXiv:2405.04434), with keys of 192 and values of 128, is such.

    Refused where one query alone reads the keys, but in half precision: there the copy that is padded takes longer than
    what it saves. What is not finite may come out otherwise, as in any call of the fast kernel: it gives zeros for a
    query of NaNs.

    Example:
        >>> import torch, regraft as rg
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> q, k, v = torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 4)
        >>> gm = rg.PadAttention()(rg.trace(Attention(), (q, k, v)))
        >>> [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]
        ['pad', 'scaled_dot_product_attention', 'narrow', 'contiguous.default']
        >>> gm(q, k, v).shape
        torch.Size([1, 2, 5, 4])
    """

    preserves_computation = True
    pattern = _Uneven(ATTENTION)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        query, key, value = (call[name] for name in ("input", "key", "value"))
        widths, known = _widths(call), value_of(query)
        assert widths is not None
        assert known is not None
        length: Any = known.shape[-2]
        alone = isinstance(length, int) and length == 1 and known.dtype not in _HALF
        require(
            that(not call["dropout_p"], f"{call.where} drops weights at random"),
            that(known.ndim == 4, f"{call.where} has {known.ndim} axes, and torch's fast kernel takes four"),
            that(known.device.type in ("cpu", "meta"), f"{call.where} is on {known.device}, which has other kernels"),
            that(not alone, f"{call.where} has one query, for which a padded copy of all keys does not pay"),
        )
        width, wide, given = widths[1], max(widths), settings_of(call)
        if widths[0] < wide:
            given.setdefault("scale", 1 / math.sqrt(widths[0]))
        node, laid = call.node, facts.order_free(call.node) is not None or facts.returned(call.node)
        operands = [_padded(one, wide, node, edit) for one in (query, key, value)]
        rest: list[tuple[Any, ...]] = [(torch.narrow, -1, 0, width)] if width < wide else []
        rest += [(torch.ops.aten.contiguous.default,)] if laid else []  # as it was: products lie so
        last: tuple[Any, ...] = (F.scaled_dot_product_attention, *operands)
        for target, *more in rest:
            last = (target, edit.insert(node, *last, **given), *more)
            given = {}
        edit.replace(node, *last, **given)
        what = f"values of width {width}" if width < wide else f"queries and keys of width {widths[0]}"
        return f"{what} padded to {wide}"


def _widths(call: Call) -> tuple[int, int] | None:
    """How wide the queries and keys are, and the values; None where that is not known."""
    query, value = value_of(call["input"]), value_of(call["value"])
    if query is None or value is None:
        return None
    widths: tuple[Any, Any] = query.shape[-1], value.shape[-1]
    return widths if all(isinstance(width, int) for width in widths) else None


def _padded(value: Node, wide: int, before: Node, edit: Edit) -> Node:
    known = value_of(value)
    assert known is not None
    more = wide - known.shape[-1]
    return edit.insert(before, F.pad, value, (0, more)) if more else value
