"""A folded layer for graphs without shapes, where a `BatchNorm1d` may mean either of two things.

`BatchNorm1d` normalises axis 1. Behind a linear layer that is the axis of the features for an input of two axes, and
another one for three. A graph that was traced without inputs does not say which; so the layer looks when it is called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from regraft.core.clone import clone_module
from regraft.core.vocabulary import Call

_NAMES = ("running_mean", "running_var", "weight", "bias")


class _Ranked(nn.Module):
    """Folded where the input has `folded_rank` axes; elsewhere what the model computed, with its own weights."""

    made_how = (
        "into which a batch norm was folded without knowing the rank of its input; capture with rg.trace(model, args),"
        " which knows it, to fold or rewrite more"
    )
    folded_rank: int
    norm_is_behind: bool
    norm_eps: float

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's own, or norm and layer one after the other."""
        own: Any = super()
        if x.dim() == self.folded_rank:
            result: Tensor = own.forward(x)
            return result
        return self._layer(self._norm(x)) if not self.norm_is_behind else self._norm(self._layer(x))

    def _layer(self, x: Tensor) -> Tensor:
        weight, bias = self._buffers["unfolded_weight"], self._buffers["unfolded_bias"]
        assert weight is not None
        if isinstance(self, nn.Conv1d):
            result: Tensor = self._conv_forward(x, weight, bias)
            return result
        return F.linear(x, weight, bias)

    def _norm(self, x: Tensor) -> Tensor:
        mean, var, weight, bias = (self._buffers[f"norm_{name}"] for name in _NAMES)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.norm_eps)


class RankedLinear(_Ranked, nn.Linear):
    """A linear layer with a batch norm folded in."""


class RankedConv1d(_Ranked, nn.Conv1d):
    """A convolution with a batch norm folded in."""


_KINDS: dict[type[nn.Module], type[_Ranked]] = {nn.Linear: RankedLinear, nn.Conv1d: RankedConv1d}


def ranked(like: nn.Module, norm: Call, layer: Call, behind: bool) -> nn.Module:
    """A module like `like` that holds the unfolded weights of both too."""
    module = clone_module(like)
    kind = _KINDS.get(type(like))
    if kind is None:
        return module
    module.__class__ = kind
    module.folded_rank = 2 if kind is RankedLinear else 3  # type: ignore[assignment]
    module.norm_is_behind, module.norm_eps = behind, float(norm["eps"])  # type: ignore[assignment]
    for prefix, call, names in (("unfolded", layer, ("weight", "bias")), ("norm", norm, _NAMES)):
        for name in names:
            weight = call.weight(name)
            module.register_buffer(f"{prefix}_{name}", weight.tensor if weight else None, persistent=False)
    return module
