"""Hooks on what lies between the layers of a site: an identity, a dropout, an activation, a softmax."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, capture, randomise
from regraft.testing import assert_refused, assert_round_trip
from regraft.testing.parts import add_one, negate

X = torch.randn(2, 4, 6, 6)


def with_hook(model: nn.Module, name: str, kind: str) -> nn.Module:
    module = randomise(model).eval().get_submodule(name)
    if kind == "hook":
        module.register_forward_hook(add_one)
    elif kind == "pre-hook":
        module.register_forward_pre_hook(negate)
    else:
        module.forward = lambda x: x * 3
    return model


KINDS = pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])


@KINDS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("between", [nn.Identity, nn.Dropout, nn.Dropout2d])
@pytest.mark.parametrize("rule", [rg.FoldBatchNorm, rg.FuseBatchNorm2dInConv2d])
def test_no_norm_is_folded_past_a_hook(rule, between, form, kind) -> None:
    model = with_hook(nn.Sequential(nn.Conv2d(4, 4, 3), between(), nn.BatchNorm2d(4)), "1", kind)
    gm = capture(model, (X,), form)
    word = "1 has hooks" if kind != "forward" else "1 has a forward of its own"
    if kind == "forward" and form == "trace":
        assert_round_trip(rule(), gm, (X,))
    else:
        assert_refused(rule(), gm, word)


@KINDS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Hardtanh])
@pytest.mark.parametrize("layer", ["conv", "linear"])
def test_no_activation_with_a_hook_is_packed_along(layer, activation, form, kind) -> None:
    first = nn.Conv2d(4, 4, 3) if layer == "conv" else nn.Linear(6, 6)
    gm = capture(with_hook(nn.Sequential(first, activation()), "1", kind), (X,), form)
    report = assert_round_trip(rg.PrepackForCpu(), gm, (X,))
    assert ("applied", "0", "packed") in [row[1:] for row in report.rows()]


class Attention(nn.Module):
    """Attention with modules for the softmax and the dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax, self.dropout = nn.Softmax(-1), nn.Dropout()

    def forward(self, q, k, v):
        return self.dropout(self.softmax(q @ k.transpose(-1, -2) * 0.5)) @ v


@pytest.mark.parametrize("part", ["softmax", "dropout"])
def test_no_attention_is_fused_over_a_hook(part) -> None:
    inputs = tuple(torch.randn(2, 3, 5, 4) for _ in range(3))
    assert assert_round_trip(rg.FuseAttention(), rg.trace(Attention().eval(), inputs), inputs).applied == 1
    gm = rg.trace(with_hook(Attention(), part, "hook"), inputs)
    report = assert_round_trip(rg.FuseAttention(), gm, inputs)
    assert report.applied == 0
    if part == "softmax":
        assert "softmax has hooks" in report.rows()[0][3]


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()

    def forward(self, x):
        return 0.5 * x * (1 + self.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def test_no_gelu_is_fused_over_a_hook() -> None:
    x = torch.randn(4, 4)
    assert assert_round_trip(rg.FuseGelu(), rg.trace(WrittenOut().eval(), (x,)), (x,)).applied == 1
    gm = rg.trace(with_hook(WrittenOut(), "tanh", "hook"), (x,))
    assert assert_round_trip(rg.FuseGelu(), gm, (x,)).applied == 0
