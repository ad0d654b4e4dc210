"""Patterns of several operations: what an expression must look like, with names for the parts that a rule needs.

A form describes a value: `Value("x")` any, `Number("eps")` a number, `Op(ADD, ...)` the result of an operation,
`Product` factors in any order, `Either` one of several, `Through((CAST,), ...)` something behind any number of casts. A
name that occurs twice stands for the same value. `Tree` looks for a form through a whole graph, and for near misses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from torch.fx import GraphModule, Node

from regraft.core.pattern import Match, Pattern
from regraft.core.plainness import plain_module
from regraft.core.vocabulary import ADD, DIVIDE, MULTIPLY, Call, Operation, read

_COMMUTATIVE = (ADD, MULTIPLY)
_DEEPEST_PRODUCT = 4


@dataclass(frozen=True)
class Binding:
    """What a form has found so far: values by name, and the nodes on the way."""

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def named(self, name: str, value: Any) -> Binding:
        """With one more value."""
        return Binding({**self.values, name: value}, self.nodes)

    def over(self, *nodes: Node) -> Binding:
        """With more nodes."""
        return Binding(self.values, (*self.nodes, *nodes))


@dataclass
class Trial:
    """One attempt: the graph module, and the failure that came furthest."""

    owner: GraphModule
    failure: tuple[Node, ...] = ()
    reason: str = ""

    def fail(self, found: Binding, reason: str) -> None:
        """Note that after `found` something did not fit."""
        if len(found.nodes) > len(self.failure):
            self.failure, self.reason = found.nodes, reason


class Form(ABC):
    """What a value must look like."""

    @abstractmethod
    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        """Every way in which `value` has this form, given what was found before."""


@dataclass(frozen=True)
class Value(Form):
    """Any value that meets the condition; the same one wherever the name occurs."""

    name: str
    condition: Callable[[Any], bool] | None = None

    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        if self.condition is not None and not self.condition(value):
            trial.fail(found, f"{_show(value)} is no {self.name}")
        elif self.name not in found.values:
            yield found.named(self.name, value)
        elif found.values[self.name] is value or (not isinstance(value, Node) and found.values[self.name] == value):
            yield found
        else:
            trial.fail(found, f"{_show(value)} should be {_show(found.values[self.name])}")


@dataclass(frozen=True)
class Number(Form):
    """A number: the one given, or any, under a name."""

    wanted: str | float

    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if isinstance(self.wanted, str):
                yield found.named(self.wanted, value)
                return
            if value == self.wanted:
                yield found
                return
        wanted = "a number" if isinstance(self.wanted, str) else self.wanted
        trial.fail(found, f"{_show(value)} should be {wanted}")


class Op(Form):
    """The result of an operation on operands in their order, or in any for addition and multiplication.

    Args:
        operation: The operation.
        operands: The forms of its first arguments.
        settings: The other arguments: a value, a predicate, or a form. What is not named must be absent or its default.
    """

    def __init__(self, operation: Operation, *operands: Form, **settings: Any) -> None:
        self.operation = operation
        self.operands = operands
        self.settings = settings

    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        call = read(value, trial.owner)
        if call is None or call.operation is not self.operation:
            trial.fail(found, f"{_show(value)} should be a result of {self.operation}")
            return
        found = found.over(call.node)
        if (reason := _plain(call) or self._misfit(call)) is not None:
            trial.fail(found, reason)
            return
        given = [call[name] for name in self.operation.names[: len(self.operands)]]
        forms = {name: form for name, form in self.settings.items() if isinstance(form, Form)}
        orders = permutations(given) if self.operation in _COMMUTATIVE else [tuple(given)]
        for order in orders:
            steps = [*zip(self.operands, order, strict=True), *((form, call[name]) for name, form in forms.items())]
            yield from _bind_all(steps, found, trial)

    def _misfit(self, call: Call) -> str | None:
        if unknown := call.arguments.keys() - set(self.operation.names):
            return f"{call.where} has {min(unknown)}={call[min(unknown)]!r}"
        for name in self.operation.names[len(self.operands) :]:
            wanted, value = self.settings.get(name, call.operation.defaults.get(name)), call[name]
            if isinstance(wanted, Form):
                continue
            fits = wanted(value) if callable(wanted) else value == wanted
            if not fits:
                return f"{call.where} has {name}={value!r}"
        return None


class Product(Form):
    """Factors in any order and grouping, and numbers among them, divisors included, whose product gets a name.

    Args:
        factors: The forms of the factors that are not numbers.
        number: What the product of the numbers must be, or a name for it; it is 1.0 where there are none.
    """

    def __init__(self, *factors: Form, number: str | float) -> None:
        self.factors = factors
        self.number = Number(number)

    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        for factors, number, nodes in _expansions(value, trial.owner, _DEEPEST_PRODUCT):
            if len(factors) == len(self.factors):
                for order in permutations(factors):
                    steps: list[tuple[Form, Any]] = [*zip(self.factors, order, strict=True), (self.number, number)]
                    yield from _bind_all(steps, found.over(*nodes), trial)


class Either(Form):
    """One of several forms."""

    def __init__(self, *forms: Form) -> None:
        self.forms = forms

    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        for form in self.forms:
            yield from form.bind(value, found, trial)


@dataclass(frozen=True)
class Through(Form):
    """A form behind any number of calls of some operations, casts for instance."""

    operations: tuple[Operation, ...]
    form: Form

    def bind(self, value: Any, found: Binding, trial: Trial) -> Iterator[Binding]:
        yield from self.form.bind(value, found, trial)
        call = read(value, trial.owner)
        if call is not None and call.operation in self.operations and _plain(call) is None:
            yield from self.bind(call["input"], found.over(call.node), trial)


@dataclass(frozen=True, eq=False)
class TreeMatch(Match):
    """An expression that was found, `values` by name; or a near miss.

    `nodes` are those of the expression, the last of which is its result.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> Node:
        """The node of the whole expression."""
        return self.nodes[-1]

    @property
    def inner(self) -> list[Node]:
        """The other nodes of the expression."""
        return list(self.nodes[:-1])

    def is_a(self, node: Node, operation: Operation) -> bool:
        """Whether `node` is a call of `operation`."""
        call = read(node, self.owner)
        return call is not None and call.operation is operation


class Tree(Pattern):
    """Every expression of a form.

    Args:
        form: The form.
        anchors: Operations without which the form is not worth a word: where one occurs in something that has almost
            the form, the site is refused with the reason. One of them must occur in each alternative.
    """

    def __init__(self, form: Form, *anchors: Operation) -> None:
        self.form = form
        self.anchors = anchors

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        taken: dict[Node, Node] = {}
        misses: dict[Node, tuple[int, Node]] = {}
        for node in owner.graph.nodes:
            found, trial = self._try(node, owner)
            for anchor in self._anchors(found.nodes if found is not None else trial.failure, owner):
                if found is not None:
                    taken[anchor] = node  # the largest expression
                elif len(trial.failure) > misses.get(anchor, (0, node))[0]:
                    misses[anchor] = len(trial.failure), node
        sites = {**{a: node for a, (_, node) in misses.items() if a not in taken}, **taken}
        yield from ((node,) for node in dict.fromkeys(sites[anchor] for anchor in sorted(sites)))

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> TreeMatch | None:
        found, trial = self._try(nodes[0], owner)
        if found is not None:
            return TreeMatch(owner, (), tuple(sorted(set(found.nodes))), values=found.values)
        if not self._anchors(trial.failure, owner):
            return None
        return TreeMatch(owner, (), nodes, reason=trial.reason)

    def _try(self, node: Node, owner: GraphModule) -> tuple[Binding | None, Trial]:
        trial = Trial(owner)
        return next(self.form.bind(node, Binding(), trial), None), trial

    def _anchors(self, nodes: tuple[Node, ...], owner: GraphModule) -> list[Node]:
        calls = [read(node, owner) for node in nodes]
        return [call.node for call in calls if call is not None and call.operation in self.anchors]


def _plain(call: Call) -> str | None:
    """A module among the operations does what its class says, and nothing besides."""
    return plain_module(call.where, call.module) if call.module is not None else None


def _bind_all(steps: list[tuple[Form, Any]], found: Binding, trial: Trial) -> Iterator[Binding]:
    if not steps:
        yield found
        return
    (form, value), *rest = steps
    for further in form.bind(value, found, trial):
        yield from _bind_all(rest, further, trial)


def _expansions(value: Any, owner: GraphModule, depth: int) -> Iterator[tuple[list[Any], float, tuple[Node, ...]]]:
    """A value as a product, in every grouping: the factors, the number among them, the nodes that were opened."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield [], float(value), ()
        return
    yield [value], 1.0, ()
    call = read(value, owner) if depth else None
    if call is None or call.operation not in (MULTIPLY, DIVIDE) or call["rounding_mode"] is not None:
        return
    for left, a, above in _expansions(call["input"], owner, depth - 1):
        for right, b, below in _expansions(call["other"], owner, depth - 1):
            if call.operation is MULTIPLY:
                yield left + right, a * b, (call.node, *above, *below)
            elif not right and b != 0:
                yield left, a / b, (call.node, *above, *below)


def _show(value: Any) -> str:
    return repr(value.name) if isinstance(value, Node) else repr(value)


__all__ = ["Binding", "Either", "Form", "Number", "Op", "Product", "Through", "Tree", "TreeMatch", "Value"]
