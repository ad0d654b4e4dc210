"""torchao, and the layer whose weight it quantizes: what `Quantize` puts in the place of plain ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regraft.core.ordinary import ORDINARY, copies_last, ordinary_call, records_gradient
from regraft.transformations._packed import Packed

CONFIGS = {"int8": "Int8DynamicActivationInt8WeightConfig", "int8-weights": "Int8WeightOnlyConfig"}
"""The names that `Quantize` knows, and torchao's classes."""


def expect_torchao() -> None:
    """Make sure that torchao is there.

    Raises:
        ImportError: It is not; the message shows how to install it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ImportError("Quantize needs torchao: pip install 'regraft[torchao]'")


class QuantizedLinear(Packed, nn.Linear):
    """`x W^T + b` with a quantized copy of the weight, which is made at the first call and after every change of it."""

    config: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """`input` is (..., in_features)."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if weight is None or self.training or not _usable(input, weight, bias):
            return F.linear(input, self.weight, self.bias)
        packs = self._fresh(weight)
        if "quantized" not in packs:
            packs["quantized"] = quantized(weight, self.config)
        return F.linear(input, packs["quantized"], bias)

    def extra_repr(self) -> str:
        name = self.config if isinstance(self.config, str) else type(self.config).__name__
        return f"{super().extra_repr()}, config={name}"


def _usable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is torchao's: ordinary tensors of one dtype, no gradient, nobody who traces."""
    if not ordinary_call() or records_gradient(x, weight, bias):
        return False
    return type(x) in ORDINARY and copies_last(weight) and x.dtype is weight.dtype and not weight.is_meta


def quantized(weight: Tensor, config: Any) -> Tensor:
    """The weight as torchao quantizes it.

    Args:
        weight: (out_features, in_features).
        config: One of the names in `CONFIGS`, or a configuration of torchao's.
    """
    import torchao.quantization as ao

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    with torch.inference_mode(False), torch.no_grad():
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        # a configuration changes settings of Inductor for the whole process, unless it is told not to
        given = getattr(ao, CONFIGS[config])(set_inductor_config=False) if isinstance(config, str) else config
        ao.quantize_(nn.Sequential(layer), given)
        return layer.weight.detach()
