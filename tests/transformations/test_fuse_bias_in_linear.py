"""`FuseBiasInLinear`."""

from __future__ import annotations

import cProfile
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, capture, check_applied, check_refused, randomise

FUSE = rg.FuseBiasInLinear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (2, 1, 3, 4)])
def test_every_dtype_and_rank(dtype, width, shape):
    net = randomise(nn.Sequential(nn.Linear(4, width))).to(dtype)
    gm = check_applied(FUSE, net, (torch.randn(shape).to(dtype),))
    assert gm.get_submodule("0").bias is None


@pytest.mark.parametrize("form", FORMS)
def test_keyword_calls(form):
    net = Wrap(lambda self, x: self.a(input=x), a=nn.Linear(4, 4))
    check_applied(FUSE, randomise(net), (torch.randn(2, 4),), form)


@pytest.mark.parametrize("form", FORMS)
def test_functional_calls(form):
    net = Wrap(
        lambda self, x: F.linear(x, bias=self.b, weight=self.w),
        w=nn.Parameter(torch.randn(3, 4)),
        b=nn.Parameter(torch.randn(3)),
    )
    check_applied(FUSE, net, (torch.randn(2, 4),), form)


@pytest.mark.parametrize("form", FORMS)
def test_several_layers(form):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    gm = capture(randomise(net), (torch.randn(2, 4),), form)
    FUSE(gm)
    step = rg.history(gm)[0]
    assert [site.where for site in step.applied] == ["0", "3"]
    assert [refusal.reason for refusal in step.refused] == ["2 has no bias"]


def test_what_comes_back_can_be_saved_and_owns_its_memory():
    gm = capture(randomise(nn.Sequential(nn.Linear(4, 3))), (), "fx")
    FUSE(gm)
    with torch.no_grad():
        gm.get_submodule("0").weight.mul_(2)
    FUSE(gm, reverse=True)
    restored = gm.get_submodule("0")
    assert restored.weight.is_contiguous()
    assert restored.weight.untyped_storage().nbytes() == 4 * 12
    torch.save(gm.state_dict(), io.BytesIO())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("net", "sites", "words"),
    [
        (Wrap(lambda self, x: self.a(self.a(x)), a=nn.Linear(4, 4)), 2, "a is called 2 times"),
        (nn.Sequential(nn.Linear(4, 4, bias=False)), 1, "has no bias"),
    ],
)
def test_refused(net, sites, words, form):
    check_refused(FUSE, randomise(net), (torch.randn(2, 4),), form, words, sites=sites)


def test_refused_where_weight_and_bias_differ():
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].bias.requires_grad_(False)
    check_refused(FUSE, randomise(net), (torch.randn(2, 4),), "fx", "0.bias is frozen and 0.weight is trainable")
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    net[1].bias = net[0].bias
    check_refused(FUSE, randomise(net), (torch.randn(2, 4),), "fx", "tied to")


def test_many_layers_in_linear_cost() -> None:
    # function calls, which, unlike seconds, are the same on every machine
    calls = []
    for depth in (50, 400):
        gm = capture(nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth))), (), "fx")
        profile = cProfile.Profile()
        with profile:
            FUSE(gm)
            FUSE(gm, reverse=True)
        calls.append(sum(entry.callcount for entry in profile.getstats()) / depth)
    assert calls[1] < 1.1 * calls[0]
