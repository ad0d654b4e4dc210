"""`ReplaceMatmul`: a matrix product with a weight becomes a linear layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from regraft.core.edit import Derived, Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import value_of
from regraft.core.vocabulary import ADDMM, MATMUL, Call, Weight, read
from regraft.core.weights import Same
from regraft.transformations._factor import Factor, bias_of, without_views


class _Products(Calls):
    """The products whose second factor alone is a weight."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        for nodes in super().candidates(owner):
            call = read(nodes[0], owner)
            given, other = (call["input"], call["other"]) if call is not None else (None, None)
            if isinstance(given, Node) and not Factor.of(given, owner) and Factor.of(other, owner):
                yield nodes


class ReplaceMatmul(Rewrite):
    """Replace the product with a weight by a linear layer, together with the weight that is added to it.

    `x W + b` is a linear layer with the weight `W^T`: the `addmm` of GPT-2's `Conv1D`, a `x @ W` that was written by
    hand, and, after `ReplaceEinsum`, the einsums of XLNet. The rules for layers know it then, so that it can be merged,
    scaled and packed. Where the product is given rows, and its result is viewed as what they were made of, the layer
    takes that. A weight that others read, too, stays as it is.

    Example:
        >>> import torch, regraft as rg
        >>> class Projection(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.bias = (torch.nn.Parameter(torch.randn(size)) for size in [(4, 6), (6,)])
        ...     def forward(self, x):
        ...         return x @ self.weight + self.bias
        >>> gm = rg.ReplaceMatmul()(rg.symbolic_trace(Projection()))
        >>> gm.weight_linear
        Linear(in_features=4, out_features=6, bias=True)
    """

    preserves_computation = True
    pattern = _Products(MATMUL, ADDMM)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        factor = Factor.of(call["other"], match.owner)
        assert factor is not None
        weight, how = factor.weight, factor.derivation()
        require(
            *_usable(weight, call, facts),
            *(facts.only_user(view.node, next(iter(view.node.users))) for view in factor.views),
            that(how is not None, f"{weight.name} is no matrix in {call.where}, or its rows have to be put together"),
        )
        assert how is not None
        columns, rows = how.size if how.transposed else how.size[::-1]
        added, bias = bias_of(call, rows, match.owner, facts)
        if bias is not None:
            require(*_usable(bias, call, facts), facts.agree([(w.name, w.tensor) for w in (weight, bias)]))

        derived: dict[str, Derived | None] = {"weight": (how, [weight]), "bias": (Same(), [bias]) if bias else None}
        name = edit.free_name(f"{weight.name.removesuffix('.weight')}_linear")
        edit.put_module(name, nn.Linear(columns, rows, device="meta").eval(), derived)
        given, end = without_views(call, added, rows, match.owner, facts)
        layer = edit.insert_module(call.node, name, given, value=value_of(end))
        edit.redirect(end, layer)
        edit.erase_unread({end, added, call.node})
        edit.erase_unread({*(view.node for view in factor.views), call["input"]} - {given})
        for part in filter(None, (weight, bias)):
            if part.node is not None and not part.node.users:
                edit.discard_weight(part.node)
        return f"{weight.name} is the weight of a linear layer"


def _usable(weight: Weight, call: Call, facts: Facts) -> Iterator[str | None]:
    assert weight.node is not None
    yield facts.plain_tensor(weight)
    yield facts.untied(weight, call)
    yield facts.untouched(weight.node)
