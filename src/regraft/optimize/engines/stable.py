"""Formulas that hold for large numbers, for converters whose own do not.

The logarithm of the sigmoid of -100 is -100. OpenVINO and ONNX Runtime make it of the sigmoid, which float32 rounds to
zero there, and ONNX Runtime adds in logarithms by way of the numbers themselves, which are infinite from 89 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

aten = torch.ops.aten


def _log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - (-x.abs()).exp().log1p()


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    more = (-(x - y).abs()).exp().log1p()
    return torch.where(x == y, x + math.log(2), torch.maximum(x, y) + more)  # equal infinities have no difference


def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    more = (-(x - y).abs() * math.log(2)).exp().log1p() / math.log(2)
    return torch.where(x == y, x + 1, torch.maximum(x, y) + more)


def _binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    likely = _log_sigmoid(x) if pos_weight is None else _log_sigmoid(x) * ((pos_weight - 1) * target + 1)
    loss = (1 - target) * x - likely
    loss = loss if weight is None else loss * weight
    return (loss, loss.mean(), loss.sum())[reduction]


STABLE: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid.default: _log_sigmoid,
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: _logaddexp2,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
}
"""What to write in place of an operation."""


def stably_spelled(program: ExportedProgram) -> ExportedProgram:
    """A program with these formulas, for ONNX Runtime.

    Args:
        program: The program.

    Raises:
        NotImplementedError: It has an operation of which the form there overflows, and that no short one replaces.
    """
    targets = {node.target for node in program.graph.nodes}
    for target in (aten.logcumsumexp.default, aten.special_log_ndtr.default):
        if target in targets:
            raise NotImplementedError(f"{target} overflows in the form that it is exported in")
    return program if targets.isdisjoint(STABLE) else program.run_decompositions(STABLE)
