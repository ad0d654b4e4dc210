"""The equation of an einsum, read as a product of matrices."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regraft.core.values import same_shape


@dataclass(frozen=True)
class MatrixProduct:
    """An einsum as a product, laid out in memory as torch lays it out.

    Attributes:
        swapped: Whether its second tensor is the first of the product.
        given: The orders of the axes of the product's tensors, None where they stay.
        summed: How many axes are summed over; they are the last of the first tensor.
        columns: The sizes of the axes of the second tensor that the result has, too.
        transposed: Whether that one then has these first, rather than those that are summed over.
        result: The order of the axes of the product as the result has them.
    """

    swapped: bool
    given: tuple[Sequence[int] | None, Sequence[int] | None]
    summed: int
    columns: Sequence[Any]
    transposed: bool
    result: Sequence[int] | None

    @staticmethod
    def of(equation: str, shapes: Sequence[Any]) -> MatrixProduct | None:
        """The product that an equation is for two tensors of these shapes; None where it is none.

        Args:
            equation: The equation.
            shapes: The shapes.
        """
        read = _letters(equation, [len(shape) for shape in shapes])
        if read is None:
            return None
        left, right, result = read
        batch = [one for one in result if one in left and one in right]
        rows, columns = ([one for one in result if one in each and one not in batch] for each in (left, right))
        summed = [one for one in left if one in right and one not in result]
        if not rows or not columns or not summed or {*left, *right} != {*result, *summed}:
            return None
        if batch and (len(rows) > 1 or len(columns) > 1 or len(summed) > 1):
            return None
        sizes: dict[str, Any] = dict(zip(left, shapes[0], strict=True))
        if not all(same_shape((size,), (sizes.get(one, size),)) for one, size in zip(right, shapes[1], strict=True)):
            return None  # einsum repeats an axis of one element
        sizes |= zip(right, shapes[1], strict=True)
        swapped = result.index(columns[-1]) < result.index(rows[0])
        if swapped:
            left, right, rows, columns = right, left, columns, rows
        transposed = right.index(columns[0]) < right.index(summed[0])
        matrix = [*columns, *summed] if transposed else [*summed, *columns]
        given = _order(left, [*batch, *rows, *summed]), _order(right, [*batch, *matrix])
        order = _order([*batch, *rows, *columns], result)
        return MatrixProduct(swapped, given, len(summed), [sizes[one] for one in columns], transposed, order)


def _letters(equation: str, ranks: Sequence[int]) -> list[list[str]] | None:
    """The axes of both tensors and of the result by their letters; None where it isn't as simple as that.

    What an ellipsis stands for gets letters that the equation has not.
    """
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if len(terms) != 2:
        return None
    hidden = {rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term}
    free = [letter for letter in string.ascii_letters if letter not in equation]
    instead = "".join(free[: max((0, *hidden))])
    read = [list(term.replace("...", instead)) for term in (*terms, result)]
    plain = all(len({*axes}) == len(axes) and set(axes) <= {*string.ascii_letters} for axes in read)
    return read if plain and all(len(axes) == rank for axes, rank in zip(read, ranks)) else None


def _order(axes: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    order = [axes.index(letter) for letter in wanted]
    return order if order != sorted(order) else None
