"""What a rewrite did to the graph around a site, as plain data for whoever draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from regraft.core.journal import SiteRecord, Step
from regraft.core.modules import graph_modules
from regraft.core.states import Key, NodeState, Ref

_SHOWN_READERS = 4  # of one value; a value that a hundred nodes read is drawn with four of them

Touch = Literal["removed", "added", "changed", "around"]


@dataclass(frozen=True)
class DrawnNode:
    """One node of a drawing.

    Attributes:
        name: The node's name, unique in the drawing.
        label: What it computes, in a word: the class of the layer, or the function.
        detail: The same in full, for whoever wants to know.
        value: The type and shape of its result, where known.
        touch: What the rewrite did to it; `"around"` for what it reads, and what reads it.
        inputs: The names of the nodes in the drawing that it reads.
    """

    name: str
    label: str
    detail: str
    value: str
    touch: Touch
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """One site before and after: the nodes that were touched, what they read and what reads them.

    Attributes:
        where: The site.
        sentence: What was done there.
        before: The nodes before, each behind what it reads.
        after: The nodes after.
        weights: A sentence for each weight that was made.
    """

    where: str
    sentence: str
    before: tuple[DrawnNode, ...]
    after: tuple[DrawnNode, ...]
    weights: tuple[str, ...]


class Drawer:
    """Draws the sites of one graph module; the cost is linear in the graph, once, and then in what is drawn.

    Args:
        gm: The graph module, as it is now.
        steps: The steps whose sites are to be drawn, those taken back included.
    """

    def __init__(self, gm: GraphModule, steps: Iterable[Step]) -> None:
        self._gm = gm
        self._nodes: dict[Key, list[_Change]] = {}
        self._modules: dict[str, list[_Change]] = {}
        self._readers: dict[Key, dict[str, None]] = {}
        self._live: dict[Key, NodeState] = {}
        for site in sorted((site for step in steps for site in step.applied), key=lambda site: site.id):
            self._learn(site)
        for path, owner in graph_modules(gm).items():
            for node in owner.graph.nodes:
                self._live[path, node.name] = NodeState.of(node)
                self._know(path, node.name, self._live[path, node.name])

    def draw(self, site: SiteRecord) -> Drawing | None:
        """One site; None where no node was touched.

        Args:
            site: The site.
        """
        if not site.changes.nodes:
            return None
        weights = tuple(f"{made.target} from {', '.join(made.sources) or 'outside'}" for made in site.weights)
        before, after = (_Side(self, site, new).nodes() for new in (False, True))
        return Drawing(site.where, site.sentence, before, after, weights)

    def state(self, key: Key, site: SiteRecord) -> NodeState | None:
        """A node that a site did not touch, as it was when the site was rewritten."""
        found: NodeState | None = _then(self._nodes.get(key, ()), site.id, self._live.get(key))
        return found

    def module(self, name: str, site: SiteRecord, new: bool) -> nn.Module | None:
        """The layer of a name before or after a site was rewritten."""
        try:
            found: nn.Module | None = self._gm.get_submodule(name)
        except AttributeError:
            found = None
        found = _then(self._modules.get(name, ()), site.id, found)
        for change in self._modules.get(name, ()):
            if change.site == site.id:
                found = change.new if new else change.old
        return found

    def readers(self, key: Key, site: SiteRecord) -> list[str]:
        """Some of those who read a value, none of which the site touched."""
        path, name = key
        found = [reader for reader in self._readers.get(key, ()) if (path, reader) not in site.changes.nodes]
        states = ((reader, self.state((path, reader), site)) for reader in found)
        return [reader for reader, state in states if state is not None and name in state.refs()][:_SHOWN_READERS]

    def _learn(self, site: SiteRecord) -> None:
        for (path, name), (old, new) in site.changes.nodes.items():
            self._nodes.setdefault((path, name), []).append(_Change(site.id, old, new))
            for state in (old, new):
                if state is not None:
                    self._know(path, name, state)
        for (path, name), slots in site.changes.slots.items():
            held = [slot.value if slot is not None and isinstance(slot.value, nn.Module) else None for slot in slots]
            if any(module is not None for module in held):
                self._modules.setdefault(".".join(filter(None, (path, name))), []).append(_Change(site.id, *held))

    def _know(self, path: str, name: str, state: NodeState) -> None:
        for read in state.refs():
            self._readers.setdefault((path, read), {})[name] = None


@dataclass(frozen=True)
class _Change:
    """What a site made of a node or a module."""

    site: int
    old: Any
    new: Any


def _then(changes: Sequence[_Change], site: int, now: Any) -> Any:
    """What stood when a site was rewritten: what the next site to touch it found, or what is there now."""
    for change in changes:
        if change.site > site:
            return change.old
    return now if now is not None or not changes else changes[-1].new


class _Side:
    """One of the two pictures of a site."""

    def __init__(self, drawer: Drawer, site: SiteRecord, new: bool) -> None:
        self.drawer = drawer
        self.site = site
        self.new = new
        self.states: dict[Key, NodeState] = {}

    def nodes(self) -> tuple[DrawnNode, ...]:
        """The nodes that were touched, what they read, and what reads them."""
        for key, pair in self.site.changes.nodes.items():
            state = pair[self.new]
            if state is not None:
                self.states[key] = state
        for (path, name), state in list(self.states.items()):
            for near in (*sorted(state.refs()), *self.drawer.readers((path, name), self.site)):
                around = None if (path, near) in self.site.changes.nodes else self.drawer.state((path, near), self.site)
                if around is not None:
                    self.states.setdefault((path, near), around)
        return tuple(self._node(key) for key in _in_order(self.states))

    def _node(self, key: Key) -> DrawnNode:
        path, name = key
        state = self.states[key]
        inputs = tuple(read for read in sorted(state.refs()) if (path, read) in self.states)
        label, detail = self._called(path, state)
        return DrawnNode(name, label, detail, _value(state.meta.get("val")), self._touch(key), inputs)

    def _touch(self, key: Key) -> Touch:
        if key not in self.site.changes.nodes:
            return "around"
        old, new = self.site.changes.nodes[key]
        return "removed" if new is None else "added" if old is None else "changed"

    def _called(self, path: str, state: NodeState) -> tuple[str, str]:
        """What a node computes, in a word and in full."""
        if state.op in ("placeholder", "output", "get_attr"):
            word = {"placeholder": "input", "output": "output"}.get(state.op, "weight")
            return word, f"{word} {state.target}"
        if state.op == "call_module":
            module = self.drawer.module(".".join(filter(None, (path, str(state.target)))), self.site, self.new)
            word = "layer" if module is None else type(module).__name__
            full = "" if module is None else f" = {module!r}".partition("\n")[0]
            return word, f"{state.target}{full}"
        word = state.target if isinstance(state.target, str) else _function(state.target)
        return word, f"{word}({_arguments(state)})"


def _in_order(states: dict[Key, NodeState]) -> Sequence[Key]:
    """The nodes, each behind what it reads."""
    done: dict[Key, None] = {}
    stack = [(key, False) for key in reversed(list(states))]
    begun: set[Key] = set()
    while stack:
        key, ready = stack.pop()
        if ready:
            done[key] = None
        elif key not in begun:
            begun.add(key)
            stack.append((key, True))
            stack += [((key[0], read), False) for read in states[key].refs() if (key[0], read) in states]
    return list(done)


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} {' x '.join(map(_size, value.shape)) or 'scalar'}"


def _size(size: Any) -> str:
    """A size, if it is a number or a symbol; a formula would fill the box."""
    text = str(size)
    return text if len(text) <= 4 else "…"


def _function(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def _arguments(state: NodeState) -> str:
    args: Any = map_aggregate(state.args, _shown)
    kwargs: Any = map_aggregate(state.kwargs, _shown)
    return ", ".join([*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs.items())])


class _Word(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> Any:
    return _Word(value.name) if isinstance(value, Ref) else value


def _text(value: Any) -> str:
    if isinstance(value, slice):
        start, stop = ("" if bound is None else str(bound) for bound in (value.start, value.stop))
        return f"{start}:{stop}"
    if value is Ellipsis:
        return "..."
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)
