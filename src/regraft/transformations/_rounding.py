"""Rounding to half precision: how a weight is rounded, and what may be asked of a value that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.mutation import may_alias
from regraft.core.values import value_of
from regraft.core.weights import Derivation


@dataclass(frozen=True)
class Cast(Derivation):
    """The source, rounded to `dtype`."""

    dtype: torch.dtype

    def compute(self, *sources: Tensor) -> Tensor:
        return sources[0].to(self.dtype)


def own_memory(value: Node, owner: GraphModule) -> bool:
    """Whether a value was made by its node, and is read once."""
    return value.op != "placeholder" and not may_alias(value, owner) and len(value.users) == 1


def is_float32(value: Node) -> bool:
    """Whether a value is a float32 tensor, or may be one where capture doesn't know."""
    known = value_of(value)
    return known is None or known.dtype is torch.float32


def is_number(value: Node) -> bool:
    """Whether a value is known to be something else than a tensor of floating-point numbers."""
    known = value.meta.get("val")
    return known is not None and not (isinstance(known, Tensor) and known.dtype.is_floating_point)


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
