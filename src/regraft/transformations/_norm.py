"""What must hold of a norm that is written out before it is fused."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from regraft.core.query import require, that
from regraft.core.tree import TreeMatch
from regraft.core.values import value_of
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


def normalized(x: Node, dim: Any) -> tuple[int, ...]:
    """The sizes of the axes that are normalised, which must be the last ones, and of known size."""
    value = value_of(x)
    assert value is not None
    axes = sorted(axis % value.ndim for axis in (dim if isinstance(dim, (list, tuple)) else [dim]))
    sizes = tuple(value.shape[axis] for axis in axes)
    last = axes == list(range(value.ndim - len(axes), value.ndim))
    require(that(last, f"{x.name!r} is normalised over axes {axes}, which are not its last"))
    require(that(all(isinstance(size, int) for size in sizes), f"the last axes of {x.name!r} have no fixed size"))
    return sizes


def fits(node: Node, shape: tuple[int, ...], x: Node) -> str | None:
    given, value = value_of(node), value_of(x)
    fits = given is not None and value is not None and (tuple(given.shape), given.dtype) == (shape, value.dtype)
    return that(fits, f"{node.name!r} is not of the shape {shape} and the dtype of {x.name!r}")


def precise(nodes: list[Node], x: Node, where: str) -> str | None:
    """The model computes in its own precision or in float32, and gives back its own: `nodes` end in its result."""
    before, after = value_of(x), value_of(nodes[-1])
    assert before is not None
    between = {value.dtype for node in nodes if (value := value_of(node)) is not None}
    fits = after is not None and before.dtype == after.dtype and between <= {before.dtype, torch.float32}
    fits = fits and (before.dtype is not torch.float64 or len(between) == 1)
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in between))
    return that(fits, f"{where} goes through {kinds}, which the fused call does not")
