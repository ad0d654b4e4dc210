"""What the value of a single node is: a tensor, a size."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_SHAPE_READS = {"size", "dim", "ndimension", "numel", "__len__", "len", "sym_size.int", "sym_numel.default"}
MAKERS = {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
_ARITHMETIC = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.neg,
}
_LIKE_ANOTHER = {"reshape_as", "view_as", "expand_as", "type_as"}
_LIKE_ANOTHER |= {f"{name}.default" for name in _LIKE_ANOTHER}


JOINING = frozenset({"cat", "concat", "concatenate"})
"""What joins tensors along an axis, as `called_name` has it."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By how many axes an image has."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers.

    Args:
        value: The containers.
    """
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def layout_of(tensor: Tensor | None) -> torch.memory_format:
    """Channels last where a tensor is so and not also contiguous; contiguous for all others, and where unknown."""
    layout = CHANNELS_LAST.get(tensor.ndim if tensor is not None else 0)
    if tensor is None or layout is None or tensor.is_contiguous():
        return torch.contiguous_format
    return layout if tensor.is_contiguous(memory_format=layout) else torch.contiguous_format


def reads_shape_only(node: Node, value: Node | None = None) -> bool:
    """Whether `node` asks a tensor (`value`, or any that it reads) for its shape, dtype or device, and nothing else."""
    name = target_name(node)
    if node.op not in ("call_method", "call_function"):
        return False
    if name in _LIKE_ANOTHER:
        others = [*node.args[1:], node.kwargs.get("other")]
        return value is not None and value in others and (not node.args or node.args[0] is not value)
    if node.target is getattr:
        return node.args[1] in ("shape", "dtype", "device", "ndim")
    return name in _SHAPE_READS or name in MAKERS


def value_of(node: Any) -> Tensor | None:
    """The fake tensor that stands for the result of `node`, where capture has left one."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def same_shape(left: Any, right: Any) -> bool:
    """Whether two shapes are the same for every size that symbols may stand for."""
    return len(left) == len(right) and all(_same_size(a, b) for a, b in zip(left, right, strict=True))


def varying_axes(value: Any) -> list[int]:
    """The axes of a fake tensor whose size is not one number: what a layer has fixed may be symbolic, of no symbols."""
    sizes = map(_expression, value.shape) if isinstance(value, Tensor) else ()
    return [axis for axis, size in enumerate(sizes) if getattr(size, "free_symbols", ())]


def _same_size(left: Any, right: Any) -> bool:
    # comparing symbolic sizes would tie them together; their expressions tell without
    return bool(_expression(left) == _expression(right))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def made_of_sizes(graph: Graph) -> set[Node]:
    """The values that are sizes, or arithmetic on sizes alone. One pass; for graphs without fake values."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.target is operator.getitem:
            sized = node.args[0] in found
        elif node.target in _ARITHMETIC or node.target in (int, float):
            sized = bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        else:
            sized = reads_shape_only(node) and target_name(node) not in MAKERS
        if sized:
            found.add(node)
    return found


def target_name(node: Node) -> str:
    """The name of what a node calls."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def called_name(node: Node) -> str:
    """The name of the function or method that a node calls, without its overload; empty for other nodes."""
    return target_name(node).partition(".")[0] if node.op in ("call_method", "call_function") else ""
