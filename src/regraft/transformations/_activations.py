"""The activations that oneDNN can compute at the end of a linear layer or a convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regraft.core import vocabulary as v
from regraft.core.vocabulary import Call, Operation

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation under oneDNN's name, with its numbers: `hardtanh` from 0 to 6 is ReLU6."""

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    def plain(self, x: Tensor) -> Tensor:
        """The activation, by torch's own functions."""
        if self.name == "gelu":
            return F.gelu(x, approximate=self.algorithm)
        return _PLAIN[self.name](x, *self.scalars)

    def write(self, x: Tensor) -> Tensor:
        """The activation, written into `x`."""
        if self.name == "none":
            return x
        result: Tensor
        if self.name == "gelu":
            result = aten.gelu_(x, approximate=self.algorithm)
        else:
            result = _WRITE[self.name](x, *self.scalars)
        return result


NONE = Activation("none")

_PLAIN: dict[str, Callable[..., Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "hardtanh": F.hardtanh,
    "swish": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_WRITE: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu_,
    "hardtanh": aten.hardtanh_,
    "swish": aten.silu_,
    "hardswish": aten.hardswish_,
    "hardsigmoid": aten.hardsigmoid_,
    "leaky_relu": aten.leaky_relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}
_NAMES: dict[Operation, str] = {
    v.RELU: "relu",
    v.SILU: "swish",
    v.HARDSWISH: "hardswish",
    v.HARDSIGMOID: "hardsigmoid",
    v.SIGMOID: "sigmoid",
    v.TANH: "tanh",
}


def activation_of(call: Call | None) -> Activation | None:
    """What `call` is to oneDNN; None where it is no activation that oneDNN has."""
    if call is None:
        return None
    if call.operation is v.RELU6:
        return Activation("hardtanh", (0.0, 6.0))
    if call.operation is v.HARDTANH and _numbers(call["min_val"], call["max_val"]):
        return Activation("hardtanh", (float(call["min_val"]), float(call["max_val"])))
    if call.operation is v.LEAKY_RELU and _numbers(call["negative_slope"]):
        return Activation("leaky_relu", (float(call["negative_slope"]),))
    if call.operation is v.GELU:
        return Activation("gelu", (), str(call["approximate"]))
    name = _NAMES.get(call.operation)
    return Activation(name) if name is not None else None


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)
