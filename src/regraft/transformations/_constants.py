"""What depends on weights and numbers alone is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from regraft.core.edit import Edit
from regraft.core.flow import draws, known
from regraft.core.mutation import is_own, writes
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.states import NodeState, Ref
from regraft.core.values import value_of
from regraft.core.vocabulary import CONV, LINEAR, TRANSPOSED_CONV, Weight, attribute, read
from regraft.core.weights import Derivation

_LAYERS = (LINEAR, CONV, TRANSPOSED_CONV)


def constants(owner: GraphModule, same: Mapping[Node, Node], limit: int) -> Iterator[Node]:
    """The values that depend on weights and numbers alone, and are read by something that does not.

    What is too large to be folded is among them, and so is what it reads.

    Args:
        owner: The graph module.
        same: Nodes that go because another node has their value, each with that node.
        limit: The most bytes that a folded constant may take.
    """
    found: set[Node] = set()
    for node in owner.graph.nodes:
        if _constant_step(node, owner) and found.issuperset(node.all_input_nodes):
            found.add(node)
    read: set[Node] = set()  # other than by what is computed once with it
    chosen: list[Node] = []
    for node in reversed(owner.graph.nodes):
        if node in same or (node in found and node not in read):
            continue
        if node not in found or _is_too_large(node, owner, limit):
            read.update(same.get(value, value) for value in node.all_input_nodes)
        if node in found and _is_computed(node):
            chosen.append(node)
    yield from reversed(chosen)


def _is_computed(node: Node) -> bool:
    return node.op != "get_attr" and value_of(node) is not None


def can_be_folded(node: Node, owner: GraphModule) -> bool:
    """Whether a node computes a constant whose size is known.

    Args:
        node: The node.
        owner: Its graph module.
    """
    return _is_computed(node) and piece(node, owner) is not None


def _is_too_large(node: Node, owner: GraphModule, limit: int) -> bool:
    """Whether a constant takes more than it may, and is not a layer's weight, computed from as much: by weight norm."""
    size = _bytes_of(node)
    if size <= limit or not _is_weight(node, owner):
        return size > limit
    nodes = piece(node, owner) or []
    sources = [_weight(each, owner).tensor for each in nodes if each.op == "get_attr"]
    views_alone = not any(is_own(each, owner) for each in nodes)
    return views_alone or size > sum(source.nbytes for source in sources)


def _bytes_of(node: Node) -> int:
    """How much memory the value of a node takes; none where it has no fixed size."""
    value = value_of(node)
    fixed = value is not None and all(isinstance(size, int) for size in value.shape)
    return value.numel() * value.element_size() if value is not None and fixed else 0


def piece(root: Node, owner: GraphModule) -> list[Node] | None:
    """The nodes that `root` is computed from, itself included, in order; None where some are not constant."""
    seen: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if not _constant_step(node, owner):
            return None
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return sorted(seen)


def fold_constant(match: Match, edit: Edit, facts: Facts, limit: int) -> str:
    """Replace the constant piece that ends in the match's node by a tensor."""
    (root,) = match.nodes
    value, nodes = value_of(root), piece(root, match.owner)
    assert value is not None
    assert nodes is not None
    weights = {node: _weight(node, match.owner) for node in nodes if node.op == "get_attr"}
    fixed, large = all(isinstance(size, int) for size in value.shape), _is_too_large(root, match.owner, limit)
    inside = set(nodes)
    # a weight that is trained here and elsewhere would become two that are trained apart
    require(
        that(fixed, f"the constant {root.name!r} has no fixed size"),
        that(not large, f"the constant {root.name!r} would take {_bytes_of(root)} bytes, more than {limit}"),
        facts.returned(root),
        *(facts.untouched(node) for node in nodes),
        *(facts.read_once(weight, inside) for weight in weights.values() if weight.tensor.requires_grad),
    )

    derivation = _evaluation(nodes, value)
    name = edit.free_name(f"{root.name}_constant")
    edit.put_weight(name, (derivation, list(weights.values())))
    new = edit.insert_weight(root, name)
    may_ask = value.is_floating_point() or value.is_complex()
    asks = may_ask and any(weight.tensor.requires_grad for weight in weights.values())
    if asks and not _is_weight(root, match.owner):
        new.meta["val"] = value
        # a parameter and its views ask for gradients even where none are recorded, and attention then takes its slow
        # way; a copy asks only where they are, as the value that was computed did
        new = edit.insert(root, torch.clone, new, memory_format=torch.preserve_format)
    new.meta["val"] = value
    edit.redirect(root, new)
    edit.erase_unread(nodes)
    return f"computed {root.name!r} once"


def _is_weight(value: Node, owner: GraphModule) -> bool:
    """Whether layers alone read a value, for their weight or bias, which may ask for gradients there."""
    calls = [read(user, owner) for user in value.users]
    return all(
        call is not None
        and call.operation in _LAYERS
        and any(argument is value for argument in (call["weight"], call["bias"]))
        for call in calls
    )


def constant_value(node: Node, owner: GraphModule, facts: Facts, limit: int) -> Tensor | None:
    """The tensor that a piece of a graph always computes: from numbers, and from buffers that no checkpoint replaces.

    Args:
        node: The last node of the piece.
        owner: Its graph module.
        facts: The safety oracle.
        limit: The most elements that it may have.
    """
    value, nodes = value_of(node), piece(node, owner)
    if nodes is None or (value is None and node.op != "get_attr"):
        return None
    weights = [_weight(node, owner) for node in nodes if node.op == "get_attr"]
    value = weights[0].tensor if value is None else value
    if not all(isinstance(size, int) for size in value.shape):
        return None
    fixed = all(_fixed(owner, weight) for weight in weights)
    if not fixed or value.numel() > limit or any(facts.untouched(one) for one in nodes):
        return None
    if node.op == "get_attr":
        return weights[0].tensor
    with torch.no_grad():
        return _evaluation(nodes, value).compute(*(weight.tensor for weight in weights))


def _fixed(owner: GraphModule, weight: Weight) -> bool:
    path, _, leaf = weight.name.rpartition(".")
    holder = owner.get_submodule(path)
    return leaf in holder._non_persistent_buffers_set and not weight.tensor.is_meta


def _evaluation(nodes: list[Node], value: Tensor) -> Evaluate:
    states = tuple((node.name, NodeState.of(node)) for node in nodes if node.op != "get_attr")
    names = tuple(node.name for node in nodes if node.op == "get_attr")
    return Evaluate(tuple(_bare(name, state) for name, state in states), names, tuple(value.shape), value.dtype)


@dataclass(frozen=True)
class Evaluate(Derivation):
    """Runs a piece of a graph on the weights that it reads.

    Args:
        steps: The names and the states of its nodes, in order.
        sources: The names under which the nodes read the weights.
        shape: The shape of the result.
        dtype: Its dtype.
    """

    steps: tuple[tuple[str, NodeState], ...]
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def outline(self, *sources: Tensor) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")  # the steps may make tensors on other devices

    def compute(self, *sources: Tensor) -> Tensor:
        values: dict[str, Any] = dict(zip(self.sources, sources, strict=True))

        def given(value: Any) -> Any:
            return values[value.name] if isinstance(value, Ref) else value

        result: Any = None
        for name, state in self.steps:
            args = map_aggregate(state.args, given)
            kwargs = map_aggregate(state.kwargs, given)
            function = getattr(args[0], state.target) if state.op == "call_method" else state.target
            result = values[name] = function(*(args[1:] if state.op == "call_method" else args), **kwargs)
        assert isinstance(result, Tensor)
        return result.detach().clone()  # it may be a view of a source


def _constant_step(node: Node, owner: GraphModule) -> bool:
    if node.op == "get_attr":
        return type(attribute(owner, str(node.target))) in (Tensor, torch.nn.Parameter)
    if node.op not in ("call_function", "call_method") or node.is_impure() or _is_left_behind(node, owner):
        return False
    return known(node) and not draws(node, owner) and not writes(node, owner)


def _is_left_behind(node: Node, owner: GraphModule) -> bool:
    """Whether a node is the copy of a parameter that `fold_constant` itself leaves."""
    if node.target is not torch.clone:
        return False
    values = [attribute(owner, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _weight(node: Node, owner: GraphModule) -> Weight:
    return Weight(str(node.target), attribute(owner, str(node.target)), node)


def _bare(name: str, state: NodeState) -> tuple[str, NodeState]:
    return name, NodeState(state.op, state.target, state.args, state.kwargs, None, {})
