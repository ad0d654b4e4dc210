"""Reading attention that is written out: from the softmax down to the product of the query and the key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.query import Facts, require, that
from regraft.core.tree import TreeMatch
from regraft.core.values import same_shape, value_of
from regraft.core.vocabulary import (
    ADD,
    ADJOINT,
    CAST,
    DIVIDE,
    MASKED_FILL,
    MATMUL,
    MULTIPLY,
    PERMUTE,
    RESHAPE,
    TRANSPOSE,
    WHERE,
    Call,
    attribute,
    read,
)

_HIDDEN = -1e4
"""A score from which on a softmax has no weight left: exp(-1e4) is zero in every precision."""
_BETWEEN = (MATMUL, CAST, RESHAPE, MULTIPLY, DIVIDE, ADD, MASKED_FILL, WHERE)
"""What may lie between the product and the softmax."""
_DEEPEST = 12


@dataclass(frozen=True)
class Mask:
    """What was done to the scores: `node` added, or `fill` put where `node` is true (or, `keeps`, where it is not).

    `parts` are the sizes of the axes in whose place the scores have a single one, where it was done to a view of them.
    """

    node: Node
    fill: float | None = None
    keeps: bool = False
    parts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Factor:
    """What the scores are multiplied with, or divided by: `node`, by the call `call`."""

    call: Call
    node: Node


@dataclass
class Scores:
    """The scores of attention: `scale` times the product of the query and the transposed key, and the masks.

    `factors` are multiplications and divisions by tensors of one element for each head, or one for all.
    """

    product: Call
    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)


def read_scores(value: Any, owner: GraphModule, facts: Facts) -> Scores:
    """The scores that `value` is, or a refusal that names what is not understood."""
    scale, masks, nodes, factors = 1.0, list[Mask](), list[Node](), list[Factor]()
    whole: int | None = None  # how many of the masks are those of the scores as they come out of the last view
    while True:
        call = read(value, owner)
        known = call is not None and call.operation in _BETWEEN
        name = value.name if isinstance(value, Node) else value
        require(that(known, f"{name!r} lies between the scores and the softmax, and is no scale and no mask"))
        assert call is not None
        nodes.append(call.node)
        if call.operation is MATMUL:
            require(*(_of_product(factor, call) for factor in factors))
            return Scores(call, scale, masks, nodes, factors)
        if call.operation is CAST:
            value = call["input"]
        elif call.operation is RESHAPE:
            value, first = call["input"], len(masks) if whole is None else whole
            masks[first:] = [_parted(mask, call) for mask in masks[first:]]
            whole = len(masks)
        elif call.operation in (MULTIPLY, DIVIDE):
            factor = _factor_of(call, facts)
            if factor is not None:
                value = call["other"] if factor.node is call["input"] else call["input"]
                factors.append(factor)
            else:
                value, number = scaled(call, facts)
                scale *= number
        else:
            plain = scale == 1 and not factors
            require(that(plain, f"{call.where} masks the scores before they are scaled by {_named(scale, factors)}"))
            value, mask = _masked(call, facts)
            masks.append(mask)


def _named(scale: float, factors: list[Factor]) -> str:
    return f"{factors[0].node.name!r}" if factors else f"{scale}"


def _factor_of(call: Call, facts: Facts) -> Factor | None:
    """A multiplication with, or a division by, a tensor that is the same for all elements of a head's scores."""
    if call["rounding_mode"] is not None:
        return None
    for one, other in (("input", "other"), ("other", "input"))[: 1 if call.operation is DIVIDE else 2]:
        value = value_of(call[other])
        alike = value is not None and same_shape(value.shape[-2:], (1, 1)[: value.ndim])
        if alike and constant(call[other], facts) is None and _leads_to_product(call[one], call.owner):
            return Factor(call, call[other])
    return None


def _of_product(factor: Factor, product: Call) -> str | None:
    """The query can be multiplied instead: where the scores had the axes of the product, and in its type."""
    scores, plain, other = value_of(factor.call.node), value_of(product.node), value_of(factor.node)
    if scores is None or plain is None or other is None:
        return f"the shapes around {factor.call.where} are not known"
    alike = same_shape(scores.shape, plain.shape) and other.dtype == plain.dtype
    reason = that(alike, f"{factor.call.where} scales by a tensor in another type, or a view of the scores")
    half = other.dtype in (torch.float16, torch.bfloat16)
    return reason or that(
        not half, f"{factor.call.where} scales in half precision, and the query would be rounded more"
    )


def _parted(mask: Mask, view: Call) -> Mask:
    """A mask of a view of the scores, whose leading axes are one axis in the scores."""
    value, parted, merged = value_of(mask.node), value_of(view.node), value_of(view.input)
    refusal = f"{view.where} is a view of the scores that does not only part their first axis"
    require(that(value is not None and parted is not None and merged is not None, refusal))
    assert value is not None
    assert parted is not None
    assert merged is not None
    sizes, kept = view["shape"], merged.ndim - 1
    parts = tuple(sizes[:-kept]) if isinstance(sizes, (list, tuple)) else ()
    known = all(isinstance(size, Node) or (isinstance(size, int) and size >= 0) for size in parts)
    require(that(bool(parts) and known and same_shape(parted.shape[-kept:], merged.shape[1:]), refusal))
    return replace(mask, parts=parts) if value.ndim > kept else mask


def scaled(call: Call, facts: Facts) -> tuple[Any, float]:
    """What a multiplication or division by a number scales, and by how much."""
    left, right = constant(call["input"], facts), constant(call["other"], facts)
    if call.operation is MULTIPLY and left is not None:
        return call["other"], left
    require(that(right not in (None, 0), f"{call.where} scales by something else than a number"))
    assert right is not None
    return call["input"], right if call.operation is MULTIPLY else 1 / right


def _masked(call: Call, facts: Facts) -> tuple[Any, Mask]:
    if call.operation is ADD:
        require(that(call["alpha"] in (None, 1), f"{call.where} adds a multiple of the mask"))
        left, right = call["input"], call["other"]
        scores, mask = (left, right) if _leads_to_product(left, call.owner) else (right, left)
        require(that(_leads_to_product(scores, call.owner), f"{call.where} adds two values, neither of them scores"))
        require(that(isinstance(mask, Node), f"{call.where} adds the number {mask}, and no mask"))
        return scores, Mask(mask)
    if call.operation is MASKED_FILL:
        return call["input"], Mask(call["mask"], _fill(call, call["value"], facts))
    keeps = _leads_to_product(call["input"], call.owner)
    scores, fill = (call["input"], call["other"]) if keeps else (call["other"], call["input"])
    return scores, Mask(call["condition"], _fill(call, fill, facts), keeps)


def _fill(call: Call, value: Any, facts: Facts) -> float:
    number = constant(value, facts)
    require(that(number is not None, f"{call.where} fills the scores with something else than a number"))
    assert number is not None
    hides = number <= _HIDDEN
    require(that(hides, f"{call.where} fills the scores with {number}, which still has weight in the softmax"))
    return number


def _leads_to_product(value: Any, owner: GraphModule, depth: int = _DEEPEST) -> bool:
    call = read(value, owner) if depth else None
    if call is None or call.operation is MATMUL:
        return call is not None
    if call.operation in _BETWEEN:
        return any(_leads_to_product(call[name], owner, depth - 1) for name in ("input", "other"))
    return False


def constant(value: Any, facts: Facts) -> float | None:
    """The number that a value is, where it is one for certain, and stays it."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Node) or facts.untouched(value) is not None:
        return None
    if value.target in (torch.full, torch.zeros) and value.args[:1] in (([],), ((),)):
        given = (*value.args, value.kwargs.get("fill_value"))[1] if value.target is torch.full else 0.0
        return float(given) if isinstance(given, (int, float)) else None
    if value.op == "get_attr":
        (path, _, leaf), owner = str(value.target).rpartition("."), facts.owner(value)
        tensor, parent = attribute(owner, str(value.target)), owner.get_submodule(path)
        fixed = isinstance(tensor, Tensor) and leaf in parent._non_persistent_buffers_set
        return float(tensor) if fixed and tensor.numel() == 1 and not tensor.is_meta else None
    return None


def unscaled(value: Node, scale: float, match: TreeMatch, facts: Facts) -> tuple[Node, float, list[Node]]:
    """A query or a key without a scale of its own, which joins that of the scores."""
    call = read(value, match.owner)
    if call is None or call.operation not in (MULTIPLY, DIVIDE) or len(value.users) > 1:
        return value, scale, []
    operands = [constant(call[name], facts) for name in ("input", "other")]
    if operands == [None, None] or (call.operation is DIVIDE and not operands[1]):
        return value, scale, []
    inner, factor = scaled(call, facts)
    return inner, scale * factor, [value]


def straightened(
    key: Node, scale: float, match: TreeMatch, facts: Facts
) -> tuple[Node, Node | None, float, list[Node]]:
    """A key without a scale of its own, as it is and as it was before its transposition; and what led to it."""
    key, scale, above = unscaled(key, scale, match, facts)
    call = read(key, match.owner)
    straight = untransposed(call) if call is not None else None
    if straight is None:
        return key, None, scale, above
    straight, scale, more = unscaled(straight, scale, match, facts)
    return key, straight, scale, [*more, key, *above]


def untransposed(call: Call) -> Node | None:
    """What a transposition of the last two axes transposes; None for any other call."""
    value = value_of(call.node)
    if value is None:
        return None
    if call.operation is ADJOINT:
        return call.input if not value.is_complex() else None
    axes = list(range(value.ndim))
    if call.operation is TRANSPOSE:
        first, second = call["dim0"] % value.ndim, call["dim1"] % value.ndim
        axes[first], axes[second] = axes[second], axes[first]
    elif call.operation is PERMUTE:
        axes = [axis % value.ndim for axis in call["shape"]]
    wanted = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
    return call.input if axes == wanted and call.operation in (TRANSPOSE, PERMUTE) else None


def fits(query: Tensor, key: Tensor, value: Tensor, scores: Scores, softmax: Node) -> str | None:
    """None where the shapes are those of attention, without broadcasting."""
    product, last = value_of(scores.product.node), value_of(softmax)
    if product is None or last is None or not same_shape(product.shape, last.shape):
        return "a mask broadcasts the scores to another shape"
    batches = [tensor.shape[:-2] for tensor in (key, value)]
    if query.ndim < 3 or not all(same_shape(query.shape[:-2], batch) for batch in batches):
        return "the query, the key and the value are not of the same batches"
    return None


def precise(operands: list[Node], inner: list[Node]) -> str | None:
    """The fused call computes at least as precisely: half precision and float32 in float32, float64 in float64."""
    dtypes = {tensor.dtype for operand in operands if (tensor := value_of(operand)) is not None}
    if len(dtypes) != 1:
        return "the query, the key and the value are of different dtypes"
    (dtype,) = dtypes
    between = {tensor.dtype for node in inner if (tensor := value_of(node)) is not None} - {dtype, torch.float32}
    result = value_of(inner[-1])
    if between or result is None or result.dtype != dtype or not dtype.is_floating_point:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in (*between, dtype))
        return f"the computation goes through {kinds}, which the fused call does not"
    lowered = dtype is torch.float64 and any(v.dtype is torch.float32 for n in inner if (v := value_of(n)) is not None)
    return "float64 is lowered to float32 on the way" if lowered else None


def along_last(softmax: Node, dim: Any) -> str | None:
    """The softmax is over the keys."""
    value = value_of(softmax)
    last = value is not None and isinstance(dim, int) and dim % value.ndim == value.ndim - 1
    return that(last, f"{softmax.name!r} is a softmax over another axis than the last")
