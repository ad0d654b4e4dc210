"""A product with a weight, read as the linear layer that it is: its weight, its bias, and the views around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.query import Facts, require, that
from regraft.core.values import same_shape, value_of
from regraft.core.vocabulary import (
    ADD,
    ADDMM,
    ADJOINT,
    FLATTEN,
    MATRIX_TRANSPOSE,
    PERMUTE,
    RESHAPE,
    TRANSPOSE,
    Call,
    Weight,
    attribute,
    read,
)
from regraft.core.weights import Derivation

_SIZES = (FLATTEN, RESHAPE)
_VIEWS = (*_SIZES, ADJOINT, MATRIX_TRANSPOSE, PERMUTE, TRANSPOSE)


@dataclass(frozen=True)
class AsLinear(Derivation):
    """The weight of a linear layer, from the weight of a product.

    Args:
        shape: The shape of the latter.
        size: The size of the matrix that its elements are, one row after the other.
        transposed: Whether the rows of that matrix are what the layer's inputs are multiplied with.
    """

    shape: tuple[int, ...]
    size: tuple[int, int]
    transposed: bool

    def compute(self, *sources: Tensor) -> Tensor:
        matrix = sources[0].reshape(self.size)
        return matrix.t().contiguous() if self.transposed else matrix

    def invert(self, derived: Tensor) -> tuple[Tensor, ...] | None:
        return ((derived.t() if self.transposed else derived).reshape(self.shape),)


@dataclass(frozen=True)
class Factor:
    """The second factor of a product: a weight, and the calls that view it otherwise, the last first."""

    weight: Weight
    views: list[Call]

    @staticmethod
    def of(value: Any, owner: GraphModule) -> Factor | None:
        views: list[Call] = []
        while (call := read(value, owner)) is not None and call.operation in _VIEWS:
            if call.node.all_input_nodes != [call.input]:
                return None  # its sizes are computed
            views.append(call)
            value = call.input
        weight = _weight(value, owner)
        return Factor(weight, views) if weight is not None else None

    def derivation(self) -> AsLinear | None:
        """How the weight of the layer comes from this one; None where that is no rearrangement of a matrix."""
        shape = tuple(self.weight.tensor.shape)
        try:
            matrix = self._viewed(torch.empty(shape, dtype=self.weight.tensor.dtype, device="meta"))
        except RuntimeError:  # one of the views would be a copy
            return None
        if matrix is None or matrix.ndim != 2:
            return None
        rows, columns = matrix.shape
        if matrix.is_contiguous():
            return AsLinear(shape, (rows, columns), transposed=True)
        return AsLinear(shape, (columns, rows), transposed=False) if matrix.t().is_contiguous() else None

    def _viewed(self, tensor: Tensor) -> Tensor | None:
        for view in reversed(self.views):
            target: Any = view.node.target
            call = target if callable(target) else getattr(torch.Tensor, target)
            result: Tensor = call(tensor, *view.node.args[1:], **view.node.kwargs)
            if result.dtype != tensor.dtype:
                return None  # the bits are read as another type
            tensor = tensor.view(result.shape) if view.operation in _SIZES else result
        return tensor


def bias_of(call: Call, size: int, owner: GraphModule, facts: Facts) -> tuple[Node, Weight | None]:
    """The node whose result is the product with a bias, and the bias; the product alone where it has none."""
    if call.operation is ADDMM:
        bias = _weight(call["bias"], owner)
        plain = call["beta"] == 1 and call["alpha"] == 1
        require(that(plain, f"{call.where} multiplies by beta={call['beta']} and alpha={call['alpha']}"))
        require(that(_is_bias(bias, size), f"{call.where} adds what is not one number for each output, or no weight"))
        return call.node, bias
    add = read(next(iter(call.node.users)), owner) if len(call.node.users) == 1 else None
    if add is None or add.operation is not ADD or add["alpha"] not in (None, 1) or facts.in_place(add.node):
        return call.node, None
    others = [_weight(value, owner) for value in (add["input"], add["other"]) if value is not call.node]
    same_type = getattr(value_of(add.node), "dtype", None) == getattr(value_of(call.node), "dtype", None)
    if len(others) != 1 or not _is_bias(others[0], size) or not same_type:
        return call.node, None
    return add.node, others[0]


def _is_bias(weight: Weight | None, size: int) -> bool:
    return weight is not None and tuple(weight.tensor.shape) == (size,)


def without_views(call: Call, end: Node, rows: int, owner: GraphModule, facts: Facts) -> tuple[Node, Node]:
    """What the layer is to be given, and the node whose result it has."""
    given, behind = read(call["input"], owner), read(next(iter(end.users)), owner) if len(end.users) == 1 else None
    if given is None or behind is None or given.operation not in _SIZES or behind.operation not in _SIZES:
        return call["input"], end
    before, after = value_of(given.input), value_of(behind.node)
    if before is None or after is None or behind["input"] is not end:
        return call["input"], end
    as_before = same_shape(after.shape, (*before.shape[:-1], rows))  # and so the last axis is the product's, too
    if not as_before or facts.unchanged(given.input, given.node, call.node):
        return call["input"], end
    return given.input, behind.node


def _weight(value: Any, owner: GraphModule) -> Weight | None:
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    tensor = attribute(owner, str(value.target))
    return Weight(str(value.target), tensor, value) if isinstance(tensor, Tensor) else None
