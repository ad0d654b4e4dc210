"""`FoldScale`: a constant scale goes into the linear layer or the convolution beside it."""

from __future__ import annotations

import math

import torch

from regraft.core.edit import Derived, Edit
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import DIVIDE, LINEAR
from regraft.transformations._scales import Scaled, Scales, Site, per_channel, site_of


class FoldScale(Rewrite):
    """Fold a multiplication or a division by a constant into the layer that feeds it, or the one that it feeds.

    `s (W x + b) = (s W) x + s b` and `W (s x) + b = (W s) x + b`, for a number or a weight with one element for each
    channel: the scaled queries of attention, LayerScale (Touvron et al. 2021, arXiv:2103.17239). Padding with zeros is
    scaled to zeros. A zero, or a scale that leaves the numbers of the dtype, is refused.

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

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        site = site_of(match.call.node, match.owner)
        assert site is not None
        layer, node, weight = site.layer, match.call.node, site.layer.weight("weight")
        require(facts.plain(layer), facts.alone(layer), that(layer.module is not None, f"{layer.where} is no module"))
        assert weight is not None
        assert layer.module is not None
        require(
            facts.in_place(node),
            that(not layer.module.training, f"{layer.where} is in training mode; call .eval() on the model first"),
            facts.only_user(layer.node, node) if site.behind else None,
            facts.untouched(layer.node if site.behind else node),
            facts.unchanged(site.value, node, layer.node) if not site.behind else None,
            _scale(site, facts),
        )

        groups = 1 if layer.operation is LINEAR else int(layer["groups"])
        derived = {"weight": _derived(site, "weight", groups)}
        if site.behind and layer.weight("bias") is not None:
            derived["bias"] = _derived(site, "bias", groups)
        edit.put_module(layer.where, layer.module, {**derived})
        edit.replace_with_module(layer.node, layer.where, layer.input if site.behind else site.value)
        edit.redirect(node, layer.node if site.behind else site.value)
        edit.erase(node)
        if site.weight is not None and site.weight.node is not None and not site.weight.node.users:
            edit.discard_weight(site.weight.node)
        return f"folded {site.number if site.weight is None else site.weight.name} into {layer.where}"


def _derived(site: Site, name: str, groups: int) -> Derived:
    source = site.layer.weight(name)
    assert source is not None
    how = Scaled(0 if site.behind else 1, site.scale.operation is DIVIDE, site.number, groups)
    return how, [source] if site.weight is None else [source, site.weight]


def _scale(site: Site, facts: Facts) -> str | None:
    """The scale is per channel and constant, and the scaled weights stay finite."""
    layer, given, weight = site.layer, site.weight, site.layer.weight("weight")
    assert weight is not None
    if given is not None:
        outputs, inputs = weight.tensor.shape[:2]
        channels = outputs if site.behind else inputs * (1 if layer.operation is LINEAR else int(layer["groups"]))
        shape, rank = tuple(given.tensor.shape), facts.rank(site.value) or weight.tensor.ndim - 1
        if not per_channel(site, channels) or len(shape) > rank:
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
    largest = float(sizes.max()) * float(weight.tensor.detach().abs().max())
    fits = bool((sizes > 0).all()) and math.isfinite(largest) and largest <= torch.finfo(weight.tensor.dtype).max
    return that(fits, f"{site.scale.where} scales by zero, or beyond what {weight.tensor.dtype} holds")
