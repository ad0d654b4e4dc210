"""Folding a batch norm into its neighbour: what the three rules that do so have in common.

With `s = gamma / sqrt(var + eps)` and `t = beta - mean s` a batch norm in evaluation mode is `y = s x + t` per channel.
Behind a layer: `s (W x + b) + t = (s W) x + (s b + t)`. Before one: `W (s x + t) + b = (W s) x + (b + W t)`.
(Ioffe and Szegedy 2015, arXiv:1502.03167.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from regraft.core.edit import Edit
from regraft.core.padding import padded_ends
from regraft.core.pattern import Match
from regraft.core.query import Answer, Facts, require, that
from regraft.core.values import reads_shape_only, value_of
from regraft.core.vocabulary import CONV, DROPOUT, FLATTEN, IDENTITY, LINEAR, RESHAPE, TRANSPOSED_CONV, Call, Weight
from regraft.core.weights import Derivation, scaled, underflows, wider
from regraft.transformations._module_for import place_of
from regraft.transformations._ranked import ranked
from regraft.transformations._scales import along

LAYERS = (LINEAR, CONV, TRANSPOSED_CONV)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """A batch norm and the layer that it is folded into, with the values on the way from the first to the second."""

    norm: Call
    layer: Call
    behind: bool
    way: tuple[Node, ...]


def fold(match: Match, edit: Edit, facts: Facts, pairs: tuple[tuple[Any, bool], ...], norms: tuple[int, ...]) -> str:
    """Fold the batch norm of `match` into a neighbour.

    Args:
        match: The batch norm.
        edit: The site's transaction.
        facts: The safety oracle.
        pairs: Which operations it may be folded into, each with whether the norm is behind it.
        norms: Of how many spatial axes the norm may be (0 and 1: `BatchNorm1d`).
    """
    norm = match.call
    require(facts.evaluating(norm), _has_statistics(norm), _spatial(norm, norms))
    site = _neighbours(match, facts, pairs)
    layer, weight = site.layer, site.layer.weight("weight")
    require(facts.plain(norm), facts.plain(layer), facts.alone(norm), facts.alone(layer))
    require(_evaluating_layer(layer))
    assert weight is not None
    spec = _specification(norm, layer, site.behind)
    require(_agree(facts, spec), *_same_memory(facts, site), _channels(facts, site, weight.tensor))
    require(_scale(spec))
    unknown = facts.rank(norm.node) is None and norm["running_mean"] is not None and _ambiguous(layer)

    name, like = place_of(layer, weight.tensor, edit)
    if unknown:
        like = ranked(like, norm, layer, site.behind)
    sources = list(spec.weights.values())
    edit.put_module(name, like, {part: (fold, sources) for part, fold in spec.folds.items()}, spec.compute)
    edit.replace_with_module(layer.node, name, layer.input if site.behind else norm["input"])
    edit.redirect(norm.node, norm["input"] if site.behind else layer.input)
    edit.erase(norm.node)
    edit.discard(norm)
    edit.discard(layer)
    return f"folded {norm.where.rpartition('.')[2]} into {layer.where.rpartition('.')[2]}"


@dataclass(frozen=True)
class Fold(Derivation):
    """The weight or the bias of the layer after the fold, from everything that both had before.

    Args:
        part: `"weight"` or `"bias"`.
        present: The names of the sources, in order.
        behind: Whether the norm is behind the layer.
        transposed: Whether the layer is a transposed convolution, whose weight has its inputs first.
        groups: The groups of the convolution.
        eps: What the norm adds to the variance.
    """

    part: str
    present: tuple[str, ...]
    behind: bool
    transposed: bool
    groups: int
    eps: float

    def compute(self, *sources: Tensor) -> Tensor:
        given = dict(zip(self.present, sources, strict=True))
        return self.folded(given, self.scale(given))

    def folded(self, given: dict[str, Tensor], scale: Tensor) -> Tensor:
        """The new weight or bias, from the sources by name and `s`."""
        weight, dtype = given["weight"], wider(given["weight"].dtype)
        if self.part == "weight":
            return scaled(weight, self.along(weight, scale))
        mean, bias = given["mean"], given["bias"].to(dtype) if "bias" in given else None
        if self.behind and bias is not None:
            return self._plus_beta((bias - mean) * scale, given).to(weight.dtype)
        shift = self._plus_beta(-mean * scale, given)
        if self.behind:
            return shift.to(weight.dtype)
        moved = (weight.to(dtype) * self.along(weight, shift)).flatten(1).sum(1)
        return (moved if bias is None else moved + bias).to(weight.dtype)

    def scale(self, given: dict[str, Tensor]) -> Tensor:
        """`s`, one precision up."""
        dtype = wider(given["weight"].dtype)
        scale = torch.rsqrt(given["var"].to(dtype) + self.eps)
        return scale * given["gamma"] if "gamma" in given else scale

    def _plus_beta(self, value: Tensor, given: dict[str, Tensor]) -> Tensor:
        return value + given["beta"] if "beta" in given else value

    def along(self, weight: Tensor, values: Tensor) -> Tensor:
        """See `along`."""
        return along(values, weight, self.behind, self.transposed, self.groups)


@dataclass(frozen=True, eq=False)
class _Specification:
    """What is made of what: the derivations of the weight and the bias, and their sources by name."""

    folds: dict[str, Fold]
    weights: dict[str, Weight]
    given: dict[str, Tensor]

    @cached_property
    def scale(self) -> Tensor:
        """See `Fold.scale`."""
        return self.folds["bias"].scale(self.given)

    def compute(self) -> dict[str, Tensor]:
        """The new weight and the new bias, with one `s` for both."""
        return {part: fold.folded(self.given, self.scale) for part, fold in self.folds.items()}


def _specification(norm: Call, layer: Call, behind: bool) -> _Specification:
    named = {"weight": layer.weight("weight"), "bias": layer.weight("bias"), "mean": norm.weight("running_mean")}
    named |= {"var": norm.weight("running_var"), "gamma": norm.weight("weight"), "beta": norm.weight("bias")}
    weights = {key: weight for key, weight in named.items() if weight is not None}
    transposed = layer.operation is TRANSPOSED_CONV
    groups = int(layer["groups"] or 1) if layer.operation is not LINEAR else 1
    settings = (tuple(weights), behind, transposed, groups, float(norm["eps"]))
    folds = {part: Fold(part, *settings) for part in ("weight", "bias")}
    return _Specification(folds, weights, {key: weight.tensor.detach() for key, weight in weights.items()})


def _neighbours(match: Match, facts: Facts, pairs: tuple[tuple[Any, bool], ...]) -> Neighbours:
    """The layer before the norm if it is one of `pairs`, else the one behind it."""
    norm = match.call
    calls = list(_upstream(match, norm["input"], facts))
    way, layer = [value for value, _ in calls], calls[-1][1]
    if layer is not None and (layer.operation, True) in pairs:
        users = [*way[-2::-1], norm.node]
        require(*(facts.only_user(value, user) for value, user in zip(reversed(way), users, strict=True)))
        return Neighbours(norm, layer, True, tuple(reversed(way)))
    readers = [user for user in norm.node.users if not reads_shape_only(user, norm.node)]
    follower = match.producer(readers[0]) if len(readers) == 1 else None
    if follower is not None and (follower.operation, False) in pairs and follower["input"] is norm.node:
        return Neighbours(norm, follower, False, (norm.node,))
    require(*(match.unlike(value) for value in (way[-1], *readers[:1])))
    require(facts.plain(layer) if layer is not None and _transparent(layer) else None)
    wanted = " or ".join(dict.fromkeys(operation.name for operation, _ in pairs))
    before = layer.where if layer is not None else way[-1].name
    require(f"{norm.where} neither takes its input from a {wanted} (it is {before!r}) nor gives its result to just one")
    raise AssertionError


def _upstream(match: Match, value: Any, facts: Facts) -> Iterator[tuple[Node, Call | None]]:
    """The values from the norm's input up to the layer: through identities, eval-mode dropout, reshaping of rows."""
    while isinstance(value, Node):
        call = match.producer(value)
        yield value, call
        if call is None or not _transparent(call) or facts.plain(call) is not None:
            return
        value = call["input"]


def _transparent(call: Call) -> bool:
    if call.operation is IDENTITY:
        return True
    if call.operation is DROPOUT:
        return not (call.module.training if call.module is not None else call["training"])
    if call.operation in (FLATTEN, RESHAPE):  # rows are rearranged, and stay whole
        before, after = value_of(call["input"]), value_of(call.node)
        return before is not None and after is not None and after.ndim == 2 and before.shape[-1] == after.shape[-1]
    return False


def _has_statistics(norm: Call) -> Answer:
    present = norm["running_mean"] is not None and norm["running_var"] is not None
    return that(present, f"{norm.where} keeps no running statistics, so it normalises by those of each batch")


def _spatial(norm: Call, allowed: tuple[int, ...]) -> Answer:
    kinds: dict[Any, tuple[int, ...]] = {nn.BatchNorm1d: (0, 1), nn.BatchNorm2d: (2,), nn.BatchNorm3d: (3,)}
    value = value_of(norm.node)
    has = (
        kinds.get(type(norm.module)) if norm.module is not None else (value.ndim - 2,) if value is not None else allowed
    )
    return that(bool(set(has or ()) & set(allowed)), f"{norm.where} is a batch norm of another number of axes")


def _evaluating_layer(layer: Call) -> Answer:
    training = layer.module is not None and layer.module.training
    return that(not training, f"{layer.where} is in training mode; call .eval() on the model first")


def _agree(facts: Facts, spec: _Specification) -> Answer:
    trainable = [(w.name, w.tensor) for key, w in spec.weights.items() if key not in ("mean", "var")]
    detached = [(spec.weights[key].name, spec.given[key]) for key in ("weight", "mean", "var")]
    return facts.agree(trainable) or facts.agree(detached)


def _same_memory(facts: Facts, site: Neighbours) -> Iterator[Answer]:
    """Nothing is written on the way; what the folded layer reads is what the first of the two has read."""
    first, last = (site.layer, site.norm) if site.behind else (site.norm, site.layer)
    yield from (facts.untouched(value) for value in site.way)
    yield facts.unchanged(first.input, first.node, last.node)


def _channels(facts: Facts, site: Neighbours, weight: Tensor) -> Answer:
    """The norm's channels are the layer's outputs, or inputs."""
    norm, layer = site.norm, site.layer
    groups = int(layer["groups"] or 1) if layer.operation is not LINEAR else 1
    inputs, outputs = weight.shape[1] * groups, weight.shape[0]
    if layer.operation is TRANSPOSED_CONV:
        inputs, outputs = weight.shape[0], weight.shape[1] * groups
    channels = int(norm["running_mean"].shape[0]) if not isinstance(norm["running_mean"], Node) else None
    channels = channels if channels is not None else _length(norm)
    if channels != (outputs if site.behind else inputs):
        return f"{norm.where} normalises {channels} channels, another axis than the {layer.operation} layer's features"
    rank = facts.rank(norm["input"])
    wanted = 2 if layer.operation is LINEAR else weight.ndim
    if rank is not None and rank != wanted:
        return f"{norm.where} normalises axis 1 of {rank} axes, which is not the axis of the features of {layer.where}"
    if not site.behind and layer.operation is not LINEAR:
        return _unpadded(layer, weight)
    return None


def _length(norm: Call) -> int:
    weight = norm.weight("running_mean")
    return int(weight.tensor.shape[0]) if weight is not None else -1


def _unpadded(layer: Call, weight: Tensor) -> Answer:
    """A norm before a convolution shifts its padding too, unless the padding is made of the input."""
    if layer.operation is TRANSPOSED_CONV:
        return f"{layer.where} is a transposed convolution: the shift of a norm before it is not constant at the border"
    computed = isinstance(layer["padding"], Node) or isinstance(layer["dilation"], Node)
    none = not computed and not any(map(any, padded_ends(layer["padding"], weight.shape[2:], layer["dilation"])))
    mode = getattr(layer.module, "padding_mode", "zeros")
    return that(none or mode != "zeros", f"{layer.where} pads with zeros, which the norm before it does not shift")


def _scale(spec: _Specification) -> Answer:
    """The folded weights are finite where the original ones are, and as precise."""
    weight = spec.given["weight"]
    if weight.is_meta:
        return None
    factor, largest = _largest(spec.scale), 1.0
    if factor > 1 and torch.finfo(weight.dtype).max < 1e38:  # float16: reading all the weight takes a while
        largest = _largest(weight)
    fits, norm = factor * largest <= torch.finfo(weight.dtype).max, spec.weights["var"].name
    require(that(fits, f"{norm} makes a scale that is not finite in {weight.dtype}"))
    fold = spec.folds["bias"]
    shift = fold.folded(spec.given, spec.scale) if fold.behind and not fold.transposed else None
    lost = underflows(weight, fold.along(weight, spec.scale), fold.groups, shift)
    return that(not lost, f"{norm} makes a scale that loses precision below the normal numbers of {weight.dtype}")


def _largest(values: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    least, most = (float(bound) for bound in torch.aminmax(values)) if values.numel() else (0.0, 0.0)
    return most if most != most else max(-least, most)


def _ambiguous(layer: Call) -> bool:
    """Whether the layer takes inputs of more than one rank that a `BatchNorm1d` takes too, but another way."""
    weight = layer.weight("weight")
    return layer.operation is LINEAR or (weight is not None and weight.tensor.ndim == 3)
