"""From an `ExportedProgram` to a graph that reads its weights by name, in the place of taking them as inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_WEIGHTS = {InputKind.PARAMETER, InputKind.BUFFER}
_CONSTANTS = {InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ}
#: what export leaves in `meta` that would become stale, or repeats `val`
_DROPPED_META = ("tensor_meta", "torch_fn", "from_node", "unbacked_bindings", "custom")


def lift_weights(program: torch.export.ExportedProgram, rename: Callable[[str], str]) -> tuple[Graph, dict[str, Any]]:
    """The graph of a program with a `get_attr` in the place of every weight, and the constants it needs by name.

    Args:
        program: the exported program; it is not changed.
        rename: from the program's qualified names to those of the module tree.

    Raises:
        NotImplementedError: an input of a kind that has no form in a graph module, such as a token.
    """
    signature = program.graph_signature
    kinds = {spec.arg.name: spec for spec in signature.input_specs}
    graph = Graph()
    nodes: dict[Node, Any] = {}
    constants: dict[str, Any] = {}
    reads: dict[Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            if spec.kind in _WEIGHTS:
                reads[node] = rename(str(spec.target))
            elif spec.kind in _CONSTANTS:
                reads[node] = rename(str(spec.target))
                constants[reads[node]] = program.constants[str(spec.target)]
            elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
                assert not node.users  # export writes a constant into the calls that take it
            elif spec.kind is InputKind.USER_INPUT:
                nodes[node] = _copied(graph, node, nodes, rename)
            else:
                raise NotImplementedError(f"the program takes a {spec.kind.name.lower()} as input {node.name}")
            continue
        for used in node.all_input_nodes:
            if used in reads and used not in nodes:  # one read for each weight, just before its first use
                nodes[used] = _read(graph, reads[used])
                nodes[used].meta = {"val": used.meta.get("val")}
        nodes[node] = _copied(graph, node, nodes, rename)
    _write_back(program, graph, nodes, reads)
    return graph, constants


def _read(graph: Graph, path: str) -> Node:
    # `Graph.get_attr` warns where the graph has no owner yet, and knows no weight that it could not find
    return graph.create_node("get_attr", path)


def _copied(graph: Graph, node: Node, nodes: dict[Node, Any], rename: Callable[[str], str]) -> Node:
    copied = graph.node_copy(node, lambda used: nodes[used])
    copied.meta = {key: value for key, value in node.meta.items() if key not in _DROPPED_META}
    stack = copied.meta.get("nn_module_stack")
    if stack:
        copied.meta["nn_module_stack"] = {
            key: (rename(str(path)), kind) for key, (path, kind, *_) in stack.items() if _is_call(str(path), rename)
        }
    return copied


def _is_call(path: str, rename: Callable[[str], str]) -> bool:
    """Whether a stack entry is a call of a module; export marks nodes of its own making with an entry that is none."""
    return not path.startswith("_empty_nn_module_stack") and rename(path) is not None


def _write_back(
    program: torch.export.ExportedProgram, graph: Graph, nodes: dict[Node, Any], reads: dict[Node, str]
) -> None:
    """Buffers and inputs that a program changes come as extra outputs before its own: write them, return the rest."""
    signature = program.graph_signature
    mutated = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    mutated.update(getattr(signature, "parameters_to_mutate", {}))
    if not mutated:
        return
    output = graph.output_node()
    placed = {str(spec.arg.name): spec for spec in signature.input_specs}
    by_target = {str(spec.target): name for name, spec in placed.items() if spec.target is not None}
    old = {node.name: node for node in program.graph.nodes}
    kept = []
    for value in output.args[0]:  # type: ignore[union-attr]
        name = getattr(value, "name", None)
        target = mutated.get(name) if name is not None else None
        if target is None:
            kept.append(value)
            continue
        holder = old[by_target.get(target, target)]
        if holder not in nodes:
            with graph.inserting_before(output):
                nodes[holder] = _read(graph, reads[holder])
        with graph.inserting_before(output):
            graph.call_function(torch.ops.aten.copy_.default, (nodes[holder], value))
    output.args = (map_arg(tuple(kept), lambda node: node),)
