"""Where channels-last values of convolutions meet someone who may want the usual order of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from regraft.core.pattern import Match, Pattern, near_miss
from regraft.core.relatives import relative
from regraft.core.strides import OWN_ORDER, depends_on_strides
from regraft.core.values import CHANNELS_LAST, JOINING, called_name, reads_shape_only, value_of
from regraft.core.vocabulary import (
    CONV,
    LINEAR,
    TRANSPOSED_CONV,
    Call,
    Operation,
    location,
    read,
)
from regraft.transformations._packed import CONVOLUTIONS

BORDER = Operation("border", "input")
"""A node that a convolution's values reach and that depends on their strides: an output, a view."""

JOIN = Operation("join", "input")
"""A node that joins values of convolutions and others, of which torch makes one whose channels do not lie last."""

_RESIZING = {"interpolate", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"}

_LAYERS = (CONV, TRANSPOSED_CONV, LINEAR)


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
            border = [value for value in values if _is_border(node, value, owner)]
            if border:
                yield (node, *border)
            joins = bool(values) and called_name(node) in JOINING
            others = [value for value in node.all_input_nodes if joins and value not in reached and _is_image(value)]
            if others:
                yield (node, *others)
            begins = call is not None and call.operation in (CONV, TRANSPOSED_CONV)
            packed = layer is not None and isinstance(layer.module, CONVOLUTIONS)
            # an image of one pixel lies both ways: what it is enlarged to may still have its channels last
            open_end = bool(values) and (not border or called_name(node) in _RESIZING)
            if begins or packed or (open_end and _passes_on(node, layer)):
                reached.add(node)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        node, *values = nodes
        if values:
            kind = JOIN if called_name(node) in JOINING else BORDER
            return Match(owner, (Call(node, kind, {"input": values[0], "values": values}, owner, location(node)),))
        call, miss = read(node, owner), near_miss(node, owner)
        if miss is not None:
            return miss
        return Match(owner, (call,)) if call is not None else None


def _is_border(node: Node, value: Node, owner: GraphModule) -> bool:
    """Whether `node` needs `value` as it was laid: what is enlarged for the caller is laid so while it is small."""
    if called_name(node) in _RESIZING and value is node.all_input_nodes[0]:
        return bool(node.users) and all(user.op == "output" for user in node.users)
    return node.op == "output" or depends_on_strides(node, value, owner)


def _is_image(node: Node) -> bool:
    """Whether a value is one whose channels may lie last, and do not for certain."""
    value = value_of(node)
    return value is not None and value.ndim in CHANNELS_LAST and not _lays_last(node)


def _lays_last(node: Node) -> bool:
    return called_name(node) == "contiguous" and node.kwargs.get("memory_format") in CHANNELS_LAST.values()


def _passes_on(node: Node, call: Call | None) -> bool:
    """Whether a result may have the strides of an argument, rather than those that the operation always gives."""
    if reads_shape_only(node) or (call is not None and call.operation in OWN_ORDER):
        return False
    if called_name(node) == "contiguous":
        return _lays_last(node)
    value: Any = value_of(node)
    return value is None or not isinstance(value, torch.Tensor) or value.ndim > 2
