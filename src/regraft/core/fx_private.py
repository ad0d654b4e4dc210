"""The private corners of `torch.fx` that regraft stands on, all in one place.

`tests/capture/test_private_apis.py` fails when one of them moves, so that a new torch is met here and nowhere else.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen

#: what `recompile` derives from the graph: never copied, never saved
DERIVED_ATTRIBUTES = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec"})


def codegen_of(graph: Graph) -> CodeGen:
    """The object that writes the Python source of a graph."""
    codegen: CodeGen = graph._codegen
    return codegen


def graph_extras(graph: Graph) -> dict[str, Any]:
    """What a graph carries beside its nodes and its code generator: the tracer that made it, and code fields."""
    return {
        "_tracer_cls": getattr(graph, "_tracer_cls", None),
        "_tracer_extras": getattr(graph, "_tracer_extras", None),
        "_co_fields": dict(getattr(graph, "_co_fields", {})),
    }


def set_graph_extras(graph: Graph, extras: dict[str, Any]) -> None:
    """Put back what `graph_extras` read."""
    for name, value in extras.items():
        setattr(graph, name, value)


def names_in_use(graph: Graph) -> dict[str, Any]:
    """The counters from which fx makes the next free name; a copy that lacks them names its next node differently."""
    namespace = graph._graph_namespace
    return {"used": sorted(namespace._used_names), "count": dict(namespace._base_count)}


def set_names_in_use(graph: Graph, names: dict[str, Any]) -> None:
    """Put back what `names_in_use` read."""
    namespace = graph._graph_namespace
    namespace._used_names = set(names["used"])
    namespace._base_count = dict(names["count"])


def release_name(graph: Graph, name: str) -> None:
    """Let `name` be given again, as if its node had never been; fx itself keeps the names of erased nodes."""
    namespace = graph._graph_namespace
    namespace._used_names.discard(name)
    base, _, number = name.rpartition("_")
    if number.isdigit():
        namespace._base_count.pop(base, None)  # it is counted anew, from the names in use
    namespace._base_count.pop(name, None)


def append_node(
    graph: Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, type_expr: Any
) -> Node:
    """Create a node at the end of a graph under exactly this name.

    `Graph.create_node` takes the name as a wish only: it would turn a second `add_1` into `add_2`.
    """
    node = graph.create_node(op, target, args, kwargs, name=name, type_expr=type_expr)
    if node.name != name:
        node.name = name
        graph._graph_namespace._rename_object(node, name)
    return node


def rewrite_node(node: Node, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make `node` compute something else.

    The four public setters would each search and change the graph's index of nodes, which goes by `op` and `target`.
    """
    if node.op != op or node.target != target:
        index = node.graph._find_nodes_lookup_table
        index.remove(node)
        object.__setattr__(node, "op", op)
        object.__setattr__(node, "target", target)
        index.insert(node)
    node._update_args_kwargs(args, kwargs)


def set_meta(node: Node, meta: dict[str, Any]) -> None:
    """`node.meta = meta`, without a search of the graph's index of nodes, which does not go by it."""
    object.__setattr__(node, "meta", meta)


def is_erased(node: Node) -> bool:
    """Whether a node has been taken out of its graph."""
    return bool(node._erased)


def copy_codegen(codegen: CodeGen) -> CodeGen:
    """A code generator for another graph; generators hold settings, so a shallow copy is a whole one."""
    return copy.copy(codegen)


def declared_class(module: torch.fx.GraphModule) -> type[torch.fx.GraphModule]:
    """The class as somebody wrote it; fx gives each instance a class of its own that derives from it."""
    for cls in type(module).__mro__:
        if cls.__qualname__.rsplit(".", 1)[-1] != "GraphModuleImpl":
            return cls
    raise TypeError(f"{type(module).__name__} derives from no class but fx's own")


def own_class(module: torch.fx.GraphModule) -> type | None:
    """The class that fx made for this one instance, or None where there is none."""
    cls = type(module)
    return cls if cls.__qualname__.rsplit(".", 1)[-1] == "GraphModuleImpl" else None


def is_export_guard(error: Exception | None, model: Any) -> bool:
    """Whether an exception is that of a program of `torch.export` that is called with sizes that it does not take."""
    guarded = isinstance(error, AssertionError) and isinstance(model, torch.fx.GraphModule)
    return guarded and hasattr(model, "_guards_fn") and str(error).startswith("Guard failed: ")
