"""`HoistActivation`: an activation behind reshapes and transpositions of a layer's result goes before them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from regraft.core import vocabulary as v
from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import reads_shape_only, value_of
from regraft.core.vocabulary import Call, read

_ACTIVATIONS = (
    v.RELU,
    v.RELU6,
    v.LEAKY_RELU,
    v.GELU,
    v.SILU,
    v.HARDSWISH,
    v.HARDSIGMOID,
    v.HARDTANH,
    v.SIGMOID,
    v.TANH,
)
_MOVES = (v.RESHAPE, v.FLATTEN, v.TRANSPOSE, v.PERMUTE, v.UNSQUEEZE)
"""What gives the same elements another place."""
_LAYERS = (v.CONV, v.TRANSPOSED_CONV, v.LINEAR, v.MATMUL, v.ATTENTION)


class _Moved(Calls):
    """Activations of what was moved."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        for (node,) in super().candidates(owner):
            if node.all_input_nodes and _is(node.all_input_nodes[0], _MOVES, owner):
                yield (node,)


class HoistActivation(Rewrite):
    """Hoist an activation that stands behind reshapes and transpositions to the layer whose result they move.

    `f(x.view(...)) = f(x).view(...)` for every `f` of single elements. Behind its layer, the activation is computed
    along with it. SegFormer and PVT have a convolution between the linear layers of their blocks and GELU after that,
    where the image has become tokens again.

    Example:
        >>> import torch, regraft as rg
        >>> class Tokens(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = torch.nn.Conv2d(3, 8, 3)
        ...     def forward(self, x):
        ...         return self.conv(x).flatten(2).transpose(1, 2).relu()
        >>> gm = rg.HoistActivation()(rg.symbolic_trace(Tokens()))
        >>> [node.name for node in gm.graph.nodes]
        ['x', 'conv', 'relu_1', 'flatten', 'transpose', 'output']
    """

    preserves_computation = True
    pattern = _Moved(*_ACTIVATIONS)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        first, source = call.node, call.input
        while _is(source, _MOVES, match.owner):
            require(_read_once(source, call))
            first, source = source, source.all_input_nodes[0]
        before, after = value_of(source), value_of(call.node)
        changed = before is not None and after is not None and before.dtype != after.dtype
        require(
            that(_is(source, _LAYERS, match.owner), f"{source.name!r} is no layer, whose kernel could do {call.where}"),
            _read_once(source, call),
            that(not changed, f"{call.where} gives another dtype than it is given"),
            facts.plain(call),
            facts.in_place(call.node),
        )

        hoisted = edit.copy(call.node, {call.input: source}, before=first)
        if before is not None:
            hoisted.meta["val"] = before
        edit.rewire(first, source, hoisted)
        edit.redirect(call.node, call.input)
        edit.erase(call.node)
        return f"it is computed with {source.name!r}"


def _is(node: Node, operations: tuple[v.Operation, ...], owner: GraphModule) -> bool:
    call = read(node, owner)
    reinterpreted = call is not None and isinstance(call["shape"], torch.dtype)  # a view as numbers of another kind
    return call is not None and call.operation in operations and not reinterpreted


def _read_once(value: Node, call: Call) -> str | None:
    readers = [user for user in value.users if not reads_shape_only(user, value)]
    return that(len(readers) == 1, f"{value.name!r} is read elsewhere, without {call.where}")
