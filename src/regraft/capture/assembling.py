"""An exported program becomes a graph module in module-level form."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from regraft.capture import torch_private
from regraft.capture.calling import Calling
from regraft.capture.cleaning import clean
from regraft.capture.codegen import CallingCodeGen, direct
from regraft.capture.constraints import constraints_of
from regraft.capture.decisions import Asked, decisions_of
from regraft.capture.layouts import Layouts
from regraft.capture.lifting import lift_weights
from regraft.capture.module_tree import graft_tree, place_tensor
from regraft.capture.regions import collapse
from regraft.capture.signature import Interface
from regraft.capture.spelling import spell
from regraft.core.graph_module import GraphModule, adopt

_NATIVE = (tuple, list, dict)


def assemble(
    model: nn.Module,
    program: torch.export.ExportedProgram,
    interface: Interface,
    out_spec: Any,
    *,
    automatic: bool = False,
    rename: Callable[[str], str] = str,
    asked: Sequence[Asked] = (),
    otherwise: Set[nn.Module] = frozenset(),
    layouts: Layouts | None = None,
) -> GraphModule:
    """The graph module of an exported program.

    Args:
        model: the model; its layers, parameters and buffers are put into the graph module.
        program: what it was exported to.
        interface: how the graph is to be called.
        out_spec: the structure of the result.
        automatic: whether every axis was asked to vary.
        rename: from the program's qualified names to the model's.
        asked: what was read of the inputs. What each was read of is a result of the program, after those of the model.
        otherwise: layers of the model that were called otherwise than they are now, so that no graph can call them.
        layouts: how the inputs have to be laid in memory; None where the model does not ask.

    Raises:
        NotImplementedError: the program has an input that a graph module has no form for, or decides by something else
            than the values of its inputs.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    decisions = decisions_of(program, asked, lambda path: tensors[rename(path)])
    graph, constants = lift_weights(program, rename)
    if asked:
        _return_first(graph, out_spec.num_leaves)
    clean(graph, model)
    _read_first_names(graph, tensors)
    collapse(graph, model, otherwise)
    spell(graph)
    graph = _renamed(graph)
    gm = GraphModule(nn.Module(), Graph(), type(model).__name__)
    graft_tree(model, gm)
    for path, value in constants.items():
        place_tensor(gm, path, value)
    _take_subgraphs(graph, program, gm)
    inputs = graph.find_nodes(op="placeholder")
    constraints = constraints_of(
        interface.labels,
        interface.sources,
        [node.meta["val"] for node in inputs],
        program.range_constraints,
        torch_private.guards_of(program),
        automatic,
    )
    out_spec = _shape_output(graph, out_spec)
    calling = Calling(interface.arguments, interface.positional, constraints, out_spec, decisions, layouts)
    graph.set_codegen(CallingCodeGen(calling, [str(node.target) for node in inputs]))
    graph.on_generate_code(lambda _: direct)
    graph.lint()
    gm.graph = graph
    return adopt(gm)


def _return_first(graph: Graph, count: int) -> None:
    """Return so many of the results, and nothing that stands behind them."""
    output = graph.output_node()
    output.args = (output.args[0][:count],)  # type: ignore[index]


def _renamed(graph: Graph) -> Graph:
    """The graph without reads that nothing uses, its nodes numbered as a trace would have numbered them."""
    fresh = Graph()
    nodes: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and not node.users:
            continue
        args, kwargs = map_arg(node.args, nodes.__getitem__), map_arg(node.kwargs, nodes.__getitem__)
        nodes[node] = fresh.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
        nodes[node].meta = node.meta
    return fresh


def _read_first_names(graph: Graph, tensors: dict[str, torch.Tensor]) -> None:
    """A tied weight is read under its first name, so that one weight has one name in the graph."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    for node in graph.find_nodes(op="get_attr"):
        if node.target in tensors:
            node.target = first[id(tensors[node.target])]


def _take_subgraphs(graph: Graph, program: torch.export.ExportedProgram, gm: nn.Module) -> None:
    """The branches of `torch.cond` and the like are graph modules that the program holds."""
    for node in graph.find_nodes(op="get_attr"):
        held = getattr(program.graph_module, str(node.target), None)
        if isinstance(held, nn.Module):
            gm.add_module(str(node.target), held)


def _shape_output(graph: Graph, spec: Any) -> Any:
    """Give the output node the form of the result where that is made of tuples, lists and dictionaries alone.

    Otherwise the output stays flat, and the structure that is returned is for the caller to build.
    """
    output = graph.output_node()
    if not _is_native(spec):
        return spec
    output.args = (_nest(spec, iter(output.args[0])),)  # type: ignore[arg-type]
    return None


def _is_native(spec: Any) -> bool:
    if torch_private.is_leaf(spec):
        return True
    if torch_private.spec_type(spec) not in _NATIVE:
        return False
    if torch_private.spec_type(spec) is dict and not all(type(key) is str for key in torch_private.spec_context(spec)):
        return False
    return all(_is_native(child) for child in torch_private.spec_children(spec))


def _nest(spec: Any, leaves: Any) -> Any:
    if torch_private.is_leaf(spec):
        return next(leaves)
    parts = [_nest(child, leaves) for child in torch_private.spec_children(spec)]
    kind: Callable[..., Any] = torch_private.spec_type(spec)
    return dict(zip(torch_private.spec_context(spec), parts)) if kind is dict else kind(parts)
