"""`ReplaceEinsum`: an einsum that is a matrix product becomes `torch.matmul`."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from regraft.core.edit import Edit
from regraft.core.pattern import Match, Pattern
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import same_shape, value_of

_EINSUMS = (torch.einsum, torch.ops.aten.einsum.default)


class _Einsums(Pattern):
    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        yield from ((node,) for node in owner.graph.nodes if node.target in _EINSUMS)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        return Match(owner, (), nodes)


class ReplaceEinsum(Rewrite):
    """Replace an einsum of two tensors that is a batched matrix product by `torch.matmul`, the axes in its order.

    `einsum("bihd,bjhd->bhij", q, k) = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 1, 3).transpose(-2, -1)`. torch computes
    an einsum as such a product itself, and reads its equation anew in each call. Other rules know products, and not
    equations: attention that is written with einsum becomes the fused call so.

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
        product = _Product.of(equation, shapes)
        require(that(product is not None, f"{equation!r} is no product of two matrices, batched or not"))
        assert product is not None

        left, right = (_permuted(edit, node, operand, order) for operand, order in zip(operands, product.given))
        if product.transposed:
            right = edit.insert(node, torch.transpose, right, -2, -1)
        if product.result is None:
            edit.replace(node, torch.matmul, left, right)
        else:
            edit.replace(node, torch.permute, edit.insert(node, torch.matmul, left, right), product.result)
        return f"{equation!r} is a matrix product"


@dataclass(frozen=True)
class _Product:
    """An einsum as a product: the orders of the axes of both tensors and of the result, None where they stay as they are.

    `transposed` says whether the second then has its columns as rows.
    """

    given: tuple[Sequence[int] | None, Sequence[int] | None]
    transposed: bool
    result: Sequence[int] | None

    @staticmethod
    def of(equation: str, shapes: Sequence[Any]) -> _Product | None:
        read = _letters(equation, [len(shape) for shape in shapes])
        if read is None:
            return None
        left, right, result = read
        batch = [one for one in result if one in left and one in right]
        rows, columns = ([one for one in result if one in each and one not in batch] for each in (left, right))
        summed = [one for one in left if one in right and one not in result]
        if len(rows) != 1 or len(columns) != 1 or len(summed) != 1 or {*left, *right} != {*result, *summed}:
            return None
        sizes: dict[str, Any] = dict(zip(left, shapes[0], strict=True))
        if not all(same_shape((size,), (sizes.get(one, size),)) for one, size in zip(right, shapes[1], strict=True)):
            return None  # einsum repeats an axis of one element
        transposed = right.index(*columns) < right.index(*summed)
        matrix = [*columns, *summed] if transposed else [*summed, *columns]
        given = _order(left, [*batch, *rows, *summed]), _order(right, [*batch, *matrix])
        return _Product(given, transposed, _order([*batch, *rows, *columns], result))


def _given(node: Node) -> list[Any]:
    """The equation and the tensors of an einsum."""
    equation, *rest = (*node.args, *node.kwargs.values())
    return [equation, *(rest[0] if len(rest) and isinstance(rest[0], (list, tuple)) else rest)]


def _letters(equation: str, ranks: Sequence[int]) -> list[list[str]] | None:
    """The axes of both tensors and of the result by their letters; None where it isn't as simple as that.

    What an ellipsis stands for gets letters that the equation has not.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or len(terms) != 2:
        return None
    hidden = {rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term}
    if len(hidden) > 1:
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    instead = "".join(free[: max(*hidden, 0) if hidden else 0])
    read = [list(term.replace("...", instead)) for term in (*terms, result)]
    plain = all(len({*axes}) == len(axes) and set(axes) <= {*string.ascii_letters} for axes in read)
    return read if plain and all(len(axes) == rank for axes, rank in zip(read, ranks)) else None


def _order(axes: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    order = [axes.index(letter) for letter in wanted]
    return order if order != sorted(order) else None


def _permuted(edit: Edit, before: Node, value: Node, order: Sequence[int] | None) -> Node:
    return value if order is None else edit.insert(before, torch.permute, value, order)
