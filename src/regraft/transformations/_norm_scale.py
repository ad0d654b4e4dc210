"""The scale and the shift of a norm, folded into the linear layers that read it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from regraft.core.edit import Derived, Edit
from regraft.core.pattern import Match
from regraft.core.query import Answer, Facts, require, that
from regraft.core.values import reads_shape_only
from regraft.core.vocabulary import LAYER_NORM, LINEAR, Call, Weight
from regraft.core.weights import Derivation, Same, wider
from regraft.transformations._module_for import place_of
from regraft.transformations._scales import Scaled, small

_BLOCK = 1 << 18
"""So many elements of a weight are held in the higher precision at a time."""


def fold_norm(match: Match, edit: Edit, facts: Facts) -> str:
    """Fold the scale and the shift of the norm into every layer that reads it, and leave a norm without them.

    `W (s n + t) + b = (W s) n + (W t + b)`, where `n` is what the norm gives without a scale and a shift.

    Args:
        match: The norm.
        edit: The site's transaction.
        facts: The safety oracle.
    """
    norm = _reading_weights(match, edit)
    readers = [user for user in norm.node.users if not reads_shape_only(user, norm.node)]
    layers = [call for user in readers if (call := match.producer(user)) is not None and _takes(call, norm.node)]
    scale, shift = norm.weight("weight"), norm.weight("bias")
    strangers = [user.name for user in readers if user not in [layer.node for layer in layers]]
    require(that(not strangers, f"the result of {norm.where} is also read by {', '.join(map(repr, strangers))}"))
    require(facts.plain(norm), facts.alone(norm), *(facts.plain(layer) for layer in layers))
    require(*(facts.alone(layer) for layer in layers))
    given = [weight for call in (norm, *layers) for name in ("weight", "bias") if (weight := call.weight(name))]
    require(
        facts.agree([(weight.name, weight.tensor) for weight in given]),
        facts.floating(norm.input, given[0].tensor.dtype),
        *(_evaluating(layer) for layer in layers),
        *_shapes(norm, layers),
    )
    require(*(_finite(layer, scale) for layer in layers if scale is not None))

    for layer in layers:
        weight = layer.weight("weight")
        assert weight is not None
        name, like = place_of(layer, weight.tensor, edit)
        edit.put_module(name, like, _derived(layer, weight, scale, shift))
        edit.replace_with_module(layer.node, name, norm.node)
        edit.discard(layer)
    _without_affine(norm, edit)
    parts = " and ".join(part for part, weight in (("scale", scale), ("shift", shift)) if weight is not None)
    return f"folded its {parts} into {', '.join(layer.where.rpartition('.')[2] for layer in layers)}"


def _reading_weights(match: Match, edit: Edit) -> Call:
    """The norm, which reads its weights themselves where it read copies, such as `RemoveDeadWork` makes."""
    norm = match.call
    given = [value for name in ("weight", "bias") if isinstance(value := norm[name], Node)]
    copies = [value for value in given if value.target is torch.clone and list(value.users) == [norm.node]]
    for copy in copies:
        (weight,) = copy.all_input_nodes
        edit.rewire(norm.node, copy, weight)
        edit.erase(copy)
    return (match.producer(norm.node) if copies else None) or norm


def _takes(layer: Call, value: Node) -> bool:
    """Whether the layer reads the value as its input, and as nothing else."""
    return layer.operation is LINEAR and layer["input"] is value and layer.node.all_input_nodes.count(value) == 1


def _derived(layer: Call, weight: Weight, scale: Weight | None, shift: Weight | None) -> dict[str, Derived | None]:
    bias = layer.weight("bias")
    new: dict[str, Derived | None] = {}
    if layer.module is None:  # a module keeps its own
        new = {"weight": (Same(), [weight]), "bias": (Same(), [bias]) if bias is not None else None}
    if scale is not None:
        new["weight"] = Scaled(False), [weight, scale]
    if shift is not None:
        new["bias"] = Shifted(), [weight, shift, *([bias] if bias is not None else [])]
    return new


def _without_affine(norm: Call, edit: Edit) -> None:
    if norm.module is not None:
        names = [name for name in ("weight", "bias") if name in norm.module._parameters]
        edit.put_module(norm.where, norm.module, dict.fromkeys(names), elementwise_affine=False)
        edit.replace_with_module(norm.node, norm.where, norm.input)
        return
    arguments: list[Any] = [norm.input, norm["normalized_shape"], None]
    if norm.operation is LAYER_NORM:
        edit.replace(norm.node, F.layer_norm, *arguments, None, norm["eps"])
    else:
        edit.replace(norm.node, F.rms_norm, *arguments, norm["eps"])
    edit.discard(norm)


def _evaluating(layer: Call) -> Answer:
    training = layer.module is not None and layer.module.training
    return that(not training, f"{layer.where} is in training mode; call .eval() on the model first")


def _shapes(norm: Call, layers: list[Call]) -> Iterator[Answer]:
    """The norm is over the features that the layers take in, and these alone."""
    axes = norm["normalized_shape"]
    normalised = (axes,) if isinstance(axes, int) else tuple(axes)
    for layer in layers:
        weight = layer.weight("weight")
        fits = weight is not None and weight.tensor.ndim == 2 and normalised == (weight.tensor.shape[1],)
        yield that(fits, f"{norm.where} normalises axes of the sizes {normalised}, not the features of {layer.where}")


def _finite(layer: Call, scale: Weight) -> Answer:
    weight = layer.weight("weight")
    assert weight is not None
    if weight.tensor.is_meta or scale.tensor.is_meta or not weight.tensor.numel():
        return None
    bound = float(weight.tensor.detach().abs().max()) * float(scale.tensor.detach().abs().max())
    fits = math.isfinite(bound) and bound <= torch.finfo(weight.tensor.dtype).max
    beyond = that(fits, f"{scale.name} scales {weight.name} beyond what {weight.tensor.dtype} holds")
    return beyond or small(weight, Scaled(False), [scale])


@dataclass(frozen=True)
class Shifted(Derivation):
    """The bias of a linear layer whose input was shifted: the weight times the shift, and the old bias if there is one.

    Computed one precision up, in blocks of rows.
    """

    def compute(self, *sources: Tensor) -> Tensor:
        weight, shift, *bias = sources
        dtype = wider(weight.dtype)
        rows = max(1, _BLOCK * len(weight) // max(1, weight.numel()))
        wide = shift.to(dtype)
        total = torch.cat([block.to(dtype) @ wide for block in weight.split(rows)])
        return (total + bias[0].to(dtype) if bias else total).to(weight.dtype)
