"""`RemoveDeadWork`: what is computed for nothing, computed twice, or computed anew from constants each time."""

from __future__ import annotations

from torch.fx import Node

from regraft.core.edit import Edit
from regraft.core.expect import expect_number
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import DROPOUT, Call, read
from regraft.transformations._constants import fold_constant
from regraft.transformations._redundant import Redundant, copies, identity_of, unchanged_value


class RemoveDeadWork(Rewrite):
    """Remove dead nodes, identities, eval-mode dropout, casts, views, pads and copies that do nothing; work done twice.

    `f(x) = x` for the first kinds; `y = f(x), z = f(x)` becomes `z = y`. What depends on constants alone is computed
    once. Nothing is removed that draws random numbers or writes into a value, no copy that protects a value from being
    written into, and no second result that the caller gets beside the first; nor a copy or a reshape of which the graph
    may tell in which order it lies in memory: a `view` can, of the value itself or of a sum of it.

    Args:
        largest_constant: The most bytes that a folded constant may take, unless it is the weight of a layer, as weight
            norm computes it, and takes no more than what it is made of. By default 4 MB: the relative positions of a
            layer of BEiT take 2.

    Example:
        >>> import torch, regraft as rg
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.relu() + torch.dropout(x.relu(), 0.1, False)
        >>> gm = rg.RemoveDeadWork()(rg.symbolic_trace(Model()))
        >>> [node.name for node in gm.graph.nodes]
        ['x', 'relu', 'add', 'output']
    """

    preserves_computation = True
    exhaustive = True  # what goes may have stood between others that do

    def __init__(self, largest_constant: int = 1 << 22) -> None:
        expect_number(largest_constant, "largest_constant", "RemoveDeadWork(largest_constant=1 << 22)")
        self.largest_constant = largest_constant

    @property
    def pattern(self) -> Redundant:  # type: ignore[override]  # nobody sets it
        """See `Rewrite.pattern`."""
        return Redundant(self.largest_constant)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        node, *others = match.nodes
        source = unchanged_value(node, match.owner)
        if not node.users:
            return _remove_dead(node, edit, facts)
        if not others:
            return fold_constant(match, edit, facts, self.largest_constant)
        if source is not None:
            return _remove_unchanged(node, source, read(node, match.owner), edit, facts)
        return _remove_repeated(node, others[0], edit, facts)


def _remove_dead(node: Node, edit: Edit, facts: Facts) -> str:
    require(facts.repeatable(node))

    edit.erase(node)
    return "nobody reads it"


def _remove_unchanged(node: Node, source: Node, call: Call | None, edit: Edit, facts: Facts) -> str:
    if call is not None and call.operation is DROPOUT:
        require(facts.evaluating(call))
    require(facts.in_place(node) if call is None or call.operation is not DROPOUT else None)
    require(facts.plain(call) if call is not None and call.module is not None else None)
    if copies(node, source, facts.owner(node)):
        require(facts.untouched(source), facts.untouched(node))
        require(facts.private(source) if facts.returned(node) else None, facts.laid_out_like_a_copy(source, node))

    edit.redirect(node, source)
    edit.erase(node)
    if call is not None and call.module is not None:
        edit.discard(call)
    return f"its result is {source.name!r} unchanged"


def _remove_repeated(node: Node, first: Node, edit: Edit, facts: Facts) -> str:
    both = facts.returned(node) and facts.returned(first)
    require(
        that(identity_of(node) == identity_of(first), f"{node.name!r} and {first.name!r} read different values"),
        facts.repeatable(node),
        *(facts.untouched(value) for value in (node, first) if node.op != "get_attr"),
        *(facts.unchanged(value, first, node) for value in node.all_input_nodes),
        that(not both or node.op == "get_attr", f"the caller gets both {first.name!r} and {node.name!r}"),
    )

    edit.redirect(node, first)
    edit.erase(node)
    return f"{first.name!r} has computed it already"
