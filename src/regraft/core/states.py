"""The state of nodes and of module slots, by name: what the journal keeps before and after every change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from regraft.core.fx_private import is_erased
from regraft.core.graph_record import kept, plain, resolved
from regraft.core.modules import module_at
from regraft.core.portable import PortableCallable

MARKS = "regraft.marks"
"""The key of `node.meta` under which the signatures of the transformations that made a node stand."""

Key = tuple[str, str]
"""The path of a graph module or of a module, and a name in it."""

TABLES = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, slots=True)
class Ref:
    """A node, by name."""

    name: str


@lru_cache(maxsize=1 << 16)
def _ref(name: str) -> Any:
    """One object for each name, so that two states that are alike are compared in no time."""
    return Ref(name)


@dataclass(eq=False, slots=True)  # not frozen, which would triple the time that one takes to make
class NodeState:
    """The whole state of one node. Never changed, and free of weights, so copies share it."""

    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, node: Node) -> NodeState:
        """The state of `node` now."""
        args, kwargs = map_arg(node.args, _to_ref), node.kwargs
        return cls(node.op, node.target, args, map_arg(kwargs, _to_ref) if kwargs else kwargs, node.type, {**node.meta})

    def refs(self) -> set[str]:
        """The names of the nodes that it reads."""
        return refs(self.args) | refs(self.kwargs)

    @property
    def marks(self) -> frozenset[str]:
        """The signatures of the transformations that marked it."""
        return frozenset(self.meta.get(MARKS, ()))

    def same(self, other: NodeState) -> bool:
        """Whether both compute the same thing from the same nodes; `meta` is not compared."""
        if (self.op, self.target, self.type) != (other.op, other.target, other.type):
            return False
        return same(self.args, other.args) and same(self.kwargs, other.kwargs)

    def without_value(self) -> NodeState:
        """The same less the fake tensor of what the node computes."""
        return replace(self, meta={key: item for key, item in self.meta.items() if key != "val"})

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeState:
        return self

    def __getstate__(self) -> dict[str, Any]:
        target = PortableCallable(self.target) if callable(self.target) else self.target
        meta = {key: value for key, item in self.meta.items() for value in kept(item)}
        args, kwargs = plain(self.args), plain(self.kwargs)
        return {"op": self.op, "target": target, "args": args, "kwargs": kwargs, "type": self.type, "meta": meta}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, resolved(value, []) if name in ("args", "kwargs") else value)


def _to_ref(node: Node) -> Any:
    return _ref(node.name)


@dataclass(eq=False, slots=True)
class Slot:
    """What a module holds under one name, and in which of its tables. Never changed."""

    kind: str
    value: Any
    persistent: bool = True

    @classmethod
    def of(cls, parent: nn.Module, name: str) -> Slot | None:
        """The slot now, or None where there is none."""
        for kind in TABLES:
            table = parent.__dict__[kind]
            if name in table:
                return cls(kind, table[name], name not in parent._non_persistent_buffers_set)
        return cls("__dict__", parent.__dict__[name]) if name in parent.__dict__ else None

    def same(self, other: Slot | None) -> bool:
        """Whether both hold the same object; a buffer is replaced by every `.to()`, so there the table has to do."""
        return other is not None and self.kind == other.kind and (self.kind == "_buffers" or self.value is other.value)


def _alike(state: NodeState | None, other: NodeState | None) -> bool:
    return state is other or (state is not None and other is not None and state.same(other))


@dataclass
class Changes:
    """Before and after, of nodes by (graph path, name) and of slots by (module path, name)."""

    nodes: dict[Key, tuple[NodeState | None, NodeState | None]] = field(default_factory=dict)
    slots: dict[Key, tuple[Slot | None, Slot | None]] = field(default_factory=dict)
    anchors: dict[Key, str] = field(default_factory=dict)
    """Which node stood before each one that was erased."""

    def __bool__(self) -> bool:
        return bool(self.nodes or self.slots)

    @property
    def keys(self) -> set[Key]:
        """Everything that was touched."""
        return {*self.nodes, *self.slots}

    def unknown_to(self, others: Changes) -> set[Key]:
        """What is changed here and not there, or was something else there before."""
        nodes = {
            key
            for key, (before, _) in self.nodes.items()
            if key not in others.nodes or not _alike(before, others.nodes[key][0])
        }
        return nodes | (self.slots.keys() - others.slots.keys())

    def inverse(self) -> Changes:
        """The change that takes this one back."""
        nodes = {key: (after, before) for key, (before, after) in self.nodes.items()}
        slots = {key: (new, old) for key, (old, new) in self.slots.items()}
        return Changes(nodes, slots, self.anchors)

    def standing_in(self, stand_ins: Mapping[int, tuple[Any, Any]]) -> Changes:
        """The same with other objects in the slots: by the `id` of the old one, it and what stands in for it."""

        def now(slot: Slot | None) -> Slot | None:
            if slot is None or id(slot.value) not in stand_ins:
                return slot
            return Slot(slot.kind, stand_ins[id(slot.value)][1], slot.persistent)

        slots = {key: (now(old), now(new)) for key, (old, new) in self.slots.items()}
        return Changes(self.nodes, slots, self.anchors)

    def without_values(self) -> Changes:
        """The same less the fake tensors of what nodes compute."""
        nodes = {key: tuple(state and state.without_value() for state in pair) for key, pair in self.nodes.items()}
        return Changes(cast(Any, nodes), self.slots, self.anchors)

    @classmethod
    def net(cls, several: Iterable[Changes]) -> Changes:
        """Several changes made one after the other, as one: the first before and the last after of each."""
        result = cls()
        for changes in several:
            result.anchors.update(changes.anchors)
            for key, (before, after) in changes.nodes.items():
                result.nodes[key] = (result.nodes[key][0] if key in result.nodes else before, after)
            for key, (old, new) in changes.slots.items():
                result.slots[key] = (result.slots[key][0] if key in result.slots else old, new)
        return result


class Recorder:
    """Notes the state of whatever is about to be touched; knows what has changed since, and can put it back."""

    def __init__(self, root: GraphModule, orders: dict[Key, list[str]]) -> None:
        self.root = root
        self.orders = orders
        self.nodes: dict[Key, tuple[NodeState | None, Node | None]] = {}
        self.slots: dict[Key, Slot | None] = {}
        self.anchors: dict[Key, str] = {}

    def node(self, path: str, node: Node) -> None:
        """`node` is about to change."""
        self.nodes.setdefault((path, node.name), (NodeState.of(node), node))

    def new_node(self, path: str, node: Node) -> None:
        """`node` has just been made."""
        self.nodes.setdefault((path, node.name), (None, node))

    def erased_node(self, path: str, node: Node) -> None:
        """`node` is about to go."""
        self.node(path, node)
        self.anchors[path, node.name] = node.prev.name

    def slot(self, path: str, name: str, parent: nn.Module) -> Slot | None:
        """The slot `name` of `parent`, the module at `path`, is about to change; what it is now."""
        slot = Slot.of(parent, name)
        self.slots.setdefault((path, name), slot)
        if slot is not None and slot.kind in TABLES and (path, slot.kind) not in self.orders:
            self.orders[path, slot.kind] = list(parent.__dict__[slot.kind])
        return slot

    def changes(self) -> Changes:
        """What differs now from what was noted."""
        result = Changes(anchors=dict(self.anchors))
        for key, (before, node) in self.nodes.items():
            after = None if node is None or is_erased(node) else NodeState.of(node)
            if before is not None or after is not None:
                result.nodes[key] = (before, after)
        for (path, name), slot in self.slots.items():
            now = Slot.of(module_at(self.root, path), name)
            if not (slot is now is None or (slot is not None and slot.same(now) and slot.kind != "_buffers")):
                result.slots[path, name] = (slot, now)
        return result


def write_slot(parent: nn.Module, name: str, slot: Slot | None) -> None:
    """Make `name` of `parent` hold `slot`, in its place in the table if the table already has the name."""
    for kind in (*TABLES, "__dict__"):
        table = vars(parent) if kind == "__dict__" else vars(parent)[kind]
        if slot is not None and slot.kind == kind:
            table[name] = slot.value
        else:
            table.pop(name, None)
    parent._non_persistent_buffers_set.discard(name)
    if slot is not None and slot.kind == "_buffers" and not slot.persistent:
        parent._non_persistent_buffers_set.add(name)


def refs(args: Any) -> set[str]:
    """The names of the nodes in encoded arguments."""
    found: set[str] = set()

    def visit(value: Any) -> Any:
        if isinstance(value, Ref):
            found.add(value.name)
        return value

    map_aggregate(args, visit)
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two encoded arguments are alike to the last bit: 1 is not 1.0, 0.0 is not -0.0, NaN is NaN."""
    if left is right:
        return True
    if type(left) is tuple is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, slice) and isinstance(right, slice):
        return all(map(same, _bounds(left), _bounds(right)))
    if type(left) is not type(right) or isinstance(left, torch.Tensor):
        return False
    if isinstance(left, float):
        return left.hex() == float(right).hex()
    return bool(left == right)


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
