"""A fuzzer for rules: it makes models, holds the rule to the laws on each, and prints a small one that breaks it."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from regraft.core.report import Report
from regraft.core.transformation import Transformation
from regraft.testing.grammar import Choose, Grammar, Shape
from regraft.testing.laws import assert_round_trip
from regraft.testing.picture import assert_same_picture, picture

SHAPES = ((2, 4), (2, 3, 4), (2, 4, 4), (2, 4, 3, 3), (4,), (2, 2, 3, 3, 3), (1, 2, 2), (2, 3, 2, 4), (4, 4))
DTYPES = ("float32", "float64", "bfloat16", "float16")

_HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

import regraft
from regraft.testing.parts import DoubledLinear, add_one, negate, nested, numbers, randomised, traced_with_shapes
"""


@dataclass(frozen=True)
class Program:
    """A generated model and its inputs: `print(program)` shows the Python that makes them.

    Attributes:
        init: The statements of the model's `__init__`.
        body: The statements of its `forward`.
        result: What it returns.
        after: What is done to the model once it is made.
        inputs: The expressions of its arguments.
        dtype: The name of its dtype.
        keyword: Whether it is called by keyword.
        form: How it is captured: `"fx"`, without shapes; `"shapes"`, with them; `"trace"`, by `regraft.trace`;
            `"nested"` and `"nested shapes"`, with a part of the graph in a graph module of its own.
        cut: Where that part begins, and how many nodes it has.
    """

    init: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    after: tuple[str, ...]
    inputs: tuple[str, ...]
    dtype: str
    keyword: bool
    form: str
    cut: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        names = ("x", "y")[: len(self.inputs)]
        inputs = ", ".join(f"{text}.to(torch.{self.dtype})" for text in self.inputs)
        inputs = f"args, kwargs = ({inputs},), {{}}"
        if self.inputs[1:] == ("x",):  # one tensor, passed twice
            inputs = f"x = {self.inputs[0]}.to(torch.{self.dtype})\nargs, kwargs = (x, x), {{}}"
        if self.keyword:
            inputs += f"\nargs, kwargs = (), dict(zip({names!r}, args))"
        lines = [
            _HEAD,
            "",
            "class Model(nn.Module):",
            "    def __init__(self):",
            *(f"        {line}" for line in ("super().__init__()", *self.init)),
            "",
            f"    def forward(self, {', '.join(names)}):",
            *(f"        {line}" for line in (*self.body, f"return {self.result}")),
            "",
            "",
            f"model = randomised(Model()).to(torch.{self.dtype}).eval()",
            *self.after,
            inputs,
            _CAPTURE[self.form].format(*self.cut),
        ]
        return "\n".join(lines)

    def build(self) -> tuple[nn.Module, GraphModule, tuple[Any, ...], dict[str, Any]]:
        """The model, the graph module captured from it, and its positional and keyword arguments."""
        space: dict[str, Any] = {"__name__": "generated"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(str(self), "<generated>", "exec"), space)
        return space["model"], space["gm"], space["args"], space["kwargs"]


@dataclass(frozen=True)
class Tally:
    """What a fuzzer has seen: how many models, and at how many sites of theirs the rule was applied and refused."""

    models: int
    applied: int
    refused: int
    reasons: tuple[str, ...]


def programs(
    forms: tuple[str, ...] = ("fx", "fx", "shapes", "shapes", "nested", "nested shapes", "trace"), statements: int = 6
) -> Any:
    """A hypothesis strategy of `Program`s, for properties of your own. Some of them do not run; reject those.

    Args:
        forms: How they are captured, from the most wanted to the least.
        statements: How many statements or groups of statements they have at most.
    """
    from hypothesis import strategies as st

    @st.composite
    def program(draw: Any) -> Program:
        def choose(options: Sequence[Any]) -> Any:
            return options[draw(st.integers(0, len(options) - 1))]

        shape = choose(SHAPES)
        grammar = Grammar(choose, shape)
        inputs = choose(((), (), (), ("y",), ("x",)))
        grammar.values += [("y", shape)] * len(inputs)
        for _ in range(choose(range(1, statements + 1))):
            grammar.grow()
        names = [name for name, _ in grammar.values]
        return Program(
            tuple(grammar.init),
            tuple(grammar.body),
            choose((names[-1], names[-1], names[-1], f"({', '.join(names[-3:])},)", f"({', '.join(names)},)")),
            tuple(grammar.after),
            (laid_out(choose, shape), *(laid_out(choose, shape) if name == "y" else name for name in inputs)),
            choose(DTYPES),
            choose((False, False, False, True)),
            form := choose(forms),
            (choose(range(8)), choose(range(1, 8))) if form.startswith("nested") else (0, 0),
        )

    return program()


def laid_out(choose: Choose, shape: Shape) -> str:
    """An expression for random numbers of a shape, in one layout or another."""
    text, swapped = "numbers{}", (*shape[:-2], *shape[:-3:-1])
    layouts = [text.format(shape), text.format(shape), f"{text.format(swapped)}.transpose(-1, -2)"]
    layouts += [f"{text.format((*shape[:-1], 2 * shape[-1]))}[..., ::2]", f"numbers{shape}.requires_grad_()"]
    return str(choose(layouts if len(shape) > 1 else layouts[:1]))


def fuzz(rule: Transformation, *, examples: int = 200, seed: int = 0, idempotent: bool = True) -> Tally:
    """Hold a rule to the laws of `assert_round_trip` on generated models.

    They are of every rank and dtype, with layers that are shared, tied, hooked, frozen, pruned or in training mode,
    with strides, aliases, changes in place, keyword and functional calls, captured with and without shapes, whole or
    with a part in a graph module of its own.

    Args:
        rule: The transformation.
        examples: How many models.
        seed: Another seed, other models; the same one, the same models.
        idempotent: As in `assert_round_trip`.

    Returns:
        How many models and sites there were. Look at it: a rule that is never applied has not been tested.

    Raises:
        AssertionError: if a law does not hold on one of the models. The model has been made as small as could be, and
            the message is Python that runs and shows the failure.

    Example:
        >>> import regraft as rg
        >>> from regraft.testing import fuzz
        >>> fuzz(rg.FuseBiasInLinear(), examples=3).models
        3
    """
    import hypothesis

    tally: list[Report] = []
    broken: list[tuple[Program, Exception]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(programs())
    def holds(program: Program) -> None:
        built = runs(program)
        hypothesis.assume(built is not None)
        assert built is not None
        try:
            tally.append(check(rule, *built, idempotent=idempotent))
        except Exception as error:
            broken.append((program, error))
            raise

    try:
        holds()
    except Exception:
        if not broken:
            raise
        program, error = broken[-1]
        raise AssertionError(f"{_first_line(error)}\n\n{script(program, rule)}") from error
    reasons = Counter(re.sub(r"\d+", "#", row[3]) for report in tally for row in report.rows() if row[1] == "refused")
    totals = sum(report.applied for report in tally), sum(report.refused for report in tally)
    return Tally(len(tally), *totals, tuple(reason for reason, _ in reasons.most_common()))


Built = tuple[nn.Module, GraphModule, tuple[Any, ...], dict[str, Any]]


def runs(program: Program) -> Built | None:
    """What a program makes; None where the model that it says cannot be made or run."""
    try:
        model, gm, args, kwargs = program.build()
        with torch.no_grad(), quiet():
            copy.deepcopy(gm)(*tree_map(_cloned, args), **tree_map(_cloned, kwargs))
    except Exception:  # what torch raises for a model that makes no sense is not ours to foresee
        return None
    return model, gm, args, kwargs


def check(
    rule: Transformation,
    model: nn.Module,
    gm: GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    idempotent: bool = True,
) -> Report:
    """The laws, and that the model is left alone."""
    before = picture(model)
    with quiet():
        report = assert_round_trip(rule, gm, args, kwargs, idempotent=idempotent)
    assert_same_picture(before, picture(model), "the model that was captured has changed")
    return report


@contextmanager
def quiet() -> Iterator[None]:
    """Generated models make torch warn of many things, and rules say where they rewrite nothing."""
    logger = logging.getLogger("regraft")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # fx prints where in its code an error was
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def script(program: Program, rule: Transformation) -> str:
    """Python that shows what a rule does wrong to a model."""
    kind = type(rule)
    imports = f"from {kind.__module__} import {kind.__qualname__.partition('.')[0]}\n"
    imports += "from regraft.testing import assert_round_trip"
    return f"{program}\n\n{imports}\n\nassert_round_trip({rule!r}, gm, args, kwargs)\n"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


_CAPTURE = {
    "fx": "gm = torch.fx.symbolic_trace(model)",
    "shapes": "gm = traced_with_shapes(model, args, kwargs)",
    "trace": "gm = regraft.trace(model, args, kwargs)",
    "nested": "gm = nested(torch.fx.symbolic_trace(model), {}, {})",
    "nested shapes": "gm = nested(traced_with_shapes(model, args, kwargs), {}, {})",
}
