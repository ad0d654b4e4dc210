"""`FoldScale`: a constant scale goes into the linear layer or the convolution beside it."""

from __future__ import annotations

import math

import torch

from regraft.core.edit import Derived, Edit
from regraft.core.expect import expect_flag
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import DIVIDE, LAYER_NORM, RMS_NORM, TRANSPOSED_CONV, Weight
from regraft.core.weights import Same
from regraft.transformations._module_for import place_of
from regraft.transformations._norm_scale import fold_norm
from regraft.transformations._scales import Scaled, Scales, Site, channels_of, per_channel, site_of, small


class FoldScale(Rewrite):
    """Fold a multiplication or a division by a constant into the layer that feeds it, or the one that it feeds.

    `s (W x + b) = (s W) x + s b` and `W (s x + t) + b = (W s) x + (W t + b)`, for a number or a weight with one element
    for each channel: the scaled queries of attention, LayerScale (Touvron et al. 2021, arXiv:2103.17239), the scale of
    an RMS norm, the scale and the shift of a layer norm. One that is reshaped or computed first, as LayerScale of
    images is, it knows once `RemoveDeadWork` has made it a constant. Padding with zeros is scaled to zeros. A zero, or
    a scale that leaves the numbers of the dtype, is refused, and so is a norm that anything but linear layers reads.

    Args:
        layer_norms: Whether layer norms are folded too. On the CPU that is for engines that read the graph: torch
            computes a layer norm in float32 no faster without a scale and a shift, but slower. An RMS norm it computes
            faster.

    Example:
        >>> import torch, regraft as rg
        >>> class Scaled(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return self.linear(x) * 0.5
        >>> gm = rg.FoldScale()(rg.symbolic_trace(Scaled().eval()))
        >>> [node.name for node in gm.graph.nodes]
        ['x', 'linear', 'output']
    """

    preserves_computation = True
    pattern = Scales()
    exhaustive = True

    def __init__(self, layer_norms: bool = True) -> None:
        expect_flag(layer_norms, "layer_norms", "FoldScale(layer_norms=False)")
        self.layer_norms = layer_norms

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        if match.call.operation in (LAYER_NORM, RMS_NORM):
            wanted = self.layer_norms or match.call.operation is RMS_NORM
            require(that(wanted, f"{match.call.where} is a layer norm, which stays whole, by layer_norms=False"))
            return fold_norm(match, edit, facts)
        site = site_of(match.call.node, match.owner)
        assert site is not None
        layer, node, weight = site.layer, match.call.node, site.layer.weight("weight")
        require(facts.plain(layer), facts.alone(layer))
        assert weight is not None
        training = layer.module is not None and layer.module.training
        require(
            facts.in_place(node),
            that(not training, f"{layer.where} is in training mode; call .eval() on the model first"),
            facts.only_user(layer.node, node) if site.behind else None,
            facts.untouched(layer.node if site.behind else node),
            facts.unchanged(site.value, node, layer.node) if not site.behind else None,
            facts.floating(site.value, weight.tensor.dtype) if not site.behind else None,
            _scale(site, facts),
        )

        name, like = place_of(layer, weight.tensor, edit)
        edit.put_module(name, like, _derived(site))
        edit.replace_with_module(layer.node, name, layer.input if site.behind else site.value)
        edit.redirect(node, site.value)
        edit.erase_unread((node, *(given for given in node.all_input_nodes if given.target is torch.clone)))
        edit.discard(layer)
        if site.weight is not None and site.weight.node is not None and not site.weight.node.users:
            edit.discard_weight(site.weight.node)
        return f"folded {site.number if site.weight is None else site.weight.name} into {layer.where}"


def _derived(site: Site) -> dict[str, Derived | None]:
    """The scaled weight; and the bias, where it is scaled too or has to be put into a module first."""
    weight, bias = site.layer.weight("weight"), site.layer.weight("bias")
    assert weight is not None
    how, scale = _how(site)
    derived: dict[str, Derived | None] = {"weight": (how, [weight, *scale])}
    if bias is not None and site.behind:
        derived["bias"] = how, [bias, *scale]
    elif site.layer.module is None:
        derived["bias"] = (Same(), [bias]) if bias is not None else None
    return derived


def _how(site: Site) -> tuple[Scaled, list[Weight]]:
    transposed = site.layer.operation is TRANSPOSED_CONV
    how = Scaled(site.behind, site.scale.operation is DIVIDE, site.number, site.groups, transposed)
    return how, [site.weight] if site.weight is not None else []


def _scale(site: Site, facts: Facts) -> str | None:
    """The scale is per channel and constant, and the scaled weights stay finite and precise."""
    layer, given, weight = site.layer, site.weight, site.layer.weight("weight")
    assert weight is not None
    if given is not None:
        shape, rank = tuple(given.tensor.shape), facts.rank(site.value) or weight.tensor.ndim - 1
        if not per_channel(site, channels_of(site)) or len(shape) > rank:
            return f"{given.name} of shape {shape} is not one number for each channel of {layer.where}"
        answers = [facts.plain_tensor(given), facts.agree([(w.name, w.tensor) for w in (weight, given)])]
        answers.append(facts.read_once(given) if given.tensor.requires_grad else None)
        answers.append(facts.untouched(given.node) if given.node is not None else None)
        if any(answers):
            return next(answer for answer in answers if answer is not None)
    scale = given.tensor.detach().double() if given is not None else torch.tensor(site.number, dtype=torch.float64)
    if scale.is_meta or weight.tensor.is_meta:
        return None
    sizes = scale.abs().reciprocal() if site.scale.operation is DIVIDE else scale.abs()
    some = sizes.numel() and weight.tensor.numel()
    largest = float(sizes.max()) * float(weight.tensor.detach().abs().max()) if some else 0.0
    fits = bool((sizes > 0).all()) and math.isfinite(largest) and largest <= torch.finfo(weight.tensor.dtype).max
    beyond = that(fits, f"{site.scale.where} scales by zero, or beyond what {weight.tensor.dtype} holds")
    return beyond or small(weight, *_how(site), site.layer.weight("bias") if site.behind else None)
