"""What to look for: where a rewrite begins.

A pattern yields candidate sites in the order of the graph, in one pass. Whether a candidate is rewritten is for the
rule's `require` to say, so that what is not rewritten has a reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node

from regraft.core.vocabulary import Call, Operation, location, operation_of, read


@dataclass(frozen=True, eq=False)
class Match:
    """A candidate site: the calls that the pattern found, in the order of the graph.

    `nodes` are the nodes of a site that need not be calls of known operations.
    """

    owner: GraphModule
    calls: tuple[Call, ...]
    nodes: tuple[Node, ...] = ()

    @property
    def call(self) -> Call:
        """The first call; the only one of a pattern that looks for single calls."""
        return self.calls[0]

    @property
    def where(self) -> str:
        """The site's place in the model: the calls' common module, or the one call."""
        if len(self.calls) == 1:
            return self.call.where
        if not self.calls:
            node = self.nodes[0]
            return str(node.target) if node.op in ("call_module", "get_attr") else location(node)
        paths = [call.where.split(".") for call in self.calls]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return ".".join(common) or " + ".join(call.where for call in self.calls)

    def producer(self, value: object) -> Call | None:
        """The call that computes `value`, if it is a known operation."""
        return read(value, self.owner)


class Pattern(ABC):
    """Finds candidate sites."""

    @abstractmethod
    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        """The nodes of each candidate, found before anything is edited."""

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        """The candidate as it stands when its turn comes; None where earlier edits have done away with it."""
        calls = [call for node in nodes if (call := read(node, owner)) is not None]
        return Match(owner, tuple(calls)) if len(calls) == len(nodes) else None


class Calls(Pattern):
    """Every call of one of the operations.

    Args:
        operations: The operations.
        modules: The module types that count; all of the operations' where none are given. Function calls always do.
    """

    def __init__(self, *operations: Operation, modules: tuple[type[nn.Module], ...] = ()) -> None:
        self.operations = operations
        self.modules = modules

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        yield from ((node,) for node in owner.graph.nodes if operation_of(node, owner) in self.operations)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        match = super().match(owner, nodes)
        return match if match is not None and self._wants(match.call) else None

    def _wants(self, call: Call | None) -> bool:
        if call is None or call.operation not in self.operations:
            return False
        return not self.modules or call.module is None or type(call.module) in self.modules


@dataclass(frozen=True)
class Siblings(Pattern):
    """Groups of two or more calls of one operation on the same input.

    Args:
        operation: The operation.
        by: What else the calls of a group have in common; all of those on one input are a group where it is left out.
    """

    operation: Operation
    by: Callable[[Call], Hashable] | None = None

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        groups: dict[Hashable, list[Node]] = {}
        for node in owner.graph.nodes:
            call = read(node, owner) if operation_of(node, owner) is self.operation else None
            if call is not None and isinstance(call["input"], Node):
                groups.setdefault((call.input, self.by and self.by(call)), []).append(node)
        yield from (tuple(nodes) for nodes in groups.values() if len(nodes) > 1)
