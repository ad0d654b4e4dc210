"""Tests for the mutants that had survived; docs/mutation.md explains those that cannot be caught."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from regraft.testing import assert_refused
from regraft.testing.parts import add_one


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.q(x), self.k(x)


class Vector(nn.Module):
    """A weight that is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
        self.other = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias), F.linear(x, self.other)


@pytest.mark.parametrize("rule", [rg.FuseBiasInLinear, rg.MergeLinears])
def test_a_hook_is_not_lost(rule: type[rg.Rewrite]) -> None:
    model = Block().eval()
    model.q.register_forward_hook(add_one)
    model.k.register_forward_hook(add_one)
    assert_refused(rule(), torch.fx.symbolic_trace(model), match="q has hooks")


@pytest.mark.parametrize("rule", [rg.FuseBiasInLinear, rg.MergeLinears])
def test_a_weight_that_is_a_vector(rule: type[rg.Rewrite]) -> None:
    assert_refused(rule(), torch.fx.symbolic_trace(Vector()), match="not a matrix|no bias")


def test_a_fused_layer_says_how_many_features_it_takes() -> None:
    gm = rg.FuseBiasInLinear()(torch.fx.symbolic_trace(Block().eval()))
    assert (gm.q.in_features, gm.q.out_features) == (5, 2)


def test_the_merged_layer_stands_where_its_parts_stood() -> None:
    gm = rg.MergeLinears()(torch.fx.symbolic_trace(nn.Sequential(Block().eval())))
    assert [name for name, module in gm.named_modules() if isinstance(module, nn.Linear)] == ["0.q_k"]
