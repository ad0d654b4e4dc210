"""Where channels-last values of convolutions meet someone who may want the usual order of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from regraft.core.pattern import Match, Pattern, near_miss
from regraft.core.relatives import relative
from regraft.core.strides import depends_on_strides
from regraft.core.values import reads_shape_only, value_of
from regraft.core.vocabulary import (
    CONV,
    LAYER_NORM,
    LINEAR,
    MATMUL,
    TRANSPOSED_CONV,
    Call,
    Operation,
    location,
    read,
)

BORDER = Operation("border", "input")
"""A node that a convolution's values reach and that depends on their strides: an output, a view."""

_LAYERS = (CONV, TRANSPOSED_CONV, LINEAR)
_NEW_ORDER = (LAYER_NORM, LINEAR, MATMUL)


class LayersAndBorders(Pattern):
    """Every convolution and linear layer, and every border of the convolutions' values. One pass over the graph."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        reached: set[Node] = set()
        for node in list(owner.graph.nodes):
            call = read(node, owner)
            layer = call or relative(node, owner)
            if layer is not None and layer.operation in _LAYERS:
                yield (node,)
            values = [value for value in node.all_input_nodes if value in reached]
            border = [value for value in values if node.op == "output" or depends_on_strides(node, value, owner)]
            if border:
                yield (node, *border)
            elif (call is not None and call.operation in (CONV, TRANSPOSED_CONV)) or (
                values and _passes_on(node, layer)
            ):
                reached.add(node)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        node, *values = nodes
        if values:
            return Match(owner, (Call(node, BORDER, {"input": values[0], "values": values}, owner, location(node)),))
        call, miss = read(node, owner), near_miss(node, owner)
        if miss is not None:
            return miss
        return Match(owner, (call,)) if call is not None else None


def _passes_on(node: Node, call: Call | None) -> bool:
    """Whether a result may have the strides of an argument, rather than those that the operation always gives."""
    if reads_shape_only(node) or (call is not None and call.operation in _NEW_ORDER):
        return False
    value: Any = value_of(node)
    return value is None or not isinstance(value, torch.Tensor) or value.ndim > 2
