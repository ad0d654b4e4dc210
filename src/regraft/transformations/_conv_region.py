"""Where channels-last values of convolutions meet someone who may want the usual order of memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from regraft.core.pattern import Match, Pattern, near_miss
from regraft.core.relatives import relative
from regraft.core.strides import depends_on_strides
from regraft.core.values import reads_shape_only, value_of
from regraft.core.vocabulary import CONV, LINEAR, TRANSPOSED_CONV, Call, Operation, attribute, location, read

BORDER = Operation("border", "input")
"""A node that a convolution's values reach and that depends on their strides: an output, a view."""

_LAYERS = (CONV, TRANSPOSED_CONV, LINEAR)
_NEW_ORDER = (nn.LayerNorm, nn.Linear)


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
                values and _passes_on(node, call)
            ):
                reached.add(node)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        node, *values = nodes
        if values:
            return Match(owner, (Call(node, BORDER, {"input": values[0], "values": values}, owner, location(node)),))
        call, miss = read(node, owner), near_miss(node, owner)
        if miss is not None:
            return miss
        return Match(owner, (call,)) if call is not None and call.operation in _LAYERS else None


def _passes_on(node: Node, call: Call | None) -> bool:
    """Whether a result may have the strides of an argument, rather than those that the operation always gives."""
    if node.op == "output" or reads_shape_only(node) or node.target in (F.layer_norm, torch.matmul, operator.matmul):
        return False
    if (call is not None and call.operation is LINEAR) or isinstance(_module(node), _NEW_ORDER):
        return False
    value: Any = value_of(node)
    return value is None or not isinstance(value, torch.Tensor) or value.ndim > 2


def _module(node: Node) -> Any:
    owner = node.graph.owning_module
    return attribute(owner, str(node.target)) if node.op == "call_module" and owner is not None else None
