"""A graph is run once beside its model: what torch.export did not see is told, and rounding is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regraft as rg
from helpers import Wrap

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def counting(by: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Any]:
    """One whose result grows from call to call, by what nobody can see of the model."""
    calls: list[float] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(by)
        return x.to(dtype) * (1 + sum(calls))

    return forward


def returning_more() -> Callable[[Tensor], Any]:
    calls: list[int] = []

    def forward(x: Tensor) -> Any:
        calls.append(1)
        return [x * 2] * len(calls)

    return forward


def beside(function: Callable[[Tensor], Tensor], number: float, *later: float) -> Callable[[Tensor], Any]:
    """The same beside numbers that are none, or larger than any; later calls may have others."""
    numbers = [number, *later]

    def forward(x: Tensor) -> Any:
        others = torch.full_like(x, numbers[0] if len(numbers) == 1 else numbers.pop(0))
        return torch.cat([function(x), others]), x.argmax(), x[:0], x > 0

    return forward


def finite_first() -> Callable[[Tensor], Any]:
    return beside(torch.sin, 0.0, 0.0, float("nan"))


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("make", [lambda: counting(1.0), lambda: counting(0.1), returning_more, finite_first])
def test_what_export_did_not_see_is_told(make: Callable[[], Callable[[Tensor], Any]], sizes: str | None) -> None:
    function = make()
    with pytest.raises(rg.CaptureError, match=r"something that torch\.export does not see"):
        rg.trace(Wrap(lambda _, x: function(x)).eval(), (X,), dynamic_shapes=sizes)


ROUNDED = [counting(1e-4), counting(1e-4, torch.float64), counting(0.03, torch.bfloat16)]
ROUNDED += [beside(counting(1e-4), number) for number in (float("nan"), float("inf"))]


@pytest.mark.parametrize("function", ROUNDED)
def test_rounding_is_not(function: Callable[[Tensor], Any]) -> None:
    rg.trace(Wrap(lambda _, x: function(x)).eval(), (X,))


@pytest.mark.parametrize(("by", "captured"), [(1e-6, True), (1e-3, False)])
def test_a_model_that_decides_may_round_otherwise_at_each_call_and_no_more(by: float, captured: bool) -> None:
    function = counting(by)
    model = Wrap(lambda _, x: function(x) if (x > 9).any() else function(x) * 2).eval()
    if captured:
        assert rg.trace(model, (X,), dynamic_shapes="auto")(X).shape == X.shape
        return
    with pytest.raises(rg.CaptureError, match="decides by the value of a tensor"):
        rg.trace(model, (X,), dynamic_shapes="auto")
