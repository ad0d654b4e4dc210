"""What follows a layer and can be computed along with it: the addition of another value, an activation."""

from __future__ import annotations

from torch import nn
from torch.fx import Node

from regraft.core.pattern import Match
from regraft.core.query import Facts
from regraft.core.values import reads_shape_only, value_of
from regraft.core.vocabulary import ADD, ADD_IN_PLACE, CONV, Call
from regraft.transformations._activations import NONE, Activation, activation_of


def following(match: Match, facts: Facts) -> tuple[Node | None, Node, Activation, list[Call]]:
    """What comes after the layer and goes into it: the value added, the last node, the activation, the calls."""
    call, other, done = match.call, None, []
    last = call.node
    reader = _only_reader(match, last)
    if reader is not None and reader.operation in (ADD, ADD_IN_PLACE) and _adds(call):
        other = _addend(reader, last, facts)
        if other is not None and facts.unchanged(call.input, call.node, reader.node) is None:
            done, last = [reader], reader.node
            reader = _only_reader(match, last)
        else:
            other, reader = None, None
    activation = activation_of(reader)
    if reader is None or activation is None or facts.plain(reader):
        return other, last, NONE, done
    if facts.unchanged(call.input, call.node, reader.node):
        return other, last, NONE, done
    return other, reader.node, activation, [*done, reader]


def _adds(call: Call) -> bool:
    """Whether oneDNN's addition is there for the layer, and pays."""
    return call.operation is CONV and not isinstance(call.module, nn.Conv1d)


def _only_reader(match: Match, value: Node) -> Call | None:
    readers = [user for user in value.users if not reads_shape_only(user)]
    return match.producer(readers[0]) if len(readers) == 1 and len(value.users) == 1 else None


def _addend(add: Call, value: Node, facts: Facts) -> Node | None:
    """The other tensor of an addition, where it is there before the layer is, and as large as the layer's result."""
    other = add["other"] if add["input"] is value else add["input"]
    if not isinstance(other, Node) or other is value or add["alpha"] not in (None, 1) or value < other:
        return None
    if add.operation is ADD_IN_PLACE and other is add["input"] and facts.disposable(other, add.node, [add.node]):
        return None
    mine, its = value_of(value), value_of(other)
    if facts.tensor(other) or (mine is not None and its is not None and mine.shape != its.shape):
        return None
    return other


def between(first: Node, last: Node) -> list[Node]:
    """The nodes from before `last` back to `first`, each the one reader of the one before; none where they are one."""
    if first is last:
        return []
    nodes = [first]
    while (user := next(iter(nodes[-1].users))) is not last:
        nodes.append(user)
    return nodes[::-1]
