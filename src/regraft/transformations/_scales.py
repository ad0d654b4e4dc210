"""Constant scales beside a linear layer or a convolution, and the weights that take them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.pattern import Match, Pattern
from regraft.core.values import reads_shape_only
from regraft.core.vocabulary import CONV, DIVIDE, LINEAR, MULTIPLY, Call, Weight, read
from regraft.core.weights import Derivation, wider


@dataclass(frozen=True, eq=False)
class Site:
    """A scale, the value that it scales, the number or the weight by which, and the layer that takes it in."""

    scale: Call
    value: Node
    number: float | None
    weight: Weight | None
    layer: Call
    behind: bool


class Scales(Pattern):
    """Multiplications and divisions by a constant, right behind a linear layer or a convolution, or right before."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        yield from ((node,) for node in owner.graph.nodes if site_of(node, owner) is not None)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        return super().match(owner, nodes) if site_of(nodes[0], owner) is not None else None


def site_of(node: Node, owner: GraphModule) -> Site | None:
    """The scale that `node` is, with its layer; None where it is none, or has none."""
    call = read(node, owner)
    if call is None or call.operation not in (MULTIPLY, DIVIDE) or call["rounding_mode"] is not None:
        return None
    for one, other in (("input", "other"), ("other", "input"))[: 1 if call.operation is DIVIDE else 2]:
        value, factor, weight = call[one], call[other], call.weight(other)
        number = float(factor) if isinstance(factor, (int, float)) else None
        if not isinstance(value, Node) or value.op == "get_attr" or (number is None and weight is None):
            continue
        layer = read(value, owner)
        if layer is not None and layer.operation in (LINEAR, CONV):
            return Site(call, value, number, weight, layer, True)
        readers = [read(user, owner) for user in node.users if not reads_shape_only(user, node)]
        if len(readers) == 1 and readers[0] is not None and readers[0].operation in (LINEAR, CONV):
            return Site(call, value, number, weight, readers[0], False) if readers[0]["input"] is node else None
    return None


def per_channel(site: Site, channels: int) -> bool:
    """Whether the weight has one element for each of the layer's outputs (or inputs), or one for all of them."""
    assert site.weight is not None
    shape, weight = tuple(site.weight.tensor.shape), site.layer.weight("weight")
    assert weight is not None
    ones = (1,) * (weight.tensor.ndim - 2)
    return site.weight.tensor.numel() == 1 or shape in ((channels, *ones), (1, channels, *ones))


@dataclass(frozen=True)
class Scaled(Derivation):
    """A weight or a bias times a scale along one axis, or divided by it.

    Args:
        axis: The axis of the weight that the scale follows.
        divide: Whether the scale divides.
        number: The scale; None where it is the second source.
        groups: Into how many groups of inputs the scale falls, where it follows the inputs of a convolution.
    """

    axis: int
    divide: bool
    number: float | None
    groups: int = 1

    def compute(self, *sources: Tensor) -> Tensor:
        dtype = wider(sources[0].dtype)
        scale = self._scale(sources, dtype)
        wide = sources[0].to(dtype)
        return (wide / scale if self.divide else wide * scale).to(sources[0].dtype)

    def _scale(self, sources: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if self.number is not None:
            return torch.tensor(self.number, dtype=dtype, device=sources[0].device)
        first, scale = sources[0], sources[1].to(dtype).reshape(-1)
        if scale.numel() == 1:
            return scale.reshape(())
        if self.axis == 1:  # the inputs of each group meet the outputs of that group
            grouped = scale.reshape(self.groups, 1, -1).expand(-1, first.shape[0] // self.groups, -1)
            return grouped.reshape(first.shape[0], -1, *[1] * (first.ndim - 2))
        return scale.reshape(-1, *[1] * (first.ndim - 1))
