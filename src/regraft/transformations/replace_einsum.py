"""`ReplaceEinsum`: an einsum that is a matrix product becomes `torch.matmul`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from regraft.core.edit import Edit
from regraft.core.pattern import Match, Pattern
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import value_of
from regraft.transformations._einsum import MatrixProduct

_EINSUMS = (torch.einsum, torch.ops.aten.einsum.default)
_UNKNOWN = "{!r} has several axes in the place of columns, and the size of one of them is not known"


class _Einsums(Pattern):
    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        yield from ((node,) for node in owner.graph.nodes if node.target in _EINSUMS)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        return Match(owner, (), nodes)


class ReplaceEinsum(Rewrite):
    """Replace an einsum of two tensors that is a batched matrix product by `torch.matmul`, the axes in its order.

    `einsum("bihd,bjhd->bhij", q, k) = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 1, 3).transpose(-2, -1)`. torch computes
    an einsum as such a product itself, and reads its equation anew in each call. Other rules know products, and not
    equations: attention that is written with einsum becomes the fused call so. Where there are no batches, several axes
    may stand for rows, columns or what is summed over: `einsum("ibh,hnd->ibnd", x, w)`, a layer with heads.

    Example:
        >>> import torch, regraft as rg
        >>> class Scores(torch.nn.Module):
        ...     def forward(self, q, k):
        ...         return torch.einsum("bihd,bjhd->bhij", q, k)
        >>> gm = rg.ReplaceEinsum()(rg.trace(Scores(), tuple(torch.randn(2, 1, 5, 2, 4))))
        >>> [node.name for node in gm.graph.nodes]
        ['q', 'k', 'permute', 'permute_1', 'transpose', 'einsum_default', 'output']
    """

    preserves_computation = True
    pattern = _Einsums()

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        (node,) = match.nodes
        equation, *operands = _given(node)
        require(that(len(operands) == 2, f"{node.name!r} is an einsum of {len(operands)} tensors, and not of two"))
        shapes = [value.shape for operand in operands if (value := value_of(operand)) is not None]
        known = len(shapes) == 2 and isinstance(equation, str)
        require(that(known, f"the equation of {node.name!r} or its shapes are not known; capture with rg.trace"))
        product = MatrixProduct.of(equation, shapes)
        require(that(product is not None, f"{equation!r} is no product of two matrices, batched or not"))
        assert product is not None

        several = product.summed > 1 or len(product.columns) > 1
        require(that(not several or all(isinstance(size, int) for size in product.columns), _UNKNOWN.format(equation)))

        if product.swapped:
            operands.reverse()
        left, right = (_permuted(edit, node, operand, order) for operand, order in zip(operands, product.given))
        if several:  # the axes of the one and of the other become one each
            first = len(product.columns) if product.transposed else product.summed
            right = edit.insert(node, torch.flatten, edit.insert(node, torch.flatten, right, first), 0, first - 1)
            left = edit.insert(node, torch.flatten, left, -product.summed)
        if product.transposed:
            right = edit.insert(node, torch.transpose, right, -2, -1)
        then: list[tuple[Any, ...]] = [(torch.matmul, right)]
        if len(product.columns) > 1:
            then.append((torch.unflatten, -1, tuple(product.columns)))
        if product.result is not None:
            then.append((torch.permute, product.result))
        for target, *others in then[:-1]:
            left = edit.insert(node, target, left, *others)
        target, *others = then[-1]
        edit.replace(node, target, left, *others)
        return f"{equation!r} is a matrix product"


def _given(node: Node) -> list[Any]:
    """The equation and the tensors of an einsum."""
    equation, *rest = (*node.args, *node.kwargs.values())
    return [equation, *(rest[0] if len(rest) and isinstance(rest[0], (list, tuple)) else rest)]


def _permuted(edit: Edit, before: Node, value: Node, order: Sequence[int] | None) -> Node:
    return value if order is None else edit.insert(before, torch.permute, value, order)
