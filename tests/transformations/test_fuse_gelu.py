"""FuseGelu: the ways in which people write GELU, and what only looks like it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regraft as rg
from helpers import Wrap, check_applied, check_refused
from regraft.testing import assert_refused

X = (torch.randn(3, 40) * 3,)
R2, RPI = math.sqrt(2), math.sqrt(2 / math.pi)

EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "x * 0.5 * (1 + erf)": lambda m, x: x * 0.5 * (1.0 + torch.erf(x / R2)),
    "0.5 * x * (erf + 1)": lambda m, x: 0.5 * x * (torch.erf(x * (1 / R2)) + 1),
    "x * (0.5 * (1 + erf))": lambda m, x: x * (0.5 * (1 + (x / R2).erf())),
    "0.5 * (x * (1 + erf))": lambda m, x: 0.5 * (x * (1 + torch.special.erf(x / R2))),
    "x * (1 + erf) / 2": lambda m, x: x * (1 + torch.erf(x / R2)) / 2,
    "of a product": lambda m, x: _product(x),
}
TANH: dict[str, Callable[[Any, Any], Any]] = {
    "NewGELU": lambda m, x: 0.5 * x * (1.0 + torch.tanh(RPI * (x + 0.044715 * torch.pow(x, 3.0)))),
    "x * x * x": lambda m, x: x * 0.5 * (1 + torch.tanh(RPI * (x + 0.044715 * x * x * x))),
    "x ** 3": lambda m, x: 0.5 * (x * (1 + (RPI * (x + x**3 * 0.044715)).tanh())),
    "x² times x": lambda m, x: 0.5 * x * (1 + torch.tanh(RPI * (x + 0.044715 * torch.square(x) * x))),
    "FastGELU": lambda m, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "Bloom": lambda m, x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
}


def _product(x: Any) -> Any:
    gate = x * (x + 1)
    return gate * 0.5 * (1.0 + torch.erf(gate / R2))


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, form: str) -> None:
    gm = check_applied(rg.FuseGelu(), Wrap(EXACT[name]), X, form)
    assert not [n for n in gm.graph.nodes if "erf" in n.name]


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", TANH)
def test_tanh(name: str, form: str) -> None:
    gm = check_applied(rg.FuseGelu(), Wrap(TANH[name]), X, form)
    assert [n.kwargs for n in gm.graph.nodes if n.op == "call_function"] == [{"approximate": "tanh"}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    check_applied(rg.FuseGelu(), Wrap(EXACT["x * 0.5 * (1 + erf)"]), (X[0].to(dtype),), "trace")


def test_inside_a_longer_product() -> None:
    model = Wrap(lambda m, x: EXACT["x * 0.5 * (1 + erf)"](m, x) * 2 * x)
    check_applied(rg.FuseGelu(), model, X, "fx")


def _read_elsewhere(m: Any, x: Any) -> Any:
    step = torch.erf(x / R2)
    return x * 0.5 * (1 + step) + step


def _written(m: Any, x: Any) -> Any:
    step = torch.erf(x / R2)
    x.add_(1)
    return x * 0.5 * (1 + step)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a coarse root": (lambda m, x: x * 0.5 * (1 + torch.erf(x / 1.41421)), "off by"),
    "another cubic": (lambda m, x: 0.5 * x * (1 + torch.tanh(RPI * (x + 0.0447 * x**3))), "off by"),
    "another factor": (lambda m, x: x * 0.4 * (1 + torch.erf(x / R2)), "should be 0.5"),
    "another value": (lambda m, x: x * 0.5 * (1 + torch.erf((x + 1) / R2)), "should be 'x'"),
    "another summand": (lambda m, x: x * 0.5 * (2 + torch.erf(x / R2)) * 3, "should be 1"),
    "read elsewhere": (_read_elsewhere, "also used"),
    "written between": (_written, "in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    check_refused(rg.FuseGelu(), Wrap(function), X, "fx", word)


def test_constants_that_only_float64_can_tell_apart() -> None:
    check_refused(rg.FuseGelu(), Wrap(TANH["Bloom"]), (X[0].double(),), "trace", "off by")


def test_a_division_in_place_is_refused_and_the_reason_says_what_to_do() -> None:
    gm = torch.fx.symbolic_trace(Wrap(EXACT["x * (1 + erf) / 2"]))
    gm.graph.find_nodes(op="call_function", target=operator.truediv)[-1].target = operator.itruediv
    gm.recompile()
    assert_refused(rg.FuseGelu(), gm, "works in place; use the out-of-place form")


@pytest.mark.parametrize(
    ("form", "x"),
    [(EXACT["0.5 * x * (erf + 1)"], torch.arange(-3, 4)), (TANH["x ** 3"], torch.randn(7, dtype=torch.complex64))],
)
def test_what_the_fused_call_does_not_take_is_refused(form: Callable[[Any, Any], Any], x: torch.Tensor) -> None:
    check_refused(rg.FuseGelu(), Wrap(form), (x,), "trace", "not floating point")
