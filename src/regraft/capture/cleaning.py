"""What export leaves in a graph and no call needs: dropout of an eval model, casts to the type at hand, `x[:]`.

A node goes only where its input can take its place for every reader: the same values in the same memory.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from regraft.capture.module_tree import is_leaf

aten = torch.ops.aten
_DROPOUTS = {
    aten.dropout.default,
    aten.alpha_dropout.default,
    aten.feature_dropout.default,
    aten.feature_alpha_dropout.default,
}
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout}
#: results whose type does not follow from that of the inputs
_OWN_TYPE = {"embedding", "linear", "conv1d", "conv2d", "conv3d", "layer_norm", "group_norm", "batch_norm", "rms_norm"}
_BOOLEAN = torch.bool


def clean(graph: Graph, model: nn.Module | None) -> None:
    """Remove from a graph what changes nothing, in place.

    Args:
        graph: a graph of ATen calls, with `meta["val"]`.
        model: the model; where a layer of it has hooks, its dropout stays.
    """
    open_types = _types_of_inputs(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif _is_identity(node, open_types) and not _hooked(node, model):
            source = node.args[0]
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_identity(node: Node, open_types: set[Node]) -> bool:
    if not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target in _DROPOUTS:
        return node.args[2] is False
    if node.target in _CASTS:
        return _is_idle_cast(node, open_types)
    if node.target is aten.slice.Tensor:
        return _is_whole_slice(node)
    if node.target is aten.detach_.default:  # the second half of how `torch.tensor(...)` in a forward is exported
        return node.args[0].target is aten.lift_fresh_copy.default
    return node.target is aten.alias.default


def _is_idle_cast(node: Node, open_types: set[Node]) -> bool:
    """A cast to what the value is already; not where its type is that of an input, which a call may give another."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or source in open_types:
        return False
    if _argument(node, "copy", False) or _argument(node, "memory_format", None) is not None:
        return False
    return bool(before.dtype == after.dtype and before.device == after.device and before.layout == after.layout)


def _argument(node: Node, name: str, default: Any) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default


def _is_whole_slice(node: Node) -> bool:
    start = node.args[2] if len(node.args) > 2 else None
    end = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return bool(start in (0, None) and end in (None, sys.maxsize) and step == 1 and not node.kwargs)


def _types_of_inputs(graph: Graph) -> set[Node]:
    """The nodes whose dtype would follow that of an input: a call may give a float mask where an int was captured."""
    open_types: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (
            node.op == "call_function" and not _fixes_type(node) and not open_types.isdisjoint(node.all_input_nodes)
        ):
            open_types.add(node)
    return open_types


def _fixes_type(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) and not isinstance(value, (list, tuple)):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target in _CASTS or node.kwargs.get("dtype") is not None:
            return True
        if node.target._schema.name.split("::")[1] in _OWN_TYPE:
            return True
        sources = [used.meta.get("val") for used in node.all_input_nodes]
        made_here = isinstance(value, torch.Tensor) and value.dtype == _BOOLEAN
        return made_here and all(isinstance(s, torch.Tensor) and s.dtype != _BOOLEAN for s in sources)
    return False


def _hooked(node: Node, model: nn.Module | None) -> bool:
    stack = node.meta.get("nn_module_stack")
    if model is None or not stack:
        return False
    try:
        module = model.get_submodule(next(reversed(stack.values()))[0])
    except AttributeError:
        return False
    return is_leaf(module) and bool(module._forward_hooks or module._forward_pre_hooks)
