"""What was done to a graph module, step by step and site by site. It lives in `gm.meta` and is copied along with it.

Everything refers to nodes and slots by name, so a journal is copied and pickled with its graph module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from regraft.core.modules import graph_modules, module_at
from regraft.core.order import merge_order, placed
from regraft.core.states import Changes, Key


@dataclass
class WeightRecord:
    """A weight that a site made: `target` from `sources` (qualified names) by `derivation`.

    `digest` is set once the weight has been converted (`gm.to(dtype)`): it can't be computed from the sources again.
    """

    target: str
    sources: tuple[str, ...]
    derivation: Any
    requires_grad: bool
    digest: str | None = None


@dataclass(frozen=True)
class Written:
    """A weight that a user's function has written in place: its values before, and the digest of those after."""

    before: Tensor
    digest: str


@dataclass
class SiteRecord:
    """One place where a transformation was applied: where, what was done in one sentence, and the way back."""

    id: int
    where: str
    sentence: str
    changes: Changes = field(repr=False)
    weights: list[WeightRecord] = field(default_factory=list, repr=False)
    training: dict[str, bool] = field(default_factory=dict, repr=False)
    consumed: bool = False
    written: dict[Key, Written] = field(default_factory=dict)

    @property
    def keys(self) -> set[Key]:
        """Everything that was touched."""
        return self.changes.keys | self.written.keys()

    def standing_in(self, stand_ins: Mapping[int, tuple[Any, Any]]) -> SiteRecord:
        """See `Changes.standing_in`. Another entry, which shares no record of a weight with this one."""
        weights = [replace(weight) for weight in self.weights]
        return replace(self, changes=self.changes.standing_in(stand_ins), weights=weights)


@dataclass(frozen=True)
class Refusal:
    """One place where a transformation was not applied, and the sentence that says why."""

    where: str
    reason: str


@dataclass(frozen=True)
class Step:
    """One application of one transformation.

    Attributes:
        id: Counts up from 1 in each graph module; what `undo(gm, step)` takes.
        transformation: The name of the class.
        arguments: Its arguments, as text.
        signature: Equal for equal class and arguments.
        applied: The sites that stand, in order.
        refused: The sites that were refused, each with its reason.
        seconds: The time it took.
    """

    id: int
    transformation: str
    arguments: str
    signature: str
    applied: tuple[SiteRecord, ...]
    refused: tuple[Refusal, ...]
    seconds: float

    def __str__(self) -> str:
        return f"step {self.id}: {self.transformation}({self.arguments})"

    def __repr__(self) -> str:
        return f"<{self}, {len(self.applied)} applied, {len(self.refused)} refused>"

    def standing_in(self, stand_ins: Mapping[int, tuple[Any, Any]]) -> Step:
        """See `Changes.standing_in`."""
        return replace(self, applied=tuple(s.standing_in(stand_ins) for s in self.applied)) if stand_ins else self

    def without_values(self) -> Step:
        """The step less the fake tensors of what nodes compute."""
        return replace(self, applied=tuple(replace(s, changes=s.changes.without_values()) for s in self.applied))

    def without(self, sites: set[int]) -> Step:
        """The step less the sites with these ids."""
        return replace(self, applied=tuple(site for site in self.applied if site.id not in sites))


@dataclass
class Journal:
    """All that regraft keeps about one graph module, in its `meta`."""

    steps: list[Step] = field(default_factory=list)
    orders: dict[Key, list[str]] = field(default_factory=dict)
    last_step: int = 0
    last_site: int = 0

    KEY = "regraft.journal"

    def __copy__(self) -> Journal:
        orders = {key: list(order) for key, order in self.orders.items()}
        return Journal(list(self.steps), orders, self.last_step, self.last_site)

    @classmethod
    def of(cls, gm: GraphModule) -> Journal:
        """The journal of `gm`, begun where there is none."""
        journal = gm.meta.setdefault(cls.KEY, cls())
        assert isinstance(journal, Journal)
        return journal

    def new_step(self) -> int:
        """A number for a step."""
        self.last_step += 1
        return self.last_step

    def new_site(self) -> int:
        """A number for a site."""
        self.last_site += 1
        return self.last_site

    def sites(self) -> Iterator[tuple[Step, SiteRecord]]:
        """Every site that stands, oldest first."""
        for step in self.steps:
            for site in step.applied:
                yield step, site

    def settle(self, gm: GraphModule) -> None:
        """Bring the orders up to date after a change: what is here now, and what may come back."""
        dead_nodes: dict[str, set[str]] = {}
        anchors: dict[str, list[tuple[str, str]]] = {}
        dead_slots: dict[str, set[str]] = {}
        for _, site in self.sites():
            for (path, name), anchor in site.changes.anchors.items():
                anchors.setdefault(path, []).append((name, anchor))
            for (path, name), (before, after) in site.changes.nodes.items():
                if before is not None and after is None:
                    dead_nodes.setdefault(path, set()).add(name)
            for (path, name), (old, _) in site.changes.slots.items():
                if old is not None:
                    dead_slots.setdefault(path, set()).add(name)
        for path in graph_modules(gm):
            self.orders.setdefault((path, "nodes"), [])
        for key in list(self.orders):
            path, kind = key
            try:
                owner = module_at(gm, path)
            except AttributeError:
                del self.orders[key]
                continue
            if kind != "nodes":
                live = list(owner.__dict__[kind])
                self.orders[key] = merge_order(self.orders[key], live, dead_slots.get(path, set()))
            elif isinstance(owner, GraphModule):
                names = [node.name for node in owner.graph.nodes]
                known = placed(self.orders[key], anchors.get(path, ()))
                self.orders[key] = merge_order(known, names, dead_nodes.get(path, set()))
