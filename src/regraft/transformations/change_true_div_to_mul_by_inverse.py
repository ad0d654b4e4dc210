"""`ChangeTrueDivToMulByInverse`: division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

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
    results that are rounded to integers, where one rounding can become a whole number.

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
        require(facts.tensor(call["input"]), facts.smooth(call.node) if _inexact(weight, divisor) else None)
        require(_invertible(call, weight.tensor if weight else torch.tensor(float(divisor), dtype=_dtype(call))))
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
    return value.dtype if value is not None and value.dtype.is_floating_point else torch.get_default_dtype()


def _trained(weight: Weight) -> bool:
    return weight.tensor.requires_grad


def _inexact(weight: Any, divisor: Any) -> bool:
    """Whether the inverse is rounded: it is not where the divisor is a power of two."""
    values = weight.tensor.detach() if weight is not None else torch.tensor(float(divisor), dtype=torch.float64)
    return values.is_meta or not bool((torch.frexp(values.double())[0].abs() == 0.5).all())


def _invertible(call: Call, divisor: Tensor) -> str | None:
    if divisor.is_meta:
        return f"{call.where}: the divisor is on the meta device, so its value is not known"
    if not divisor.dtype.is_floating_point:
        return f"{call.where}: the divisor is a tensor of {divisor.dtype}, whose quotient has another dtype"
    limits = torch.finfo(divisor.dtype)
    inverse = 1 / divisor.detach().double()
    normal = divisor.isfinite() & (inverse.abs() >= limits.tiny) & (inverse.abs() <= limits.max)
    return that(
        bool(normal.all()), f"{call.where}: the divisor has no inverse among the normal {divisor.dtype} numbers"
    )
