"""The nodes of one call of a layer become one `call_module` node, with the layer itself in place.

Export says for every node in which calls of which modules it was made. The nodes of one call of a leaf form a region;
where it has one tensor in and one tensor out, calling the layer on the first gives the second, whatever is inside.
So no table of operators is needed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from regraft.capture.module_tree import attribute, first_names, is_leaf
from regraft.capture.torch_private import made_by_hooks

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def collapse(graph: Graph, model: nn.Module, but: Set[nn.Module]) -> None:
    """Turn the region of every call of a leaf of a model into one `call_module` node, in place.

    A region with several inputs or outputs, and one that something else runs in the middle of, stays as it is.

    Args:
        graph: a graph of ATen calls, with `meta["nn_module_stack"]`.
        model: the model that it was exported from.
        but: layers that the graph is not to call.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = first_names(model)
    order = {node: position for position, node in enumerate(graph.nodes)}
    listed = list(graph.nodes)
    for path, region in _regions(graph, modules, but).items():
        module = modules[path[-1]]
        source, result = _ends(module, region, _foreign_reads(model, module, region))
        if source is None or result is None or not _unbroken(region, listed, order):
            continue
        _replace(graph, region, result, source, names[id(module)])


def _regions(graph: Graph, modules: Mapping[str, nn.Module], but: Set[nn.Module]) -> dict[tuple[str, ...], list[Node]]:
    """The nodes by the call of a leaf that they were made in: its keys on the stack, and the leaf's name last."""
    regions: dict[tuple[str, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        keys: list[str] = []
        for key, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
            keys.append(key)
            # not the model itself, which no graph can call, nor what a graph computes as well
            layer = modules.get(path) if path else None
            if layer is not None and layer not in but and is_leaf(layer) and not _weights_alone_are_hooked(layer):
                regions.setdefault((*keys, path), []).append(node)
                break
    return regions


def _weights_alone_are_hooked(module: nn.Module) -> bool:
    made = made_by_hooks(module)
    return bool(made) and not module._forward_hooks and len(module._forward_pre_hooks) == len(made)


def _foreign_reads(model: nn.Module, module: nn.Module, region: list[Node]) -> set[Node]:
    """The `get_attr` nodes in front of a region that read what is not the layer's: the model calls it on a weight."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *vars(module).values())}
    reads = {used for node in region for used in node.all_input_nodes if used.op == "get_attr"}
    return {
        read for read in reads if (tensor := attribute(model, str(read.target))) is not None and id(tensor) not in own
    }


def _ends(module: nn.Module, region: list[Node], foreign: set[Node]) -> tuple[Node | None, Node | None]:
    """The one tensor that goes into a region and the one that comes out; nothing where the call is not that plain."""
    inside = set(region)
    sources = {
        used for node in region for used in node.all_input_nodes if used not in inside and _is_value(used)
    } | foreign
    results = [node for node in region if any(user not in inside for user in node.users)]
    if len(sources) != 1 or len(results) != 1 or not isinstance(results[0].meta.get("val"), torch.Tensor):
        return None, None
    source = sources.pop()
    if not isinstance(source.meta.get("val"), torch.Tensor) or not _takes_one_argument(module, region):
        return None, None  # where export has put the call into a graph of its own, what comes out of that is a tuple
    return source, results[0]


def _is_value(node: Node) -> bool:
    """Whether a node brings something into a region that the layer does not know by itself.

    It knows its weights, and the sizes, which it reads off its input.
    """
    return node.op != "get_attr" and not isinstance(node.meta.get("val"), (torch.SymInt, int))


def _takes_one_argument(module: nn.Module, region: list[Node]) -> bool:
    if getattr(module, "return_indices", False):
        return False
    if isinstance(module, _TRANSPOSED):
        return _padded_as_usual(module, region)
    return len(inspect.signature(type(module).forward).parameters) == 2


def _padded_as_usual(module: Any, region: list[Node]) -> bool:
    """A transposed convolution may be called with an output size; then its padding is not the layer's own."""
    calls = [node for node in region if "conv_transpose" in str(node.target)]
    if len(calls) != 1 or module.padding_mode != "zeros":
        return False
    given = calls[0].args[5] if len(calls[0].args) > 5 else calls[0].kwargs.get("output_padding", 0)
    sizes = list(given) if isinstance(given, (list, tuple)) else [given] * len(module.output_padding)
    return sizes == list(module.output_padding)


def _unbroken(region: list[Node], listed: list[Node], order: Mapping[Node, int]) -> bool:
    """Whether nothing that could matter runs between the first and the last node of a region."""
    inside = set(region)
    between = listed[order[region[0]] : order[region[-1]] + 1]
    return all(node in inside or not _is_value(node) for node in between)


def _replace(graph: Graph, region: list[Node], result: Node, source: Node, name: str) -> None:
    with graph.inserting_after(region[-1]):
        call = graph.call_module(name, (source,))
    call.meta = dict(result.meta)
    result.replace_all_uses_with(call)
    for node in reversed(region):
        graph.erase_node(node)
