"""Constant scales beside a linear layer or a convolution, and the weights that take them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.pattern import Match, Pattern
from regraft.core.relatives import relative
from regraft.core.values import reads_shape_only
from regraft.core.vocabulary import (
    CONV,
    DIVIDE,
    LAYER_NORM,
    LINEAR,
    MULTIPLY,
    RMS_NORM,
    TRANSPOSED_CONV,
    Call,
    Weight,
    attribute,
    read,
)
from regraft.core.weights import Derivation, scaled, underflows, wider

_LAYERS = (LINEAR, CONV, TRANSPOSED_CONV)


@dataclass(frozen=True, eq=False)
class Site:
    """A scale, the value that it scales, the number or the weight by which, and the layer that takes it in."""

    scale: Call
    value: Node
    number: float | None
    weight: Weight | None
    layer: Call
    behind: bool

    @property
    def groups(self) -> int:
        """Into how many groups of channels the layer falls."""
        return 1 if self.layer.operation is LINEAR else int(self.layer["groups"])


class Scales(Pattern):
    """Multiplications and divisions by a constant beside a linear layer or a convolution; norms before linears."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        yield from ((node,) for node in owner.graph.nodes if self._wants(node, owner))

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        return super().match(owner, nodes) if self._wants(nodes[0], owner) else None

    def _wants(self, node: Node, owner: GraphModule) -> bool:
        return site_of(node, owner) is not None or scales_linears(node, owner)


def scales_linears(node: Node, owner: GraphModule) -> bool:
    """Whether `node` is a norm with a scale or a shift of its own, that some linear layer reads."""
    call = read(node, owner)
    if (
        call is None
        or call.operation not in (LAYER_NORM, RMS_NORM)
        or (call["weight"] is None and call["bias"] is None)
    ):
        return False
    readers = (read(user, owner) for user in node.users)
    return any(r is not None and r.operation is LINEAR and r["input"] is node for r in readers)


def site_of(node: Node, owner: GraphModule) -> Site | None:
    """The scale that `node` is, with its layer; None where it is none, or has none."""
    call = read(node, owner)
    if call is None or call.operation not in (MULTIPLY, DIVIDE) or call["rounding_mode"] is not None:
        return None
    for one, other in (("input", "other"), ("other", "input"))[: 1 if call.operation is DIVIDE else 2]:
        value, factor, weight = call[one], call[other], call.weight(other) or _copied(call, other)
        number = float(factor) if isinstance(factor, (int, float)) else None
        if not isinstance(value, Node) or value.op == "get_attr" or (number is None and weight is None):
            continue
        layer = read(value, owner) or relative(value, owner)
        if layer is not None and layer.operation in _LAYERS:
            return Site(call, value, number, weight, layer, True)
        users = [user for user in node.users if not reads_shape_only(user, node)]
        reader = read(users[0], owner) or relative(users[0], owner) if len(users) == 1 else None
        if reader is not None and reader.operation in _LAYERS:
            return Site(call, value, number, weight, reader, False) if reader["input"] is node else None
    return None


def _copied(call: Call, name: str) -> Weight | None:
    """The weight of which an argument is a copy for this call alone, such as `RemoveDeadWork` makes."""
    copy = call[name]
    if not isinstance(copy, Node) or copy.target is not torch.clone or list(copy.users) != [call.node]:
        return None
    (node,) = copy.all_input_nodes
    tensor = attribute(call.owner, str(node.target)) if node.op == "get_attr" else None
    return Weight(str(node.target), tensor, node) if isinstance(tensor, Tensor) else None


def per_channel(site: Site, channels: int) -> bool:
    """Whether the weight has one element for each of the layer's outputs (or inputs), or one for all of them."""
    assert site.weight is not None
    shape, weight = tuple(site.weight.tensor.shape), site.layer.weight("weight")
    assert weight is not None
    ones = (1,) * (weight.tensor.ndim - 2)
    return site.weight.tensor.numel() == 1 or shape in ((channels, *ones), (1, channels, *ones))


def channels_of(site: Site) -> int:
    """How many channels the value has that is scaled: the layer's outputs, or its inputs."""
    weight = site.layer.weight("weight")
    assert weight is not None
    first, second = weight.tensor.shape[:2]
    outputs_first = site.layer.operation is not TRANSPOSED_CONV
    return int(first if site.behind is outputs_first else second * site.groups)


def along(values: Tensor, weight: Tensor, behind: bool, transposed: bool, groups: int) -> Tensor:
    """One number for each channel, shaped to multiply a weight.

    Args:
        values: One for each output, or for each input.
        weight: (out, in / groups, ...), or of a transposed convolution (in, out / groups, ...).
        behind: Whether the numbers are the outputs'.
        transposed: Whether it is the weight of a transposed convolution.
        groups: The groups of the convolution; 1 for a linear layer.
    """
    spatial = (1,) * (weight.ndim - 2)
    if behind is not transposed:
        return values.reshape(-1, 1, *spatial)
    rows = weight.shape[0] // groups  # a group's inputs meet that group's outputs
    each = values.numel() // groups
    return values.reshape(groups, 1, each).expand(-1, rows, -1).reshape(weight.shape[0], each, *spatial)


def small(weight: Weight, how: Scaled, scale: list[Weight], bias: Weight | None = None) -> str | None:
    """None where the scaled weight is as precise as the weight is.

    Args:
        weight: The weight of the layer.
        how: How it is scaled.
        scale: The scale, where that is a weight.
        bias: The bias that is scaled with it; None for none.
    """
    tensors = [one.tensor.detach() for one in scale]
    shift = how.compute(bias.tensor.detach(), *tensors) if bias is not None and not how.transposed else None
    if not underflows(weight.tensor, how.factors(weight.tensor, *tensors), how.groups, shift):
        return None
    dtype = str(weight.tensor.dtype).removeprefix("torch.")
    return f"{weight.name} would lose precision below the normal numbers of {dtype}; fold in float32, or leave it"


@dataclass(frozen=True)
class Scaled(Derivation):
    """A weight or a bias times a scale, or divided by it.

    Args:
        behind: Whether the scale is that of the layer's outputs.
        divide: Whether the scale divides.
        number: The scale; None where it is the second source.
        groups: The groups of the convolution.
        transposed: Whether the convolution is a transposed one.
    """

    behind: bool
    divide: bool = False
    number: float | None = None
    groups: int = 1
    transposed: bool = False

    def compute(self, *sources: Tensor) -> Tensor:
        return scaled(sources[0], self.factors(*sources))

    def factors(self, first: Tensor, *scale: Tensor) -> Tensor:
        """What the first source is multiplied with, one precision up, in a shape that broadcasts to it."""
        dtype = wider(first.dtype)
        if self.number is not None:
            given = torch.tensor([self.number], dtype=dtype, device=first.device)
        else:
            given = scale[0].to(dtype).reshape(-1)
        factors = given.reciprocal() if self.divide else given
        if factors.numel() == 1 or first.ndim == 1:
            return factors.reshape(-1, *[1] * (first.ndim - 1))
        return along(factors, first, self.behind, self.transposed, self.groups)
