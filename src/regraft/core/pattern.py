"""What to look for: where a rewrite begins.

A pattern yields candidate sites in the order of the graph, in one pass. Whether a candidate is rewritten is for the
rule's `require` to say, so that what is not rewritten has a reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from regraft.core import vocabulary
from regraft.core.errors import TransformationError
from regraft.core.plainness import unlike
from regraft.core.relatives import relative
from regraft.core.vocabulary import Call, Operation, location, operation_of, read


@dataclass(frozen=True, eq=False)
class Match:
    """A candidate site: the calls that the pattern found, in the order of the graph.

    `nodes` are the nodes of a site that need not be calls of known operations. `reason` is the sentence of a near miss:
    the engine refuses it with that, and does not ask the rule.
    """

    owner: GraphModule
    calls: tuple[Call, ...]
    nodes: tuple[Node, ...] = ()
    reason: str | None = None

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

    def unlike(self, value: object) -> str | None:
        """Why what computes `value` is no known operation, where it derives from one that is."""
        miss = near_miss(value, self.owner)
        return miss.reason if miss is not None else None


def near_miss(value: object, owner: GraphModule) -> Match | None:
    """A call that would be matched if its module were exactly of one of `torch.nn`'s classes."""
    call = relative(value, owner)
    if call is None or call.module is None:
        return None
    return Match(owner, (call,), reason=unlike(call.where, call.module, call.operation.modules))


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
        expect_operations(type(self).__name__, *operations)
        kinds: object = modules
        if not isinstance(kinds, tuple) or not all(isinstance(kind, type) for kind in kinds):
            raise TypeError(f"modules={modules!r}, but takes a tuple of classes: modules=(torch.nn.BatchNorm1d,)")
        self.operations = operations
        self.modules = modules

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        for node in owner.graph.nodes:
            if operation_of(node, owner) in self.operations or self._wants(relative(node, owner)):
                yield (node,)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        match = super().match(owner, nodes) or near_miss(nodes[0], owner)
        return match if match is not None and self._wants(match.call) else None

    def _wants(self, call: Call | None) -> bool:
        if call is None or call.operation not in self.operations:
            return False
        if not self.modules or call.module is None or isinstance(call.module, self.modules):
            return True
        return getattr(call.module, "cls_to_become", None) in self.modules  # a lazy batch norm derives from none


@dataclass(frozen=True)
class Siblings(Pattern):
    """Groups of two or more calls of one operation on the same input.

    Args:
        operation: The operation.
        by: What else the calls of a group have in common; all of those on one input are a group where it is left out.
    """

    operation: Operation
    by: Callable[[Call], Hashable] | None = None

    def __post_init__(self) -> None:
        expect_operations(type(self).__name__, self.operation)

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        groups: dict[Hashable, list[Node]] = {}
        strangers: list[Call] = []
        siblings: Counter[Node] = Counter()
        for node in owner.graph.nodes:
            known = operation_of(node, owner) is self.operation
            call = read(node, owner) if known else relative(node, owner)
            if call is None or call.operation is not self.operation or not isinstance(call["input"], Node):
                continue
            siblings[call.input] += 1
            if not known:
                strangers.append(call)
            else:
                groups.setdefault((call.input, self.by and self.by(call)), []).append(node)
        yield from (tuple(nodes) for nodes in groups.values() if len(nodes) > 1)
        yield from ((call.node,) for call in strangers if siblings[call.input] > 1)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        return super().match(owner, nodes) or (near_miss(nodes[0], owner) if len(nodes) == 1 else None)


def expect_operations(pattern: str, *given: object) -> None:
    """Refuse what is no operation: a pattern would look for it and find nothing.

    Args:
        pattern: The name of the class that was given it.
        given: All that it was given.

    Raises:
        TypeError: Something else is among it, or there is nothing.
    """
    wrong = [repr(item) for item in given if not isinstance(item, Operation)] or ["none"]
    if not given or wrong != ["none"]:
        meant = ", ".join(dict.fromkeys(map(_meant, given))) or "LINEAR"
        raise TypeError(
            f"{pattern} takes operations of regraft.core.vocabulary, and got {wrong[0]}; as in {pattern}({meant})"
        )


def expect_pattern(given: object, rewrite: str) -> None:
    """Refuse what is no pattern.

    Args:
        given: What a rewrite has for it; None where it has nothing.
        rewrite: The name of its class.

    Raises:
        TransformationError: It is something else.
    """
    if isinstance(given, Pattern):
        return
    has = "no pattern" if given is None else f"{given!r} as its pattern"
    raise TransformationError(f"{rewrite} has {has}; say where it begins: pattern = regraft.Calls({_meant(given)})")


def _meant(given: Any) -> str:
    """The name of the operation that somebody means by a layer, a function or a word; of any where there is none."""
    kind = type(given) if isinstance(given, nn.Module) else given
    for name, operation in vars(vocabulary).items():
        if not isinstance(operation, Operation):
            continue
        if given is operation or (isinstance(given, str) and given in (name, operation.name, *operation.methods)):
            return name
        if any(kind is spelling for spelling in (*operation.functions, *operation.modules, *operation.relatives)):
            return name
    return "LINEAR"
