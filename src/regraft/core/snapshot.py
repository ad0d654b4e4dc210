"""A snapshot of a graph module before a user's own function edits it directly: nodes, slots, and no weights.

It makes the function atomic, and what it did undoable. A weight that is written in place meanwhile is saved at the
moment of its first write, so nothing is copied that is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.fx import GraphModule

from regraft.core.carry import digest, tensors_of
from regraft.core.copy_before_write import CopyBeforeWrite, is_strided
from regraft.core.journal import Journal, WeightRecord, Written
from regraft.core.modules import graph_modules, module_at, walk
from regraft.core.reversal import Reversal
from regraft.core.states import TABLES, Changes, Key, NodeState, Slot
from regraft.core.weights import Unknown, same_bits


class Snapshot:
    """The state of `gm` now.

    Args:
        gm: The graph module. Its journal's orders are brought up to date, which is what a reversal goes by.
        only: The nodes and slots that are going to be touched, where that is known; then no other is looked at.
    """

    def __init__(self, gm: GraphModule, only: Changes | None = None) -> None:
        self.gm = gm
        self._only = only
        self._journal = Journal.of(gm)
        self._journal.settle(gm)
        self._steps = list(self._journal.steps)
        self._nodes = _nodes(gm, only)
        self._slots = _slots(gm, only)
        self._codes = Codes(gm)
        self._writes = CopyBeforeWrite(slot.value for slot in self._slots.values())
        for (path, _), slot in self._slots.items():
            if slot.kind in TABLES and (path, slot.kind) not in self._journal.orders:
                self._journal.orders[path, slot.kind] = list(module_at(gm, path).__dict__[slot.kind])

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Within it, the weights that are written in place are saved first."""
        with self._writes:
            yield

    def changes(self) -> Changes:
        """What differs now from what was here then."""
        nodes, slots = _nodes(self.gm, self._only), _slots(self.gm, self._only)
        result = Changes()
        for key in self._nodes.keys() | nodes.keys():
            before, after = self._nodes.get(key), nodes.get(key)
            if before is None or after is None or not before.same(after) or before.marks != after.marks:
                result.nodes[key] = (before, after)
        for key in self._slots.keys() | slots.keys():
            old, new = self._slots.get(key), slots.get(key)
            if old is None or new is None or old.kind != new.kind or old.value is not new.value:
                result.slots[key] = (old, new)
        # A slot inside a module that came or went belongs to that module.
        whole = {f"{path}.{name}".lstrip(".") for path, name in result.slots}
        result.slots = {key: pair for key, pair in result.slots.items() if whole.isdisjoint(_holders(key[0]))}
        return result

    def written(self) -> dict[Key, Written]:
        """The weights that were written in place and differ, with what they were."""
        found: dict[Key, Written] = {}
        for key, slot in self._slots.items():
            before = self._writes.before(slot.value)
            if before is not None and not same_bits(before, slot.value):
                found[key] = Written(before, digest(slot.value))
        return found

    def put_in(self, changes: Changes) -> list[WeightRecord]:
        """The weights that are new among `changes`. What they are now is noted, so that training is seen."""
        known = {id(slot.value) for slot in self._slots.values()}
        now = {".".join(filter(None, key)): new.value for key, (_, new) in changes.slots.items() if new is not None}
        return [
            WeightRecord(name, (), Unknown(), tensor.requires_grad, digest(tensor))
            for name, tensor in tensors_of(now).items()
            if id(tensor) not in known and type(tensor) in (Tensor, nn.Parameter) and is_strided(tensor)
        ]

    def restore_weights(self) -> None:
        """Every weight that was written in place, as it was."""
        self._writes.restore()

    def restore(self) -> None:
        """Everything as it was, the generated code and the values of weights included."""
        self._journal.steps[:] = self._steps
        Reversal(self.gm, self.changes(), self._journal.orders, None).apply()
        self.restore_weights()
        self.gm.meta[Journal.KEY] = self._journal
        for path, owner in graph_modules(self.gm).items():
            for node in owner.graph.nodes:
                if (path, node.name) in self._nodes:
                    node.meta = dict(self._nodes[path, node.name].meta)
        self._codes.restore()


class Codes:
    """The generated code of `gm` and of the graph modules in it, and the functions made of it.

    Args:
        gm: The graph module.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._codes = [(owner, owner._code, type(owner).forward) for owner in graph_modules(gm).values()]

    def restore(self) -> None:
        """Put back the code where it has been compiled again; the graph is what it was made from."""
        for owner, code, function in self._codes:
            if owner._code != code or type(owner).forward is not function:
                owner.recompile()


def _nodes(gm: GraphModule, only: Changes | None) -> dict[Key, NodeState]:
    nodes = ((path, node) for path, owner in graph_modules(gm).items() for node in owner.graph.nodes)
    if only is None:
        return {(path, node.name): NodeState.of(node) for path, node in nodes}
    return {(path, node.name): NodeState.of(node) for path, node in nodes if (path, node.name) in only.nodes}


def _slots(gm: GraphModule, only: Changes | None) -> dict[Key, Slot]:
    found: dict[Key, Slot] = {}
    if only is not None:
        for path, name in only.slots:
            slot = _slot(gm, path, name)
            if slot is not None:
                found[path, name] = slot
        return found
    for path, module in walk(gm, once=True):
        for kind in TABLES:
            for name, value in module.__dict__[kind].items():
                persistent = name not in module._non_persistent_buffers_set
                found[path, name] = Slot(kind, value, persistent)
    return found


def _slot(gm: GraphModule, path: str, name: str) -> Slot | None:
    try:
        return Slot.of(module_at(gm, path), name)
    except AttributeError:  # the module is gone
        return None


def _holders(path: str) -> Iterator[str]:
    """A module's path and those of the modules that hold it, the root excepted."""
    while path:
        yield path
        path = path.rpartition(".")[0]
