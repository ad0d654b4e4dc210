"""`MergeLinears`: linear layers that take the same input become one, whose output is split."""

from __future__ import annotations

import operator
from itertools import accumulate

from torch import nn

from regraft.core.edit import Derived, Edit
from regraft.core.pattern import Match, Siblings
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import LINEAR, Call, Weight
from regraft.core.weights import Concatenate


class MergeLinears(Rewrite):
    """Merge linear layers that take the same input into one: the queries, keys and values of attention, gate and up.

    `[x W_1^T + b_1, x W_2^T + b_2] = x [W_1; W_2]^T + [b_1; b_2]`: one large matrix product in the place of several.
    Any number of layers, of any widths; a missing bias becomes zeros, and is missing again after undo.

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

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        calls = match.calls
        require(*(facts.plain(call) for call in calls))
        require(*(facts.alone(call) for call in calls), facts.distinct(calls))
        weights = [weight for call in calls if (weight := call.weight("weight"))]
        biases = [bias for call in calls if (bias := call.weight("bias"))]
        widths = [weight.tensor.shape[0] for weight in weights]
        first, last, x = calls[0], calls[-1], calls[0].input
        require(
            facts.agree([(weight.name, weight.tensor) for weight in (*weights, *biases)]),
            facts.same_mode(calls),
            facts.unchanged(x, first.node, last.node),
            *(facts.strides_free(call.node, width) for call, width in zip(calls, widths, strict=True)),
            that(all(w.tensor.ndim == 2 for w in weights), f"{first.where}: a weight is not a matrix"),
        )

        names = [call.where.rpartition(".")[2] for call in calls]
        name = edit.free_name(".".join(filter(None, (_parent(calls), "_".join(names)))))
        like = first.module or nn.Linear(1, 1, device="meta")
        edit.put_module(
            name,
            like,
            {"weight": _side_by_side(weights), "bias": _biases(calls, widths) if biases else None},
            in_features=weights[0].tensor.shape[1],
            out_features=sum(widths),
        )
        merged = edit.insert_module(first.node, name, x, value=facts.widened(first.node, sum(widths)))
        for call, width, end in zip(calls, widths, accumulate(widths), strict=True):
            edit.replace(call.node, operator.getitem, merged, (Ellipsis, slice(end - width, end)))
            edit.discard(call)
        return f"merged {' + '.join(names)}"


def _parent(calls: tuple[Call, ...]) -> str:
    """The innermost module that holds all the layers."""
    paths = [call.where.split(".")[:-1] for call in calls]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _side_by_side(weights: list[Weight]) -> Derived:
    shapes = tuple(tuple(weight.tensor.shape) for weight in weights)
    return Concatenate(0, shapes, (False,) * len(shapes), shapes), weights


def _biases(calls: tuple[Call, ...], widths: list[int]) -> Derived:
    biases = [call.weight("bias") for call in calls]
    present = [bias for bias in biases if bias is not None]
    parts = tuple((width,) for width in widths)
    shapes = tuple(tuple(bias.tensor.shape) for bias in present)
    return Concatenate(0, parts, tuple(bias is None for bias in biases), shapes), present
