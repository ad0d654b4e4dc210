"""FoldScale: numbers and per-channel weights, behind and before, and what must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import Wrap, check_applied, check_refused, randomise

X = (torch.randn(3, 5, 4),)
IMAGE = (torch.randn(2, 4, 6, 6),)


def model_of(function: Callable[[Any, Any], Any], **parts: Any) -> nn.Module:
    given = {"l": nn.Linear(4, 4), "c": nn.Conv2d(4, 6, 3, padding=1, groups=2), "v": nn.Parameter(torch.rand(4) + 0.5)}
    given |= {"w": nn.Parameter(torch.rand(6, 1, 1)), "u": nn.Parameter(torch.rand(1, 4, 1, 1))}
    return randomise(Wrap(function, **{**given, **parts})).eval()


LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "times a number": lambda m, x: m.l(x) * 0.3,
    "number first": lambda m, x: 0.3 * m.l(x),
    "divided": lambda m, x: m.l(x) / 7,
    "times a vector": lambda m, x: m.l(x) * m.v,
    "vector first": lambda m, x: m.v * m.l(x),
    "divided by a vector": lambda m, x: m.l(x) / m.v,
    "before": lambda m, x: m.l(x * 0.3) + 1,
    "before, a vector": lambda m, x: m.l(x * m.v),
    "before, divided": lambda m, x: m.l(x / m.v),
}
CONV: dict[str, Callable[[Any, Any], Any]] = {
    "times a number": lambda m, x: m.c(x) * 0.3,
    "times a vector": lambda m, x: m.c(x) * m.w,
    "before": lambda m, x: m.c(x * 3),
    "before, a vector": lambda m, x: m.c(x * m.u),
}


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, form: str) -> None:
    gm = check_applied(rg.FoldScale(), model_of(LINEAR[name]), X, form)
    assert not [n for n in gm.graph.nodes if n.name.startswith(("mul", "truediv"))]


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", CONV)
def test_convolution(name: str, form: str) -> None:
    if (name, form) == ("before, a vector", "fx"):
        check_refused(rg.FoldScale(), model_of(CONV[name]), IMAGE, form, "not one number")  # the rank is not known
        return
    check_applied(rg.FoldScale(), model_of(CONV[name]), IMAGE, form)


def test_without_bias_and_in_half_precision() -> None:
    model = model_of(LINEAR["times a vector"], l=nn.Linear(4, 4, bias=False)).to(torch.bfloat16)
    check_applied(rg.FoldScale(), model, (X[0].to(torch.bfloat16),), "trace")


def _two_readers(m: Any, x: Any) -> Any:
    y = m.l(x)
    return y * 0.3 + y


def _written(m: Any, x: Any) -> Any:
    y = m.l(x)
    y.add_(1)
    return y * 0.3


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "two readers": (_two_readers, "also used"),
    "written": (_written, "in place"),
    "zero": (lambda m, x: m.l(x) * 0, "zero"),
    "infinite": (lambda m, x: m.l(x) / 0.0, "zero"),
    "called twice": (lambda m, x: m.l(x) * 0.3 + m.l(x + 1), "called 2 times"),
    "another axis": (lambda m, x: m.l(x) * m.rows, "not one number for each channel"),
    "more axes": (lambda m, x: m.l(x[0, 0]) * m.row, "not one number for each channel"),
    "read elsewhere": (lambda m, x: m.l(x) * m.v + m.v, "one parameter"),
    "frozen": (lambda m, x: m.l(x) * m.frozen, "frozen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    model = model_of(
        function,
        rows=nn.Parameter(torch.rand(5, 1)),
        row=nn.Parameter(torch.rand(1, 4)),
        frozen=nn.Parameter(torch.rand(4), False),
    )
    check_refused(rg.FoldScale(), model, X, "fx", word)


def test_training_mode_is_refused() -> None:
    check_refused(rg.FoldScale(), model_of(LINEAR["times a number"]).train(), X, "fx", "training mode")


def test_a_tied_weight_is_refused() -> None:
    model = model_of(LINEAR["times a number"], other=nn.Linear(4, 4))
    model.other.weight = model.l.weight
    check_refused(rg.FoldScale(), model, X, "trace", "tied")
