"""A `torch.fx.Graph` as data: copied and saved node by node, never by tracing its code again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_aggregate

from regraft.core import fx_private
from regraft.core.portable import PortableCallable, portable

_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class NodeReference:
    """A node inside the arguments of another, by its position in the graph."""

    position: int


@dataclass
class NodeRecord:
    """One node, with references in the place of nodes."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]


@dataclass
class GraphRecord:
    """A whole graph, in a form that pickle saves."""

    nodes: list[NodeRecord]
    codegen: CodeGen
    extras: dict[str, Any]
    names: dict[str, Any]


def copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of a graph with the same names and order, and the new node of each old one.

    The `meta` of the new nodes is left empty: whoever copies decides what in it is shared.

    Args:
        graph: the graph to copy.
    """
    copied = Graph()
    nodes: dict[Node, Node] = {}
    for node in graph.nodes:
        args, kwargs = _mapped((node.args, node.kwargs), lambda old: nodes[old])
        nodes[node] = fx_private.append_node(copied, node.op, node.target, args, kwargs, node.name, node.type)
    copied.set_codegen(fx_private.copy_codegen(fx_private.codegen_of(graph)))
    fx_private.set_graph_extras(copied, fx_private.graph_extras(graph))
    fx_private.set_names_in_use(copied, fx_private.names_in_use(graph))
    return copied, nodes


def record_graph(graph: Graph) -> GraphRecord:
    """A graph as data that pickle saves.

    Args:
        graph: the graph to save.

    Raises:
        ValueError: a node calls a function that cannot be imported by name; the message names the node.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    records = []
    for node in graph.nodes:
        try:
            target = PortableCallable(node.target) if callable(node.target) else node.target
            args, kwargs = _portable_arguments(node, positions)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the node {node.name} ({node.op}) cannot be saved: {error}") from error
        meta = {key: item for key, value in node.meta.items() for item in kept(value)}
        records.append(NodeRecord(node.name, node.op, target, args, kwargs, _first(kept(node.type)), meta))
    extras = {key: _first(kept(value)) for key, value in fx_private.graph_extras(graph).items()}
    extras["_co_fields"] = extras["_co_fields"] or {}
    return GraphRecord(records, fx_private.codegen_of(graph), extras, fx_private.names_in_use(graph))


def build_graph(record: GraphRecord) -> Graph:
    """The graph that `record_graph` recorded."""
    graph = Graph()
    nodes: list[Node] = []
    for entry in record.nodes:
        args, kwargs = resolved(entry.args, nodes), resolved(entry.kwargs, nodes)
        node = fx_private.append_node(graph, entry.op, entry.target, args, kwargs, entry.name, entry.type)
        node.meta = entry.meta
        nodes.append(node)
    graph.set_codegen(record.codegen)
    fx_private.set_graph_extras(graph, record.extras)
    fx_private.set_names_in_use(graph, record.names)
    return graph


def shared_when_copied(values: Iterable[Any]) -> dict[int, Any]:
    """The fake tensors and symbols in some values, as a memo that makes `copy.deepcopy` share rather than copy them."""
    memo: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            memo[id(value)] = value
        elif isinstance(value, dict):
            for part in value.values():
                visit(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                visit(part)

    for value in values:
        visit(value)
    return memo


def _mapped(arguments: tuple[Any, Any], replace: Callable[[Node], Any]) -> tuple[Any, Any]:
    def one(value: Any) -> Any:
        return replace(value) if isinstance(value, Node) else value

    args, kwargs = arguments
    return map_aggregate(args, one), dict(map_aggregate(kwargs, one))


def _portable_arguments(node: Node, positions: dict[Node, int]) -> tuple[Any, Any]:
    args, kwargs = _mapped((node.args, node.kwargs), lambda used: NodeReference(positions[used]))
    return plain(args), plain(kwargs)


def plain(value: Any) -> Any:
    """Arguments without fx's immutable containers, which pickle slowly, and with slices taken apart."""
    if isinstance(value, slice):
        return _Slice(*(plain(part) for part in (value.start, value.stop, value.step)))
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(plain(part) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(plain(part) for part in value))
    if callable(value) and not isinstance(value, torch.Tensor):
        return PortableCallable(value)
    return portable(value)


@dataclass(frozen=True)
class _Slice:
    """A slice; before Python 3.12 one with nodes in it does not pickle."""

    start: Any
    stop: Any
    step: Any


def resolved(value: Any, nodes: list[Node]) -> Any:
    """What `plain` made of arguments, with the nodes in the place of references, and slices again."""
    if isinstance(value, NodeReference):
        return nodes[value.position]
    if isinstance(value, _Slice):
        return slice(*(resolved(part, nodes) for part in (value.start, value.stop, value.step)))
    if isinstance(value, list):
        return [resolved(part, nodes) for part in value]
    if isinstance(value, dict):
        return {key: resolved(part, nodes) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [resolved(part, nodes) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def kept(value: Any) -> tuple[Any, ...]:
    """The value in a form that pickle saves, or nothing where there is none: meta is advice, weights are not in it."""
    if isinstance(value, _PLAIN):
        return (value,)
    try:
        candidate = portable(value)
        pickle.dumps(candidate)
    except Exception:  # what an unknown object raises when pickled is not ours to foresee
        return ()
    return (candidate,)


def _first(values: tuple[Any, ...]) -> Any:
    return values[0] if values else None
