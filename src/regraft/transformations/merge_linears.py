"""`MergeLinears`: linear layers that take the same input become one, whose output is split."""

from __future__ import annotations

from itertools import accumulate

from torch import nn

from regraft.core.edit import Edit
from regraft.core.pattern import Match, Siblings
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import LINEAR, Call
from regraft.transformations._merge import common_parent, divide, side_by_side, take_part


class MergeLinears(Rewrite):
    """Merge linear layers that take the same input into one: the queries, keys and values of attention, gate and up.

    `[x W_1^T + b_1, x W_2^T + b_2] = x [W_1; W_2]^T + [b_1; b_2]`: one large matrix product in the place of several.
    Any number of layers, of any widths; a missing bias becomes zeros, and is missing again after undo. A layer that
    fits no other (hooked, tied, frozen beside trained ones) stays as it is, with the reason, and the rest are merged.

    Example:
        >>> import torch, regraft as rg
        >>> class Heads(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.q, self.k = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        ...     def forward(self, x):
        ...         return self.q(x), self.k(x)
        >>> gm = rg.MergeLinears()(rg.symbolic_trace(Heads()))
        >>> gm.q_k
        Linear(in_features=8, out_features=10, bias=True)
    """

    preserves_computation = True
    pattern = Siblings(LINEAR)

    def divide(self, match: Match, facts: Facts) -> list[Match]:
        """See `Rewrite.divide`."""
        return divide(match, facts, _expect_mergeable)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        calls = match.calls
        weights = [weight for call in calls if (weight := call.weight("weight"))]
        widths = [weight.tensor.shape[0] for weight in weights]
        first, x = calls[0], calls[0].input

        names = [call.where.rpartition(".")[2] for call in calls]
        name = edit.free_name(".".join(filter(None, (common_parent(calls), "_".join(names)))))
        like = first.module or nn.Linear(1, 1, device="meta")
        edit.put_module(
            name,
            like,
            {name: side_by_side(calls, name) for name in ("weight", "bias")},
            in_features=weights[0].tensor.shape[1],
            out_features=sum(widths),
        )
        merged = edit.insert_module(first.node, name, x, value=facts.widened(first.node, sum(widths)))
        for call, width, end in zip(calls, widths, accumulate(widths), strict=True):
            take_part(edit, facts, call, merged, (Ellipsis, slice(end - width, end)))
        return f"merged {' + '.join(names)}"


def _expect_mergeable(call: Call, facts: Facts) -> None:
    require(facts.plain(call))
    require(facts.alone(call))
    weight, bias = call.weight("weight"), call.weight("bias")
    assert weight is not None
    require(
        facts.agree([(w.name, w.tensor) for w in (weight, bias) if w is not None]),
        facts.strides_free(call.node, weight.tensor.shape[0]),
        that(weight.tensor.ndim == 2, f"{call.where}: the weight is not a matrix"),
    )
