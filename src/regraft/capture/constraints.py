"""For which sizes a captured graph holds, and the sentence that says so when it is called with another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from regraft.capture.torch_private import expression_source, guard_functions, symbolic_expression
from regraft.core.errors import NotCovered

_shape = attrgetter("shape")

#: how a guard writes an input, such as `L['x']` or `L['cache'][0].keys`, and a size of it
_INPUT = r"L(?:\['\w+'\]|\[\d+\]|\.(?!size\()\w+)+"
_SIZE = re.compile(rf"({_INPUT})\.size\(\)\[(\d+)\]")
_SIMPLE = re.compile(rf"{_INPUT}\.size\(\)\[\d+\] (==|>=|<=) (\d+|{_INPUT}\.size\(\)\[\d+\])")


@dataclass
class Range:
    """The sizes that one symbol may take, both ends included; `at` is where it is read from."""

    lower: int
    upper: float
    at: tuple[int, int]


@dataclass
class Constraints:
    """The shapes of the inputs of a graph.

    Args:
        names: what each input is called by the user, an expression such as `past_key_values[0]`.
        shapes: for each input its sizes: a number, the name of a symbol, or the source of an expression over symbols.
        ranges: for each symbol the sizes it may take.
        guards: further conditions: for people, and as source over `d`, the sizes by input and axis.
        automatic: whether every axis was asked to vary, so that a fixed one is fixed by the model.
    """

    names: list[str]
    shapes: list[tuple[int | str, ...]]
    ranges: dict[str, Range]
    guards: list[tuple[str, str]] = field(default_factory=list)
    automatic: bool = False

    def __post_init__(self) -> None:
        self._compile()

    def _compile(self) -> None:
        functions = guard_functions()
        expressions = {size for shape in self.shapes for size in shape if isinstance(size, str)} - set(self.ranges)
        self._expressions = {
            source: eval(f"lambda s: {_over(source, self.ranges)}", functions) for source in expressions
        }
        self._conditions = [(said, eval(f"lambda d: {source}", functions)) for said, source in self.guards]
        self.holds = self._compiled(functions)
        self._held: list[Any] | None = None  # what the shapes of the last call were, if it holds for them

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_expressions", "_conditions", "holds")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compile()

    def _compiled(self, functions: dict[str, Any]) -> Callable[[Sequence[torch.Tensor]], bool]:
        """All that `check` asks as one plain function: fast, and such that a compiler can trace it."""
        lines = ["def holds(t):"]
        variables: dict[str, str] = {}
        late = []
        for position, shape in enumerate(self.shapes):
            lines += [f" x{position} = t[{position}].shape", f" if len(x{position}) != {len(shape)}: return False"]
            expected = []
            for axis, size in enumerate(shape):
                if isinstance(size, str) and size in self.ranges and size not in variables:
                    variables[size] = f"v{len(variables)}"
                    bounds = self.ranges[size]
                    upper = f" <= {int(bounds.upper)}" if bounds.upper < math.inf else ""
                    lines.append(f" {variables[size]} = x{position}[{axis}]")
                    lines.append(f" if not {bounds.lower} <= {variables[size]}{upper}: return False")
                if isinstance(size, str) and size not in self.ranges:
                    late.append((position, axis, size))
                    expected.append(f"x{position}[{axis}]")
                else:
                    expected.append(variables[size] if isinstance(size, str) else str(size))
            lines.append(f" if x{position} != ({''.join(size + ', ' for size in expected)}): return False")
        words = re.compile(r"\b[A-Za-z_]\w*\b")
        for position, axis, source in late:
            over = words.sub(lambda word: variables.get(word[0], word[0]), source)
            lines.append(f" if x{position}[{axis}] != {over}: return False")
        for _, source in self.guards:
            over = re.sub(r"\bd\[(\d+), (\d+)\]", r"x\1[\2]", source)
            lines.append(f" if not ({over}): return False")
        namespace = dict(functions)
        exec("\n".join([*lines, " return True"]), namespace)
        made: Callable[[Sequence[torch.Tensor]], bool] = namespace["holds"]
        return made

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compare the shapes of a call with those for which the graph holds.

        Args:
            tensors: the inputs, in the order of `names`.

        Raises:
            NotCovered: a shape for which it does not hold; the message names the argument, the axis and the cure.
        """
        shapes = list(map(_shape, tensors))
        if shapes == self._held:
            return
        if _true(self.holds, tensors):
            if {int}.issuperset(map(type, chain.from_iterable(shapes))):  # not those of a tracer
                self._held = shapes
            return
        sizes: dict[str, int] = {}
        late: list[tuple[int, int, str]] = []
        for position, (tensor, shape) in enumerate(zip(tensors, self.shapes)):
            given = tensor.shape
            if len(given) != len(shape):
                raise NotCovered(
                    f"{self.names[position]} has {len(given)} axes, {tuple(given)}, where the graph was captured with "
                    f"{len(shape)}, {self.describe(position)}; capture the model with an input of that form"
                )
            for axis, expected in enumerate(shape):
                size = given[axis]
                if type(expected) is int:
                    if size != expected:
                        raise NotCovered(self._fixed(position, axis, expected, size))
                elif expected not in self.ranges:
                    late.append((position, axis, str(expected)))
                elif expected not in sizes:
                    sizes[str(expected)] = size
                    bounds = self.ranges[str(expected)]
                    if not bounds.lower <= size <= bounds.upper:
                        raise NotCovered(self._outside(position, axis, bounds, size))
                elif size != sizes[str(expected)]:
                    raise NotCovered(self._unequal(position, axis, str(expected), sizes[str(expected)], size))
        for position, axis, source in late:
            expected_size = self._expressions[source](sizes)
            if given_size(tensors, position, axis) != expected_size:
                raise NotCovered(
                    f"axis {axis} of {self.names[position]} has size {given_size(tensors, position, axis)}, "
                    f"where the sizes of the other inputs ask for {source} = {expected_size}"
                )
        if self._conditions:
            table = {
                (position, axis): size
                for position, tensor in enumerate(tensors)
                for axis, size in enumerate(tensor.shape)
            }
            for said, holds in self._conditions:
                if not _true(holds, table):
                    raise NotCovered(
                        f"the captured graph holds only where {said}; the inputs have "
                        + ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(self.names, tensors))
                        + "; capture the model with an example of these sizes"
                    )

    def allow_from(self, lower: int, symbols: Collection[str]) -> None:
        """Let some sizes be no smaller than that."""
        for symbol in symbols:
            self.ranges[symbol].lower = lower
        self._compile()

    def require_together(self, symbol: str, group: Collection[str]) -> None:
        """Let a size be one only where some others are one too.

        Args:
            symbol: the size.
            group: the others.
        """
        position, axis = self.ranges[symbol].at
        others = [self.ranges[other].at for other in sorted(group) if other != symbol]
        said = " == ".join(f"{self.names[p]}.shape[{a}]" for p, a in others)
        source = " and ".join(f"d[{p}, {a}] == 1" for p, a in others)
        self.guards.append(
            (
                f"{self.names[position]}.shape[{axis}] is 1 only if {said} == 1",
                f"d[{position}, {axis}] != 1 or ({source})",
            )
        )
        self._compile()

    def describe(self, position: int) -> str:
        """The shape of one input, for people: symbols stand for the axes that vary.

        Args:
            position: which input.
        """
        return "(" + ", ".join(str(size) for size in self.shapes[position]) + ")"

    def _fixed(self, position: int, axis: int, expected: int, size: int) -> str:
        cure = (
            "the model itself fixes this size; capture it again with an input of the size you need"
            if self.automatic
            else 'capture the model with dynamic_shapes="auto" to let it vary'
        )
        return f"axis {axis} of {self.names[position]} has size {size}, expected {expected}: {cure}"

    def _outside(self, position: int, axis: int, bounds: Range, size: int) -> str:
        limit = (
            f"from {bounds.lower} to {int(bounds.upper)}" if bounds.upper < math.inf else f"of {bounds.lower} or more"
        )
        return (
            f"axis {axis} of {self.names[position]} has size {size}, expected a size {limit}: the model computes "
            "something else for other sizes, or nothing; capture it with an input of the size you need"
        )

    def _unequal(self, position: int, axis: int, symbol: str, expected: int, size: int) -> str:
        other, other_axis = self.ranges[symbol].at
        return (
            f"axis {axis} of {self.names[position]} has size {size}, expected {expected}, "
            f"the size of axis {other_axis} of {self.names[other]}: the model needs the two to be equal"
        )


def given_size(tensors: Sequence[torch.Tensor], position: int, axis: int) -> int:
    """The size of one axis of one input."""
    return int(tensors[position].shape[axis])


def _true(condition: Callable[[Any], Any], table: Any) -> bool:
    try:
        return bool(condition(table))
    except ZeroDivisionError:  # a condition that makes no sense for these sizes does not hold
        return False


def _over(source: str, symbols: dict[str, Range]) -> str:
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda name: f"s[{name[0]!r}]" if name[0] in symbols else name[0], source)


def constraints_of(
    names: list[str], leaves: list[str], values: list[torch.Tensor], ranges: Any, guards: list[str], automatic: bool
) -> Constraints:
    """The constraints that an exported program puts on its inputs.

    Args:
        names: what a user calls each input.
        leaves: how a guard writes each input.
        values: the fake tensor of each input.
        ranges: the program's `range_constraints`.
        guards: its conditions, as `torch_private.guards_of` gives them.
        automatic: whether every axis was asked to vary.
    """
    shapes: list[tuple[int | str, ...]] = []
    found: dict[str, Range] = {}
    for position, value in enumerate(values):
        shape: list[int | str] = []
        for axis, size in enumerate(value.shape):
            expr = symbolic_expression(size)
            if getattr(expr, "is_Symbol", False):
                shape.append(expr.name)
                found.setdefault(expr.name, _range(ranges.get(expr), (position, axis)))
            elif getattr(expr, "is_Integer", True):
                shape.append(int(expr))  # a size that was to vary, and that the model fixed, is symbolic still
            else:
                shape.append(expression_source(expr))
        shapes.append(tuple(shape))
    _drop_unbound(shapes, found)
    positions = {leaf: position for position, leaf in enumerate(leaves)}
    conditions = [
        (_SIZE.sub(lambda m: f"{names[positions[m[1]]]}.shape[{m[2]}]", guard), _indexed(guard, positions))
        for guard in guards
        if not _SIMPLE.fullmatch(guard)
        and all(m[1] in positions for m in _SIZE.finditer(guard))
        and "L[" not in _SIZE.sub("", guard)
    ]
    return Constraints(names, shapes, found, conditions, automatic)


def _range(bounds: Any, at: tuple[int, int]) -> Range:
    if bounds is None:
        return Range(2, math.inf, at)
    upper = int(bounds.upper) if getattr(bounds.upper, "is_Integer", False) else math.inf
    return Range(int(bounds.lower), upper, at)


def _drop_unbound(shapes: list[tuple[int | str, ...]], found: dict[str, Range]) -> None:
    """An expression over a symbol that no input has as a size of its own cannot be checked: it becomes a symbol."""
    for position, shape in enumerate(shapes):
        sizes = list(shape)
        for axis, size in enumerate(shape):
            if isinstance(size, str) and size not in found and set(re.findall(r"\bs\d+\b|\bu\d+\b", size)) - set(found):
                found[size] = Range(1, math.inf, (position, axis))
                sizes[axis] = size
        shapes[position] = tuple(sizes)


def _indexed(guard: str, positions: dict[str, int]) -> str:
    return _SIZE.sub(lambda m: f"d[{positions[m[1]]}, {m[2]}]", guard)
