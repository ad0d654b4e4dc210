"""Rows that are turned by their positions: in few calls of torch, as near to float64 as the model is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_onednn_graph import Of, built, weight
from torch import Tensor
from torch.fx import symbolic_trace
from torch.nn import functional as F

from regraft.optimize.engines.onednn_forms import Forms

X = weight(2, 5, 24)
Function = Callable[[Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return F.linear(x, weight(24, 24).to(x.dtype)).view(2, 5, 3, 8).transpose(1, 2)


def cosine(x: Tensor) -> Tensor:
    return weight(5, 8).add(1).to(x.dtype)


def sine(x: Tensor) -> Tensor:
    return weight(1, 1, 5, 8).to(x.dtype)


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def by_given_positions(x: Tensor) -> Tensor:
    angles = x[:, None, :, :4].cumsum(2)
    angles = torch.cat((angles, angles), -1)
    return heads(x) * angles.cos() + halves(heads(x)) * angles.sin()


def in_part(x: Tensor) -> Tensor:
    first, last = heads(x)[..., :4], heads(x)[..., 4:]
    turned = torch.concat([first[..., 2:].neg(), first[..., :2]], 3)
    return torch.cat((first * cosine(x)[..., :4] + turned * sine(x)[..., :4], last), -1)


def attention(x: Tensor) -> Tensor:
    query, key = (sign * (heads(x) * cosine(x) + halves(heads(x)) * sine(x)) for sign in (1, -1))
    return F.scaled_dot_product_attention(query, key, heads(x), is_causal=True)


TURNED: dict[str, Function] = {
    "as in Llama": lambda x: (heads(x) * cosine(x)) + (halves(heads(x)) * sine(x)),
    "the other way round": lambda x: torch.add(sine(x) * halves(y := heads(x).contiguous()), cosine(x) * y),
    "by positions that are given": by_given_positions,
    "a part of each row": in_part,
    "added to what is no product": lambda x: heads(x).tanh() + halves(heads(x)) * sine(x),
    "added to what others read": lambda x: (y := heads(x) * cosine(x)) + halves(heads(x)) * sine(x) - y.exp(),
    "added to twice itself": lambda x: heads(x) * 2 + halves(heads(x)) * sine(x),
    "halves of two": lambda x: heads(x) + torch.cat((-heads(x)[..., 4:], heads(x).exp()[..., :4]), 3) * sine(x),
    "of two types": lambda x: heads(x).bfloat16() * 2 + halves(heads(x).bfloat16()) * sine(x).float(),
    "three axes": lambda x: x * x.exp() + torch.cat((x[..., 12:].neg(), x[..., :12]), 2) * weight(24).to(x.dtype),
    "attention": attention,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TURNED)
def test_turned_as_near_to_float64_as_by_the_model(name: str, dtype: torch.dtype) -> None:
    module, x = Of(TURNED[name]), X.to(dtype)
    known = Forms(symbolic_trace(module), [x]).known
    assert any(node.name.startswith("neg") for node in known.by_torch)
    run = built(module, x)
    for given in (x, -3 * x, x.flip(1)):
        exact = module(given.double())
        found, usual = ((made.double() - exact).norm() for made in (run([given])[0], module(given)))
        assert found <= 1.3 * usual + 1e-6 * exact.norm()


def test_what_is_kept_from_a_product_is_so_where_it_is_turned_too() -> None:
    module = Of(lambda x: TURNED["as in Llama"](x) @ weight(8, 3))
    known = Forms(symbolic_trace(module), [X]).known
    (product,) = (node for node in known.products if node.name == "matmul")
    assert product.all_input_nodes[0] in known.viewed & known.by_torch
    torch.testing.assert_close(built(module, X)([2 * X])[0], module(2 * X), rtol=1e-4, atol=1e-5)


def test_its_products_are_not_given_copies() -> None:
    """Parts of a merged layer have gaps, and a sine is smaller than what it is multiplied with: torch takes both."""
    gm = symbolic_trace(Of(TURNED["as in Llama"]))
    forms = Forms(gm, [X])
    assert not any(forms.larger.values())
    assert not forms.beside


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.add(heads(x), halves(heads(x)) * sine(x), alpha=2),
        lambda x: heads(x) - halves(heads(x)) * sine(x),
        lambda x: halves(heads(x)) * sine(x) + heads(x),  # the sum lies as the halves do, side by side
        lambda x: cosine(x) + halves(heads(x)) * sine(x),
        lambda x: heads(x) + halves(heads(x)) / sine(x),
        lambda x: heads(x) + halves(heads(x)) * 2,
        lambda x: heads(x) + (y := halves(heads(x)) * sine(x)) - y.exp(),  # of which others read the product
        lambda x: heads(x) + (y := halves(heads(x))) * sine(x) - y,  # the halves
        lambda x: heads(x) + torch.cat((y := -heads(x)[..., 4:], heads(x)[..., :4]), 3) * sine(x) - y.sum(),
        lambda x: (y := halves(heads(x)) * sine(x)) + y,
        lambda x: heads(x) + torch.cat((heads(x)[..., 4:], -heads(x)[..., :4]), -1) * sine(x),
        lambda x: heads(x) + torch.cat((heads(x)[..., 4:], heads(x)[..., :4]), -1) * sine(x),
        lambda x: heads(x) + torch.cat((-heads(x)[..., 3:], heads(x)[..., :3]), -1) * sine(x),  # of two sizes
        lambda x: heads(x) + torch.cat((-heads(x)[..., 4:], heads(x)[..., :2], heads(x)[..., :2]), -1) * sine(x),
        lambda x: heads(x)[:, :, 1:, :2] + torch.cat([-x[:, None, :2, :1], x[:, None, 2:4, :1]], 2) * weight(2),
        lambda x: heads(x) + halves(heads(x)) * sine(x)[..., :1],  # the sign would be of one number
        lambda x: heads(x) + halves(heads(x)) * sine(x).double(),
        lambda x: heads(x) + halves(torch.arange(x.size(2) // 3).float()) * heads(x),  # the same in each call
        lambda x: (y := heads(x)) + halves(y) * sine(x) + y[..., :4].mul_(2).sum() * y,  # others see what is written
    ],
)
def test_others_stay_as_they_are(function: Function) -> None:
    module = Of(function)
    known = Forms(symbolic_trace(module), [X]).known
    assert not any(node.name.startswith(("neg", "cat")) for node in known.by_torch)
    torch.testing.assert_close(built(module, X)([2 * X])[0], module(2 * X), rtol=1e-4, atol=1e-5)
