"""Whether indices are within what they index, and each row of attention sees a key: other runtimes do not ask.

Where an index is beyond, torch raises. OpenVINO gives zeros for a token that an embedding does not have, ONNX Runtime
the last one for a token of -1. A row that sees no key, as padding in front of a text, is zero in torch. OpenVINO gives
NaN, which goes on into all others, and ONNX Runtime the mean of what it does not see.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from regraft.core.mutation import writes

aten = torch.ops.aten

Bounds = Iterator[tuple[Node, Any, Any]]
"""Indices, the least that each may be, and what it has to be less than: numbers, or nodes that give them."""


class Within(nn.Module):
    """A module that returns one more tensor than another: whether indices and masks were such as runtimes agree on.

    Args:
        module: The module, which takes tensors, and returns tensors in a tuple.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = False
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results, and true: in the exported program, `ask_within` lets it say what it is to say."""
        return (*self.module(*inputs), torch.ones((), dtype=torch.bool))


def ask_within(program: ExportedProgram) -> None:
    """Let the program of a `Within` say whether indices are within what they index, and each row of masks sees a key.

    Those are asked that are made of inputs or of their sizes; all others were right in the example.

    Args:
        program: The program, which is changed.
    """
    graph = program.graph
    given = set(program.graph_signature.user_inputs)
    varying: set[Node] = set()
    made: list[Node] = []
    answers: list[Node] = []
    masks: set[Node] = set()
    for node in list(graph.nodes):
        if node.name in given or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
            if writes(node, program.graph_module):  # be it through a view: whatever was made before may hold it now
                varying.update(made)
                made.clear()
                masks.clear()
        made.append(node)
        if node in varying and node.target in _BOUNDS:
            with graph.inserting_before(node):
                bounds = _BOUNDS[node.target](graph, *node.args)
                answers += [_are_within(graph, *each) for each in bounds if each[0] in varying]
        mask = _mask_of(node)
        if mask in varying and mask not in masks:  # the same one in many layers
            masks.add(mask)
            with graph.inserting_before(node):
                answers.append(_each_sees(graph, mask))
    if answers:
        output = graph.output_node()
        said: Node = output.args[0][-1]
        output.prepend(said)
        with graph.inserting_before(said):
            said.target, said.args, said.kwargs = aten.all.default, (_call(graph, aten.stack.default, answers),), {}
    program.graph_module.recompile()


def _are_within(graph: Graph, indices: Node, low: Any, size: Any) -> Node:
    enough, few = _call(graph, aten.ge.Scalar, indices, low), _call(graph, aten.lt.Scalar, indices, size)
    return _call(graph, aten.all.default, _call(graph, aten.logical_and.default, enough, few))


def _mask_of(node: Node) -> Any:
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _each_sees(graph: Graph, mask: Node) -> Node:
    seen = mask if mask.meta["val"].dtype is torch.bool else _call(graph, aten.gt.Scalar, mask, -math.inf)
    return _call(graph, aten.all.default, _call(graph, aten.any.dim, seen, -1))


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
    return node


def _size(graph: Graph, base: Node, axis: int | None) -> Any:
    """The size of an axis, or of all together, as a number or the node that gives it."""
    value = base.meta["val"]
    size = value.numel() if axis is None or not value.ndim else value.shape[axis]
    if isinstance(size, int):
        return size
    return _call(graph, aten.sym_numel.default, base) if axis is None else _call(graph, aten.sym_size.int, base, axis)


def _negative(graph: Graph, size: Any) -> Any:
    return -size if isinstance(size, int) else _call(graph, operator.neg, size)


def _of_rows(graph: Graph, weight: Node, indices: Node, *_: Any) -> Bounds:
    yield indices, 0, _size(graph, weight, 0)


def _of_axis(graph: Graph, base: Node, axis: int, index: Node, *_: Any) -> Bounds:
    yield index, 0, _size(graph, base, axis)


def _of_axis_if_any(graph: Graph, base: Node, index: Node, axis: int | None = None) -> Bounds:
    yield index, 0, _size(graph, base, axis)


def _of_each_axis(graph: Graph, base: Node, indices: Sequence[Node | None], *_: Any) -> Bounds:
    for axis, index in enumerate(indices):
        if index is not None and index.meta["val"].dtype not in (torch.bool, torch.uint8):  # which are masks
            size = _size(graph, base, axis)
            yield index, _negative(graph, size), size


def _of_elements(graph: Graph, base: Node, index: Node, *_: Any) -> Bounds:
    size = _size(graph, base, None)
    yield index, _negative(graph, size), size


def _of_classes(graph: Graph, index: Node, classes: int = -1) -> Bounds:
    del graph
    yield index, 0, classes


_BOUNDS: dict[Any, Callable[..., Bounds]] = {
    **dict.fromkeys([aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx], _of_rows),
    **dict.fromkeys([aten.gather.default, aten.index_select.default, aten.index_reduce.default], _of_axis),
    **dict.fromkeys([aten.index_add.default, aten.index_add_.default], _of_axis),
    **dict.fromkeys([aten.index_copy.default, aten.index_copy_.default], _of_axis),
    **dict.fromkeys([aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value], _of_axis),
    **dict.fromkeys([aten.scatter_add.default, aten.scatter_add_.default], _of_axis),
    **dict.fromkeys([aten.scatter_reduce.two, aten.scatter_reduce_.two], _of_axis),
    aten.take_along_dim.default: _of_axis_if_any,
    **dict.fromkeys([aten.index.Tensor, aten.index_put.default, aten.index_put_.default], _of_each_axis),
    **dict.fromkeys([aten.take.default, aten.put.default, aten.put_.default], _of_elements),
    aten.one_hot.default: _of_classes,
}
