"""What must hold of a norm that is written out before it is fused."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from regraft.core.edit import Edit
from regraft.core.query import require, that
from regraft.core.tree import TreeMatch
from regraft.core.values import layout_of, value_of
from regraft.core.vocabulary import CAST


def ends(x: Node, weights: list[Node], match: TreeMatch) -> tuple[Node, Node, list[Node]]:
    """The first and the last value of what is fused, and the nodes in between, casts included.

    What the model casts up and back is fused with both casts, unless its weights are as wide as the value that was cast
    up: then the casts stay, and what lies between them is fused.
    """
    source, result = x.args[0] if match.is_a(x, CAST) else None, match.result
    before, wide, after = value_of(source), value_of(x), value_of(result)
    if not isinstance(source, Node) or before is None or wide is None or after is None or before.dtype != after.dtype:
        return x, result, match.inner
    if not any(value.dtype == wide.dtype != before.dtype for node in weights if (value := value_of(node)) is not None):
        return source, result, sorted({x, *match.inner})
    while match.is_a(result, CAST) and isinstance(result.args[0], Node):
        result = result.args[0]
    return x, result, [node for node in match.nodes if node < result and node is not x]


def normalized(x: Node, dim: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that are normalised and their sizes, which must be known; no axis means all, as to torch."""
    value = value_of(x)
    assert value is not None
    require(that(value.ndim > 0, f"{x.name!r} has no axes that could be normalised"))
    given = dim if isinstance(dim, (list, tuple)) else [dim] if dim is not None else []
    axes = tuple(sorted(axis % value.ndim for axis in given)) or tuple(range(value.ndim))
    sizes = tuple(value.shape[axis] for axis in axes)
    known = all(isinstance(size, int) for size in sizes)
    require(that(known, f"the axes {list(axes)} of {x.name!r}, which are normalised, have no fixed size"))
    return axes, sizes


def fits(node: Node, axes: tuple[int, ...], x: Node) -> str | None:
    """Whether a weight, broadcast to `x`, has the sizes of the axes there, and no others."""
    given, value = value_of(node), value_of(x)
    assert value is not None
    first = min(axes) if given is None else value.ndim - given.ndim
    shape = tuple(value.shape[axis] if axis in axes else 1 for axis in range(first, value.ndim))
    fits = given is not None and first <= min(axes) and (tuple(given.shape), given.dtype) == (shape, value.dtype)
    return that(fits, f"{node.name!r} has not the sizes of the axes {list(axes)} and the dtype of {x.name!r}")


def lies_alike(result: Node, axes: tuple[int, ...]) -> bool:
    """Whether what `place_norm` puts in the place of `result` lies in memory as that does.

    Args:
        result: The node that the norm is to replace.
        axes: The axes, of which the fused call takes the last ones, and gives what is contiguous.
    """
    value = value_of(result)
    if value is None or value.is_contiguous():
        return value is not None
    return axes[-1] != value.ndim - 1 and layout_of(value) is not torch.contiguous_format


def place_norm(
    edit: Edit, result: Node, norm: Any, x: Node, axes: tuple[int, ...], weights: list[Node | None], eps: float
) -> None:
    """`result` becomes the norm of `x` over some axes, laid out as it was.

    Args:
        edit: The site's transaction.
        result: The node that the norm replaces.
        norm: The fused call, which normalises the last axes.
        x: What is normalised.
        axes: The axes.
        weights: The weights of the norm, broadcast to `x`; there are none for several axes that are not the last.
        eps: What is added to the variance.
    """
    value, laid = value_of(x), layout_of(value_of(result))
    assert value is not None
    shape = tuple(value.shape[axis] for axis in axes)
    order = [axis for axis in range(value.ndim) if axis not in axes] + list(axes)
    if order == sorted(order):
        edit.replace(result, norm, x, shape, *weights, eps)
        return
    vectors = [edit.insert(result, torch.flatten, weight) if weight is not None else None for weight in weights]
    normed = edit.insert(result, norm, edit.insert(result, torch.permute, x, order), shape, *vectors, eps)
    back = sorted(order, key=order.__getitem__)
    if laid is not torch.contiguous_format and axes == (1,):  # channels last, as they are then
        edit.replace(result, torch.permute, normed, back)
        return
    moved = edit.insert(result, torch.permute, normed, back)
    keywords = {} if laid is torch.contiguous_format else {"memory_format": laid}
    edit.replace(result, torch.ops.aten.contiguous.default, moved, **keywords)


def precise(nodes: list[Node], x: Node, where: str) -> str | None:
    """The model computes in its own precision or in float32, and gives back its own: `nodes` end in its result."""
    before, after = value_of(x), value_of(nodes[-1])
    assert before is not None
    between = {value.dtype for node in nodes if (value := value_of(node)) is not None}
    fits = after is not None and before.dtype == after.dtype and between <= {before.dtype, torch.float32}
    fits = fits and (before.dtype is not torch.float64 or len(between) == 1)
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in between))
    return that(fits, f"{where} goes through {kinds}, which the fused call does not")
