"""`ReducePrecision`: half precision between layers, float32 at every border, and an error as small as a half's."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, assert_same, capture, copies, in_float64, picture, randomise, run, values_of

HALVES = (torch.bfloat16, torch.float16)


def check(model, inputs, form="trace", rule=None):
    """Apply the rule: what the caller sees keeps its dtype, the error is that of a half, and the way back is exact."""
    rule = rule or rg.ReducePrecision()
    caller = picture(model)
    gm = capture(randomise(model), inputs, form)
    before = picture(gm)
    rule(gm)
    for exact, expected, got in zip(in_float64(model, inputs), run(model, inputs), run(gm, inputs), strict=True):
        assert expected.dtype is got.dtype
        error = (got.double() - exact).norm() / exact.norm()
        assert error < 8 * torch.finfo(rule.dtype).eps
    once = picture(gm)
    rule(gm)
    assert not rg.history(gm)[-1].applied
    assert_same(once, picture(gm))
    for other in copies(gm).values():
        assert_same(values_of(before), values_of(picture(rule(other, reverse=True))))
    rule(gm, reverse=True)
    assert_same(before, picture(gm))
    assert caller.keys() == picture(model).keys()
    return rule(gm)


def dtypes(gm):
    return {name: parameter.dtype for name, parameter in gm.named_parameters()}


def casts(gm):
    return sum(node.target is torch.ops.aten.to.dtype for node in gm.graph.nodes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU("tanh"), nn.SiLU(), nn.Tanh()])
def test_nothing_is_cast_between_layers(form, dtype, activation):
    model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 5, bias=False))
    gm = check(model, (torch.randn(7, 6),), form, rg.ReducePrecision(dtype))
    assert set(dtypes(gm).values()) == {dtype}
    assert casts(gm) == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("add", [operator.add, operator.iadd, torch.add, lambda a, b: a.add_(b)])
def test_a_convolutional_block(form, add):
    model = Wrap(
        lambda self, x: F.relu(add(self.a(x), self.b(F.relu(self.a(x) if False else self.c(x))))),
        a=nn.Conv2d(3, 4, 1),
        b=nn.Conv2d(4, 4, 3, padding=1),
        c=nn.Conv2d(3, 4, 1),
    )
    gm = check(model, (torch.randn(2, 3, 6, 6),), form)
    assert casts(gm) <= 3


def test_norms_and_residual_streams_stay_in_float32():
    model = Wrap(
        lambda self, x: self.norm(x + self.b(F.gelu(self.a(x)))),
        a=nn.Linear(8, 16),
        b=nn.Linear(16, 8),
        norm=nn.LayerNorm(8),
    )
    gm = check(model, (torch.randn(3, 8),))
    assert dtypes(gm)["norm.weight"] is torch.float32
    assert casts(gm) == 2


def test_attention_runs_in_half_precision():
    def forward(self, x):
        q, k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.o(mixed.transpose(1, 2).reshape(2, 5, 8))

    model = Wrap(forward, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), o=nn.Linear(8, 8))
    model.register_buffer("mask", torch.randn(1, 1, 5, 5))
    gm = check(model, (torch.randn(2, 5, 8),))
    site = {site.where.rpartition(".")[2] for site in rg.history(gm)[-1].applied}
    assert any("attention" in where for where in site)


def test_keep():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    gm = check(model, (torch.randn(7, 6),), rule=rg.ReducePrecision(keep=["2"]))
    assert dtypes(gm)["2.weight"] is torch.float32
    assert dtypes(gm)["0.weight"] is torch.bfloat16


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (y := self.a(x), y.add_(1), y * 2)[2],
        lambda self, x: (y := self.a(x), v := y.view(-1), v.add_(1), y * 2)[3],
        lambda self, x: (y := self.a(x), F.relu_(y), y * 2)[2],
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_written_stay_right(forward, form):
    check(Wrap(forward, a=nn.Linear(6, 6)), (torch.randn(4, 6),), form)


def test_packing_finds_what_it_fuses():
    model = randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Hardswish()))
    x = torch.randn(2, 3, 9, 9)
    gm = rg.compose(rg.ReducePrecision(), rg.PrepackForCpu())(rg.trace(model, (x,)))
    assert [gm.get_submodule(name).activation.name for name in "02"] == ["relu", "hardswish"]
    assert run(gm, (x,))[0].dtype is torch.float32
    torch.testing.assert_close(run(gm, (x,))[0], run(model, (x,))[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(6, 6).double()), "not in float32"),
        (Wrap(lambda self, x: F.linear(x, self.w), w=nn.Parameter(torch.randn(3, 6))), "function call"),
        (nn.Sequential(nn.ReLU()), "float32 values"),
    ],
)
def test_refused(model, words):
    gm = rg.ReducePrecision()(capture(model, (torch.randn(2, 6),), "fx"))
    (refusal,) = rg.history(gm)[-1].refused
    assert words in refusal.reason


def test_wrong_arguments():
    with pytest.raises(ValueError, match="bfloat16"):
        rg.ReducePrecision(torch.int8)
    with pytest.raises(TypeError, match="keep="):
        rg.ReducePrecision(keep="head")
