"""Scales and shifts of few elements: one pass over the large tensor, as near to float64 as the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import Of, built, weight
from torch import Tensor
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from regraft.optimize.engines.onednn_forms import Forms

X = weight(2, 16, 64)
Function = Callable[[Tensor], Tensor]


class Passes(TorchDispatchMode):
    """Counts the products and sums that have as many elements as X."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0].rstrip("_")
        if name in ("mul", "add", "addcmul") and result.numel() == X.numel():
            self.names.append(name)
        return result


def passes(function: Function, x: Tensor) -> list[str]:
    forms = Forms(symbolic_trace(Of(function)), [x])
    with Passes() as counted:
        forms(x, *forms.beside)
    return counted.names


def scale(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True)


def shift(x: Tensor) -> Tensor:
    return x.amax(1, keepdim=True)


def row(x: Tensor) -> Tensor:
    return x.amin(2, keepdim=True)


def vector(x: Tensor) -> Tensor:
    return weight(64).to(x.dtype)


def image(x: Tensor) -> Tensor:
    """Its channels lie last."""
    return x.unflatten(1, (4, 4)).permute(0, 3, 1, 2)


def convolved(x: Tensor) -> Tensor:
    return F.conv2d(image(x), weight(64, 64, 1, 1).to(x.dtype))


def table(x: Tensor) -> Tensor:
    return weight(2, 16, 64).cos().to(x.dtype)


def pixel(x: Tensor) -> Tensor:
    return image(x).amax((2, 3), keepdim=True)


def turned(x: Tensor) -> Tensor:
    heads = x.view(2, 8, 8, 16)
    halves = torch.cat((-heads[..., 8:], heads[..., :8]), -1)
    return heads * vector(x)[3] * weight(8, 16).to(x.dtype) + halves * weight(8, 16).cos().to(x.dtype)


ONE = ["addcmul"]
CHAINS: dict[str, tuple[Function, list[str]]] = {
    "the response normalization of ConvNeXt V2": (lambda x: vector(x) * (x * scale(x)) + vector(x).cos() + x, ONE),
    "modulated": (lambda x: x * (1 + scale(x)) + shift(x), ONE),
    "the other way round": (lambda x: shift(x) + (1 + scale(x)) * x, ONE),
    "a gate": (lambda x: x.exp() + scale(x) * x, ONE),
    "a gate, added in place": (lambda x: (x * scale(x)).add_(x.exp()), ONE),
    "two scales": (lambda x: x * scale(x) * vector(x), ["mul"]),
    "two shifts": (lambda x: x * scale(x) + vector(x) + shift(x), ONE),
    "shifted, then scaled": (lambda x: (x * scale(x) + shift(x)) * vector(x), ONE),
    "shifted, then added": (lambda x: x * scale(x) + shift(x) + x.exp(), ["addcmul", "add"]),
    "itself twice": (lambda x: x + (x * scale(x) + x) + shift(x), ONE),
    "scales that are not few together": (lambda x: x * scale(x) * row(x) + shift(x), ["mul", "addcmul"]),
    "a shift that would not be few": (lambda x: (x * scale(x) + shift(x)) * row(x), ["addcmul", "mul"]),
    "an image": (lambda x: image(x) * pixel(x) + vector(x)[:, None, None], ONE),
    "an image with its channels first, added": (lambda x: (y := image(x).contiguous()) * pixel(x) + y.exp(), ONE),
    "one number for all": (lambda x: x * vector(x)[3] + x.exp(), ONE),
    "one number, and a scale": (lambda x: x * vector(x)[3] * scale(x) + shift(x) + vector(x)[4], ONE),
    "scaled with its shift by one number": (lambda x: (x * scale(x) + vector(x)[4]) * vector(x)[3] + vector(x), ONE),
    "one number, and a row": (lambda x: x * vector(x)[3] * row(x), ["mul"]),
    "one number, and twice itself": (lambda x: (row(x) * x + x) * vector(x)[3], ["mul"]),
    "one number, and two shifts": (lambda x: (x * scale(x) + row(x) + vector(x)[4]) * vector(x)[3], ONE),
    "one number, and a shift": (lambda x: (x * scale(x) + row(x)) * vector(x)[3] + vector(x)[4], ONE),
    "parts with gaps": (lambda x: torch.cat((x, x), 2)[..., ::2] * scale(x) + shift(x), ONE),
    "parts with gaps, added": (lambda x: x * scale(x) + torch.cat((x, x), 2)[..., ::2], ONE),
    "of what is the same in each call": (lambda x: table(x) * vector(x) * scale(x) + shift(x), ONE),
    "turned by positions": (turned, ["mul", "addcmul"]),
}
PRODUCT_AND_SUM = ["mul", "add"]
OTHERS: dict[str, tuple[Function, list[str]]] = {
    "twice the shift": (lambda x: torch.add(x * scale(x), shift(x), alpha=2), PRODUCT_AND_SUM),
    "a product that others read": (lambda x: (y := x * scale(x)) + shift(x) - y.exp(), PRODUCT_AND_SUM),
    "a product with itself": (lambda x: (y := x * scale(x)) + y, PRODUCT_AND_SUM),
    "numbers alone along the rows": (
        lambda x: image(x).contiguous() * pixel(x) + vector(x)[:, None, None],
        PRODUCT_AND_SUM,
    ),
    "rows that are one": (lambda x: x[:, :1].expand_as(x) * scale(x) + shift(x), PRODUCT_AND_SUM),
    "a sum that lies otherwise": (lambda x: x * scale(x) + x.mT.exp().contiguous().mT, PRODUCT_AND_SUM),
    "a scale that lies otherwise": (
        lambda x: x * weight(64, 1, 2).to(x.dtype).permute(2, 1, 0) + shift(x),
        PRODUCT_AND_SUM,
    ),
    "a scale of many": (lambda x: x * x.exp() + shift(x), PRODUCT_AND_SUM),
    "of another type": (lambda x: x * scale(x) + shift(x).double(), PRODUCT_AND_SUM),
    "of half the width": (lambda x: x.float() * scale(x.float()) + shift(x).bfloat16(), PRODUCT_AND_SUM),
    "in the kernel of a convolution": (
        lambda x: convolved(x) * vector(x)[:, None, None] + vector(x).cos()[:, None, None],
        PRODUCT_AND_SUM,
    ),
    "of what is written to in between": (
        lambda x: ((y := x.cos()) * scale(x) + y[..., :4].mul_(2).mean()) + y.exp(),
        ["mul", "add", "add"],
    ),
    "in float64": (lambda x: x.double() * scale(x).double() + shift(x).double(), PRODUCT_AND_SUM),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_it_takes_so_many_passes_and_is_as_near_to_float64(name: str, dtype: torch.dtype) -> None:
    function, expected = {**CHAINS, **OTHERS}[name]
    x = X.to(dtype)
    assert passes(function, x) == expected
    module = Of(function)
    run = built(module, x)
    for given in (x, -3 * x, x.flip(1)):
        exact = module(given.double())
        found = run([given])[0]
        assert found.stride() == module(given).stride()
        error, usual = ((made.double() - exact).norm() for made in (found, module(given)))
        assert error <= 1.3 * usual + 1e-6 * exact.norm()


@pytest.mark.parametrize("name", CHAINS)
def test_nothing_is_copied_for_it(name: str) -> None:
    """oneDNN Graph would have to be given tensors of the size of the result, without gaps: torch takes any."""
    forms = Forms(symbolic_trace(Of(CHAINS[name][0])), [X])
    assert not any(forms.larger.values())
    assert not forms.beside
