"""`ChangeTrueDivToMulByInverse`: division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import value_of
from regraft.core.vocabulary import DIVIDE, Call, Weight
from regraft.core.weights import Derivation, wider


class ChangeTrueDivToMulByInverse(Rewrite):
    """Turn division by a number or a constant buffer into multiplication by its inverse.

    `x / c = x * (1 / c)`, exact where `c` is a power of two and else within one rounding. Scores in attention are often
    scaled so. Refused are divisors that are zero or whose inverse leaves the normal numbers of the dtype, sizes, and
    results that are rounded or compared somewhere behind, where a last bit can become a whole step: by functions of
    torch that make steps, and by functions and modules of which nothing is known.

    Example:
        >>> import torch, regraft as rg
        >>> class Scale(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x / 8
        >>> gm = rg.ChangeTrueDivToMulByInverse()(rg.symbolic_trace(Scale()))
        >>> [(node.target.__name__, node.args[1]) for node in gm.graph.nodes if node.op == "call_function"]
        [('mul', 0.125)]
    """

    preserves_computation = True
    pattern = Calls(DIVIDE)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        divisor, weight = call["other"], call.weight("other")
        require(
            facts.in_place(call.node),
            that(call["rounding_mode"] is None, f"{call.where} rounds its result ({call['rounding_mode']})"),
            that(
                weight is not None or _number(divisor), f"{call.where}: the divisor is not a constant number or buffer"
            ),
        )
        values = _number_range(call, divisor) if weight is None else _tensor_range(weight.tensor)
        require(
            facts.tensor(call["input"]),
            None if values and values.exact else facts.smooth(call.node),
            _invertible(call, values),
        )
        if weight is not None and weight.node is not None:
            trained = f"{weight.name} is trainable, and its inverse would be trained otherwise; freeze it"
            require(facts.plain_tensor(weight), facts.untouched(weight.node), that(not _trained(weight), trained))

            name = edit.free_name(f"{weight.name}_inverse")
            edit.put_buffer(name, (_Inverse(), [weight]))
            edit.replace(call.node, operator.mul, call["input"], edit.insert_weight(call.node, name))
            return f"multiplied by the inverse of {weight.name}"
        edit.replace(call.node, operator.mul, call["input"], 1 / divisor)
        return f"/ {divisor} became * {1 / divisor}"


@dataclass(frozen=True)
class _Inverse(Derivation):
    """`1 / c`, one precision up, cast once."""

    def compute(self, *sources: Tensor) -> Tensor:
        (source,) = sources
        return source.to(wider(source.dtype)).reciprocal().to(source.dtype)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _dtype(call: Call) -> torch.dtype:
    value = value_of(call["input"])
    dtype = value.dtype.to_real() if value is not None else torch.get_default_dtype()
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _trained(weight: Weight) -> bool:
    return weight.tensor.requires_grad


@dataclass(frozen=True)
class _Range:
    """What matters of a divisor: its dtype, the smallest and largest magnitude, whether all are powers of two."""

    dtype: torch.dtype
    smallest: float
    largest: float
    exact: bool


def _number_range(call: Call, divisor: float) -> _Range:
    return _Range(_dtype(call), abs(divisor), abs(divisor), abs(math.frexp(divisor)[0]) == 0.5)


def _tensor_range(divisor: Tensor) -> _Range | None:
    if divisor.is_meta or not divisor.numel():
        return None
    values = divisor.detach().double().abs()
    exact = bool((torch.frexp(values)[0] == 0.5).all())
    return _Range(divisor.dtype, float(values.min()), float(values.max()), exact)


def _invertible(call: Call, values: _Range | None) -> str | None:
    if values is None:
        return f"{call.where}: the divisor is on the meta device, or empty, so its value is not known"
    if not values.dtype.is_floating_point:
        return f"{call.where}: the divisor is a tensor of {values.dtype}, whose quotient has another dtype"
    limits, quotient = torch.finfo(values.dtype), value_of(call.node)
    if not values.exact and quotient is not None and limits.eps > torch.finfo(quotient.dtype).eps:
        return f"{call.where}: the divisor is {values.dtype}, and its inverse coarser than a {quotient.dtype} quotient"
    normal = values.smallest > 0 and 1 / limits.max <= values.smallest and values.largest <= 1 / limits.tiny
    return that(normal, f"{call.where}: the divisor has no inverse among the normal {values.dtype} numbers")
