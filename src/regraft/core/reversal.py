"""Undo: the befores put back, much as `git revert` does it.

What others have changed meanwhile stays. Where both have changed the same thing the undo refuses, and nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from regraft.core.fx_private import release_name, rewrite_node, set_meta
from regraft.core.modules import module_at
from regraft.core.order import placed
from regraft.core.states import (
    MARKS,
    TABLES,
    Changes,
    Key,
    NodeState,
    Ref,
    Slot,
    refs,
    same,
    write_slot,
)


class Conflict(Exception):
    """Internal: `key` is no longer what the journal left there. The caller knows who to name."""

    def __init__(self, key: Key, fact: str) -> None:
        super().__init__(fact)
        self.key = key
        self.fact = fact


def merge(key: Key, before: Any, after: Any, current: Any) -> Any:
    """`current` with the change from `before` to `after` taken back; a `Conflict` where both changed the same thing."""
    if same(after, current):
        return before
    if same(before, after):
        return current
    tables = [state.keys() for state in (before, after, current) if isinstance(state, dict)]
    if len(tables) == 3 and tables[0] == tables[1] == tables[2]:
        return {k: merge(key, before[k], after[k], current[k]) for k in before}
    sequences = [state for state in (before, after, current) if isinstance(state, (list, tuple))]
    if len(sequences) == 3 and len({len(sequence) for sequence in sequences}) == 1:
        merged = [merge(key, *states) for states in zip(*sequences, strict=True)]
        return tuple(merged) if isinstance(before, tuple) else merged
    raise Conflict(key, f"node {key[1]!r} has been changed since")


class Reversal:
    """One undo: planned whole, without touching anything, and then carried out.

    Args:
        root: The graph module.
        changes: What is to be taken back.
        orders: Where in their tables and graphs the things go that come back.
        signatures: Whose marks the nodes lose; None puts back the exact `meta`, where nothing has happened since.

    Raises:
        Conflict: from the constructor, where something made later stands in the way.
    """

    def __init__(
        self, root: GraphModule, changes: Changes, orders: dict[Key, list[str]], signatures: set[str] | None
    ) -> None:
        self.root = root
        self.orders = orders
        self.slots = changes.slots
        self.signatures = signatures
        for (path, name), (_, after) in changes.slots.items():
            _expect_slot(root, path, name, after)
        self.graphs = [_GraphReversal(root, path, group) for path, group in _by_path(changes.nodes)]
        self.anchors = changes.anchors

    def apply(self) -> list[GraphModule]:
        """Carry it out. Returns the graph modules whose code is to be compiled again."""
        for graph in self.graphs:
            anchors = [(name, anchor) for (path, name), anchor in self.anchors.items() if path == graph.path]
            graph.apply(placed(self.orders.get((graph.path, "nodes"), []), anchors), self.signatures)
        touched = set()
        for (path, name), (before, _) in self.slots.items():
            write_slot(module_at(self.root, path), name, before)
            touched.add(path)
        for path in touched:
            self._reorder(path)
        return [graph.owner for graph in self.graphs]

    def _reorder(self, path: str) -> None:
        parent = module_at(self.root, path)
        for kind in TABLES:
            table = parent.__dict__[kind]
            known = self.orders.get((path, kind))
            if known is None:
                continue
            ordered = [name for name in known if name in table]
            items = {**{name: table[name] for name in ordered}, **table}
            table.clear()
            table.update(items)


class _GraphReversal:
    """The part of a reversal that concerns one graph."""

    def __init__(
        self, root: GraphModule, path: str, changes: dict[str, tuple[NodeState | None, NodeState | None]]
    ) -> None:
        self.path = path
        self.owner = _graph_module(root, path)
        self.live = {node.name: node for node in self.owner.graph.nodes}
        self.erase = [name for name, (before, after) in changes.items() if before is None and after is not None]
        self.revive = {
            name: before for name, (before, after) in changes.items() if before is not None and after is None
        }
        self.rewrite: dict[str, tuple[NodeState, NodeState, tuple[Any, Any]]] = {}
        for name, (before, after) in changes.items():
            self._plan(name, before, after)
        self._check()

    def _plan(self, name: str, before: NodeState | None, after: NodeState | None) -> None:
        key, node = (self.path, name), self.live.get(name)
        if after is None:
            if node is not None and before is not None:
                raise Conflict(key, f"another node is now called {name!r}")
            return
        if node is None:
            raise Conflict(key, f"node {name!r} is gone")
        now = NodeState.of(node)
        if before is None:
            if not after.same(now):
                raise Conflict(key, f"node {name!r} has been changed since")
            return
        if (now.op, now.target) != (after.op, after.target) and (before.op, before.target) != (after.op, after.target):
            raise Conflict(key, f"node {name!r} now computes something else")
        kwargs = before.kwargs
        if kwargs or after.kwargs or now.kwargs:
            kwargs = merge(key, kwargs, after.kwargs, now.kwargs)
        arguments = merge(key, before.args, after.args, now.args), kwargs
        self.rewrite[name] = (before, after, arguments)

    def _check(self) -> None:
        """Whatever is read afterwards must be there, and whatever goes must not be read any more."""
        gone = set(self.erase)
        there = (self.live.keys() | self.revive.keys()) - gone
        for name, (_, _, arguments) in self.rewrite.items():
            self._expect_nodes(name, refs(arguments), there)
        for name, record in self.revive.items():
            self._expect_nodes(name, record.refs(), there)
        for name in self.erase:
            for user in self.live[name].users:
                if user.name in gone or (user.name in self.rewrite and name not in refs(self.rewrite[user.name][2])):
                    continue
                raise Conflict((self.path, user.name), f"node {user.name!r} reads node {name!r}")

    def _expect_nodes(self, reader: str, names: set[str], there: set[str]) -> None:
        for name in names - there:
            raise Conflict((self.path, name), f"node {name!r}, which {reader!r} is to read again, is gone")

    def apply(self, order: Sequence[str], signatures: set[str] | None) -> None:
        graph = self.owner.graph
        previous: Node | None = None
        for name in order if self.revive else ():
            if name in self.revive:
                record = self.revive[name]
                node = self._stand_in(name, previous)
                node.name = name
                self.live[name] = node
                self.rewrite[name] = (record, record, (record.args, record.kwargs))
            previous = self.live.get(name, previous)
        for name, (before, after, (args, kwargs)) in self.rewrite.items():
            self._write(self.live[name], before, after, args, kwargs, signatures)
        for name in sorted(self.erase, key=lambda n: self.live[n], reverse=True):
            graph.erase_node(self.live[name])
            release_name(graph, name)

    def _stand_in(self, name: str, previous: Node | None) -> Node:
        graph = self.owner.graph
        try:
            with graph.inserting_after(previous) if previous is not None else graph.inserting_before():
                return graph.create_node("call_function", _nothing, name=name)
        except BaseException:  # whatever interrupts this, no node is left that nobody knows
            made = previous.next if previous is not None else next(iter(graph.nodes))
            if made.target is _nothing and self.live.get(made.name) is not made:
                graph.erase_node(made)
                release_name(graph, made.name)
            raise

    def _write(
        self, node: Node, before: NodeState, after: NodeState, args: Any, kwargs: Any, signatures: set[str] | None
    ) -> None:
        moved = before is after or (before.op, before.target) != (after.op, after.target)
        op, target = (before.op, before.target) if moved else (node.op, node.target)
        rewrite_node(node, op, target, self._decode(args), self._decode(kwargs))
        if node.type is not before.type:
            node.type = before.type
        if signatures is None:
            set_meta(node, dict(before.meta))
            return
        had = before.meta.get(MARKS, frozenset())  # an earlier application of the same transformation may stand
        now = had if before is after else node.meta.get(MARKS, frozenset())  # one that comes back has none
        marks = frozenset(now) - (signatures - had)
        kept = {k: v for k, v in node.meta.items() if k in before.meta or k not in after.meta}
        set_meta(node, {**kept, **before.meta})
        node.meta.pop(MARKS, None)
        if marks:
            node.meta[MARKS] = marks

    def _decode(self, args: Any) -> Any:
        if not args:
            return args
        return map_aggregate(args, lambda a: self.live[cast(Any, a).name] if isinstance(cast(Any, a), Ref) else a)


def _nothing() -> None:
    """Stands in for the target of a node that is being brought back."""


def _by_path(nodes: dict[Key, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    groups: dict[str, dict[str, Any]] = {}
    for (path, name), change in nodes.items():
        groups.setdefault(path, {})[name] = change
    yield from groups.items()


def _graph_module(root: GraphModule, path: str) -> GraphModule:
    try:
        owner = module_at(root, path)
    except AttributeError:
        raise Conflict((path, ""), f"the graph module {path!r} is gone") from None
    if not isinstance(owner, GraphModule):
        raise Conflict((path, ""), f"the module {path!r} is no longer a graph module")
    return owner


def _expect_slot(root: GraphModule, path: str, name: str, after: Slot | None) -> None:
    label = f"{path}.{name}" if path else name
    try:
        now = Slot.of(module_at(root, path), name)
    except AttributeError:
        raise Conflict((path, name), f"the module {path!r} is gone") from None
    if after is None and now is not None:
        raise Conflict((path, name), f"something else is now called {label!r}")
    if after is not None and not after.same(now):
        raise Conflict((path, name), f"{label!r} has been {'removed' if now is None else 'replaced'} since")
