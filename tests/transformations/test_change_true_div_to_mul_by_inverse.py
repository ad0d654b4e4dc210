"""`ChangeTrueDivToMulByInverse`."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, Wrap, assert_matches_float64, capture, check_applied, check_refused, picture

INVERT = rg.ChangeTrueDivToMulByInverse()
X = torch.randn(2, 3)

SPELLINGS = {
    "operator": lambda self, x: x / 49.0,
    "int": lambda self, x: x / 7,
    "torch.div": lambda self, x: torch.div(x, 49.0),
    "torch.divide": lambda self, x: torch.divide(input=x, other=3),
    "torch.true_divide": lambda self, x: torch.true_divide(x, 3.0),
    "method": lambda self, x: x.div(3.0),
    "method by keyword": lambda self, x: x.div(other=3.0),
    "divide method": lambda self, x: x.divide(3.0),
    "true_divide method": lambda self, x: x.true_divide(3.0),
    "dunder": lambda self, x: x.__truediv__(3.0),
    "aten": lambda self, x: torch.ops.aten.div.Tensor(x, 3.0),
    "no rounding": lambda self, x: torch.div(x, 3.0, rounding_mode=None),
    "negative": lambda self, x: x / -0.3,
    "one": lambda self, x: x / 1,
    "power of two": lambda self, x: x / 8,
    "buffer": lambda self, x: x / self.c,
    "buffer by function": lambda self, x: torch.div(x, self.c),
    "vector": lambda self, x: x / self.v,
    "parameter": lambda self, x: x / self.p,
}


def model(function) -> nn.Module:
    return Wrap(
        function,
        c=torch.tensor(math.sqrt(8)),
        v=torch.tensor([0.3, 7.0, -11.0]),
        p=nn.Parameter(torch.tensor(3.0), requires_grad=False),
        i=torch.tensor([2, 3, 4]),
        zero=torch.tensor([1.0, 0.0, 2.0]),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(spelling, form):
    check_applied(INVERT, model(SPELLINGS[spelling]), (X,), form)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(dtype, form):
    x = torch.randn(64).to(dtype)
    check_applied(INVERT, model(lambda self, x: x / 49), (x,), form)
    check_applied(INVERT, model(lambda self, x: x / self.c).to(dtype), (x,), form)


@pytest.mark.parametrize("divisor", [49, 49.0, 8, 3, -7, 1e30, 2**100])
def test_the_divisor_comes_back_as_it_was(divisor):
    gm = capture(model(lambda self, x: x / divisor), (X,), "fx")
    INVERT(gm)
    INVERT(gm, reverse=True)
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert node.target is operator.truediv
    assert type(node.args[1]) is type(divisor)
    assert node.args[1] == divisor


REFUSED = {
    "zero": (lambda self, x: x / 0, "no inverse"),
    "zero float": (lambda self, x: x / 0.0, "no inverse"),
    "negative zero": (lambda self, x: x / -0.0, "no inverse"),
    "inf": (lambda self, x: x / math.inf, ""),
    "nan": (lambda self, x: x / math.nan, ""),
    "subnormal inverse": (lambda self, x: x / 3e38, "no inverse"),
    "subnormal divisor": (lambda self, x: x / 1e-40, "no inverse"),
    "beyond every float": (lambda self, x: x / 1e300, "no inverse"),
    "a zero in a buffer": (lambda self, x: x / self.zero, "no inverse"),
    "an integer buffer": (lambda self, x: x / self.i, "int64"),
    "floor": (lambda self, x: torch.div(x, 3.0, rounding_mode="floor"), "rounds"),
    "trunc": (lambda self, x: x.div(3.0, rounding_mode="trunc"), "rounds"),
    "a number by a tensor": (lambda self, x: 3.0 / x, "divisor is not a constant"),
    "a tensor by a tensor": (lambda self, x: x / x.sum(), "divisor is not a constant"),
    "then floored": (lambda self, x: (x / 49).floor(), "rounded or compared"),
    "then made an integer": (lambda self, x: (x / 3.0 + 1).to(torch.int64), "rounded or compared"),
    "then compared": (lambda self, x: torch.where(x / 3 > 1.0, x, -x), "rounded or compared"),
    "in place": (lambda self, x: (x * 1).div_(3.0), "in place"),
    "in place by function": (lambda self, x: operator.itruediv(x * 1, 3.0), "in place"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, form):
    function, words = REFUSED[case]
    if (case, form) == ("in place by function", "fx"):
        return  # a Proxy has no `__itruediv__`, so fx writes `truediv`
    net = model(function)
    gm = capture(net, (X,), form)
    before = picture(gm)
    INVERT(gm)
    assert not rg.history(gm)[0].applied
    assert picture(gm) == before
    assert form == "trace" or any(words in refusal.reason for refusal in rg.history(gm)[0].refused)
    assert_matches_float64(net, gm, (X,))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x * (x.size(0) / 49),
        lambda self, x: x * (x.shape[1] / 49),
        lambda self, x: x * (x.size()[0] / 49),
        lambda self, x: x.reshape(-1) * int(2 * 49 / 49),
        lambda self, x: x * (len(x.shape) / 49) if False else x * (x.dim() / 49),
        lambda self, x: x.new_zeros(math.floor(x.numel() / 6) if not isinstance(x, torch.fx.Proxy) else 1) * 1.0,
        lambda self, x: x * ((x.size(0) + 1) / 7 * 2),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_sizes_stay_divided(function, form):
    net = model(function)
    gm = capture(net, (X,), form)
    before = picture(gm)
    INVERT(gm)
    assert picture(gm) == before
    assert not rg.history(gm)[0].applied


def test_a_zero_divisor_gives_what_the_model_gives():
    net = model(lambda self, x: x / 0)
    gm = INVERT(capture(net, (X,), "fx"))
    assert torch.equal(gm(X), net(X))


@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_that_is_written(form):
    def forward(self, x):
        y = x / self.c
        self.c.add_(1)
        return y

    if form == "fx":  # fx runs the write while it traces: a node has to do it
        gm = capture(model(lambda self, x: x / self.c), (X,), "fx")
        (reader,) = [n for n in gm.graph.nodes if n.op == "get_attr"]
        with gm.graph.inserting_after(reader):
            gm.graph.call_method("add_", (reader, 1))
        gm.recompile()
    else:
        gm = capture(model(forward), (X,), "trace")
    before = picture(gm)
    INVERT(gm)
    assert picture(gm) == before
    assert "writ" in rg.history(gm)[0].refused[0].reason or "in place" in rg.history(gm)[0].refused[0].reason


def test_a_trainable_divisor():
    net = model(lambda self, x: x / self.p)
    net.p.requires_grad_(True)
    gm = capture(net, (X,), "fx")
    INVERT(gm)
    assert not rg.history(gm)[0].applied
    assert "p is trainable" in rg.history(gm)[0].refused[0].reason
    gm(X).sum().backward()
    assert net.p.grad is not None


@pytest.mark.parametrize("divisor", [1e5, 1e-5])
def test_half_precision_numbers_whose_inverse_is_not_normal(divisor):
    check_refused(INVERT, model(lambda self, x: x / divisor), (X.half(),), "trace", "no inverse")
    check_applied(INVERT, model(lambda self, x: x / divisor), (X,), "trace")


def test_meta():
    net = model(lambda self, x: x / self.c).to("meta")
    check_refused(INVERT, net, (X.to("meta"),), "fx", "meta")


@pytest.mark.parametrize("name", ["c", "v"])
@pytest.mark.parametrize(
    ("values", "narrow"),
    [(torch.float64, torch.float32), (torch.float32, torch.float16), (torch.complex128, torch.float32)],
)
def test_an_inverse_that_is_coarser_than_the_quotient(values, narrow, name):
    net = model(lambda self, x: x / getattr(self, name)).to(narrow)
    check_refused(INVERT, net, (X.to(values),), "trace", "coarser")
    check_applied(INVERT, model(lambda self, x: x / getattr(self, name)).to(torch.float64), (X.double(),), "trace")
