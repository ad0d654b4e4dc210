"""Tests for the mutants of `ReducePrecision` that had survived; see docs/mutation.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import regraft as rg
from regraft.testing.parts import add_one, randomised, traced_with_shapes

HALVES = (torch.bfloat16, torch.float16)
LOWEST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """One head of attention, with a mask as the caller gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, mask):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask)


def reasons(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Why the last step left something as it is."""
    return {refusal.where: refusal.reason for refusal in rg.history(gm)[-1].refused}


def attention_of(gm: torch.fx.GraphModule) -> torch.fx.Node:
    return next(node for node in gm.graph.nodes if "attention" in node.name and node.op == "call_function")


def masks() -> dict[str, torch.Tensor]:
    """The first row sees nothing, the others not the last value."""
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[0], hidden[:, -1] = True, True
    return {
        "lowest": torch.zeros(5, 5).masked_fill(hidden, LOWEST),
        "low": torch.zeros(5, 5).masked_fill(hidden, -1e30),
        "infinite": torch.zeros(5, 5).masked_fill(hidden, -torch.inf),
        "boolean": ~hidden,
        "positions": torch.randn(5, 5),
    }


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("name", masks())
def test_a_mask_means_the_same_to_attention_in_half_precision(name: str, shapes: bool, dtype: torch.dtype) -> None:
    model, x, mask = randomised(Masked()).eval(), torch.randn(2, 5, 4), masks()[name]
    gm = traced_with_shapes(model, (x, mask), {}) if shapes else torch.fx.symbolic_trace(model)
    rg.ReducePrecision(dtype)(gm)
    assert attention_of(gm).args[0].target is not torch.ops.aten.to.dtype
    with torch.no_grad():
        torch.testing.assert_close(gm(x, mask), model(x, mask), rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_a_mask_that_is_itself_made_in_half_precision_stays_so() -> None:
    class Learnt(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(4, 5)

        def forward(self, x):
            return super().forward(x, self.m(x))

    model, x = randomised(Learnt()).eval(), torch.randn(2, 5, 4)
    gm = on_cuda(traced_with_shapes(model, (x,), {}))
    rg.ReducePrecision()(gm)
    assert attention_of(gm).kwargs["attn_mask"].target == "m"
    assert len([node for node in gm.graph.nodes if node.target is torch.ops.aten.to.dtype]) == 5


def on_cuda(gm: torch.fx.GraphModule, mask: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    """The graph as it is captured on a GPU, of which only the fake values can be had without one."""
    with FakeTensorMode():
        for node in gm.graph.nodes:
            value: Any = node.meta["val"]
            dtype = mask if node.name == "mask" else value.dtype
            node.meta["val"] = torch.empty(value.shape, dtype=dtype, device="cuda")
    return gm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_only_a_float32_mask_on_a_gpu_keeps_attention_in_float32(dtype: torch.dtype) -> None:
    gm = traced_with_shapes(randomised(Masked()).eval(), (torch.randn(2, 5, 4), torch.zeros(5, 5)), {})
    rg.ReducePrecision()(on_cuda(gm, dtype))
    kept = [
        reason for reason in reasons(gm).values() if reason.endswith("in float32, which halves take on the CPU alone")
    ]
    assert len(kept) == len(reasons(gm)) == (dtype is torch.float32)


def test_numbers_that_are_no_floating_point_stay_what_they_are() -> None:
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x).argmax(-1) + 1

    model, x = randomised(Best()).eval(), torch.randn(3, 4)
    gm = rg.ReducePrecision()(traced_with_shapes(model, (x,), {}))
    assert reasons(gm) == {"add": "add works on float32 values"}
    assert gm(x).dtype is torch.int64


class Function(nn.Module):
    """A function of two layers and one input."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self, x)


def reduced(function, change=lambda model: None) -> torch.fx.GraphModule:
    """The graph with halves in it, which computes about the same."""
    model, x = randomised(Function(function)).eval(), torch.randn(2, 5, 4)
    change(model)
    gm = rg.ReducePrecision()(torch.fx.symbolic_trace(model))
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0.05)
    return gm


def test_a_layer_that_is_more_than_itself_stays() -> None:
    gm = reduced(lambda m, x: m.a(x) + m.b(x), lambda m: m.a.register_forward_hook(add_one))
    assert reasons(gm) == {"a": "a has hooks, which would be lost; remove them, or wrap the module instead"} | {
        "add": "add also works on float32 values"
    }
    gm = reduced(lambda m, x: m.a(m.b(x)), lambda m: setattr(m.a, "weight", m.b.weight))
    assert reasons(gm) == {
        "a": "b.weight is tied to a.weight; untie them, or leave a as it is",
        "b": "b.weight is tied to a.weight; untie them, or leave b as it is",
    }
    gm = reduced(lambda m, x: m.a(m.a(x)))
    assert reasons(gm) == {"a": "a is called 2 times, and a rewrite of one call would change the others"}


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda m, x: m.a(x) + x, "add"),
        (lambda m, x: x + m.a(x), "add"),
        (lambda m, x: F.scaled_dot_product_attention(m.a(x), m.b(x), x), "scaled_dot_product_attention"),
        (lambda m, x: F.scaled_dot_product_attention(m.a(x), x, m.b(x)), "scaled_dot_product_attention"),
        (lambda m, x: F.scaled_dot_product_attention(x, m.a(x), m.b(x)), "scaled_dot_product_attention"),
    ],
)
def test_what_is_half_in_half_precision_stays_in_float32(function, where: str) -> None:
    assert reasons(reduced(function)) == {where: f"{where} also works on float32 values"}


@pytest.mark.parametrize("alpha", [1, 3])
def test_an_addition_in_place_of_a_multiple(alpha: int) -> None:
    assert not reasons(reduced(lambda m, x: m.a(x).add_(m.b(x), alpha=alpha)))


def test_an_index_or_a_size_beside_a_half_is_no_float32_value() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, index):
            return self.a(x)[index].reshape(index.size(0), 4)

    model, inputs = randomised(Chosen()).eval(), (torch.randn(3, 4), torch.tensor([2, 0]))
    gm = rg.ReducePrecision()(traced_with_shapes(model, inputs, {}))
    assert not reasons(gm)
    with torch.no_grad():
        torch.testing.assert_close(gm(*inputs), model(*inputs), rtol=0, atol=0.05)


def test_a_layer_whose_input_is_known_to_be_no_float32_stays() -> None:
    gm = traced_with_shapes(nn.Sequential(nn.Linear(4, 4)).eval(), (torch.randn(2, 4),), {})
    x = next(iter(gm.graph.nodes))
    x.meta["val"] = x.meta["val"].double()
    rg.ReducePrecision()(gm)
    assert reasons(gm) == {"0": "the input of 0 is not float32"}
