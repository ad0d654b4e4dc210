"""`RemoveUnreadRows`: where only some rows of a result are read, the others are not computed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.edit import Edit
from regraft.core.pattern import Match, Pattern
from regraft.core.query import Facts, require
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import ATTENTION, DROPOUT, RESHAPE, read
from regraft.transformations._read_rows import ReadRows


class _Reads(Pattern):
    """All reads of a value of which only some rows are read, and layers compute the others."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        for node in owner.graph.nodes:
            found = ReadRows.of(node, owner)
            if found is not None:
                yield (node, *found.reads)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        return Match(owner, (), nodes) if ReadRows.of(nodes[0], owner) is not None else None


class RemoveUnreadRows(Rewrite):
    """Remove the rows that nobody reads from all layers that compute each row by itself, and from attention's queries.

    `f(x)[:, 0] = f(x[:, :1])[:, 0]`, as far up as nobody reads another row: in the last layer of a classifier that
    reads the first token alone, as ViT and BERT are, or of a language model of whose logits only the last are wanted,
    everything but keys and values. Rows are those of any axis. Sizes have to be known, as `trace` knows them. Attention
    that is causal is left out unless the last row alone is read, which sees all keys.

    Example:
        >>> import torch, regraft as rg
        >>> class Head(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 8)
        ...     def forward(self, x):
        ...         return self.layer(x).relu()[:, 0]
        >>> gm = rg.RemoveUnreadRows()(rg.trace(Head(), (torch.randn(2, 5, 4),)))
        >>> print(rg.history(gm)[-1].applied[0].sentence)
        2 nodes compute 1 of 5 rows of 'relu'
        >>> gm(torch.randn(2, 5, 4)).shape
        torch.Size([2, 8])
    """

    preserves_computation = True
    pattern = _Reads()

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        value, *reads = match.nodes
        found = ReadRows.of(value, match.owner)
        assert found is not None
        for node in found.needed:
            require(_alike_for_fewer(node, facts), facts.untouched(node))

        made: dict[Node, Node] = {}
        taken: dict[tuple[Node, int], Node] = {}
        for node in sorted(found.needed):
            instead = {}
            for given, axis in found.needed[node].items():
                if given not in made and (given, axis) not in taken:
                    taken[given, axis] = edit.insert(node, operator.getitem, given, found.index(axis))
                instead[given] = made[given] if given in made else taken[given, axis]
            made[node] = _of_rows(node, instead, found, match.owner, edit)
        for read_ in reads:
            rest = found.rest(read_)
            if all(item == slice(None) for item in rest):
                edit.redirect(read_, made[value])
                edit.erase(read_)
            else:
                edit.replace(read_, operator.getitem, made[value], rest)
        edit.erase_unread(found.needed)
        size = value.meta["val"].shape[found.axis]
        return f"{len(made)} nodes compute {found.length} of {size} rows of {value.name!r}"


def _alike_for_fewer(node: Node, facts: Facts) -> str | None:
    call = read(node, facts.owner(node))
    if call is None or call.module is None:
        return facts.repeatable(node)
    return facts.plain(call) or (facts.evaluating(call) if call.operation is DROPOUT else None)


def _of_rows(node: Node, instead: dict[Node, Node], found: ReadRows, owner: GraphModule, edit: Edit) -> Node:
    """The node for fewer rows."""
    axis, call, value = found.axes[node], read(node, owner), node.meta["val"]
    if call is not None and call.operation is RESHAPE:
        shape: list[Any] = list(call["shape"])
        shape[axis] = found.length
        return edit.insert(node, torch.reshape, instead[call.input], shape)
    made = edit.copy(node, instead)
    if call is not None and call.operation is ATTENTION and call["is_causal"]:
        given = {name: instead.get(each, each) for name, each in call.arguments.items() if name != "is_causal"}
        edit.replace(made, node.target, *(given.pop(name) for name in ("input", "key", "value")), **given)
    index = found.index(axis)
    made.meta["val"] = value[index] if isinstance(value, Tensor) else tuple(part[index] for part in value)
    return made
