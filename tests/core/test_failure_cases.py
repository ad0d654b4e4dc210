"""Cases that graph transformations get wrong, held against every rule of the registry and not only the one they met."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, capture, check_applied, picture, randomise
from regraft.testing import assert_round_trip

RULES = pytest.mark.parametrize("rule", rg.TRANSFORMATIONS, ids=lambda rule: rule.__name__)


class Concatenated(nn.Module):
    """A leaf whose first argument is a list."""

    def forward(self, values, dim=0):
        return torch.cat(values, dim)


class Odd(nn.Module):
    """Sites for most rules, between leaves that are called by keyword only and with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.SiLU()
        self.q, self.k, self.cat = nn.Linear(4, 4), nn.Linear(4, 4), Concatenated()

    def forward(self, x):
        y = self.act(input=self.norm(input=self.conv(input=x))).mean((2, 3)) / 3.0
        return self.cat([self.q(input=y) * 0.5, self.k(input=y) + 1], dim=-1)


class Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m, name):
        return isinstance(m, Concatenated) or super().is_leaf_module(m, name)


@RULES
def test_leaves_called_by_keyword_or_with_a_list(rule) -> None:
    model, x = randomise(Odd()).eval(), torch.randn(2, 2, 3, 3)
    gm = torch.fx.GraphModule(model, Tracer().trace(model))
    report = assert_round_trip(rule(), gm, (x,))
    sites = {rg.MergeLinears: 1, rg.FuseBiasInLinear: 2, rg.FoldBatchNorm: 1, rg.FuseBatchNorm2dInConv2d: 1}
    sites |= {rg.ReplaceActivation: 1, rg.FoldScale: 1}  # the quotient may be rounded in a leaf of the caller's own
    assert report.applied >= sites.get(rule, 0), str(report)


@RULES
def test_on_the_meta_device_no_memory_is_made_and_no_random_number_drawn(rule) -> None:
    with torch.device("meta"):
        model = Odd().eval()
    gm = torch.fx.GraphModule(model, Tracer().trace(model))
    before, random = picture(gm), torch.get_rng_state()
    result = rule()(gm)
    assert all(tensor.is_meta for tensor in (*result.parameters(), *result.buffers()))
    while rg.history(gm):
        rg.undo(gm)
    assert picture(gm) == before
    assert torch.equal(random, torch.get_rng_state())


class Lora(nn.Module):
    """A frozen base with a trained branch of low rank beside it, three times on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 4, bias=False) for _ in range(3))

    def forward(self, x):
        return [self.base[i](x) + self.up[i](self.down[i](x)) for i in range(3)]


@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_base_is_not_merged_with_its_trained_branch(form) -> None:
    gm = check_applied(rg.MergeLinears(), randomise(Lora()), (torch.randn(2, 4),), form, sites=2)
    merged = [module for module in gm.modules() if isinstance(module, nn.Linear) and module.out_features in (12, 6)]
    assert [(m.out_features, m.weight.requires_grad) for m in merged] == [(12, False), (6, True)]
    gm(torch.randn(2, 4))[0].sum().backward()
    assert merged[0].weight.grad is None
    assert merged[1].weight.grad is not None


@pytest.mark.parametrize("form", FORMS)
def test_one_frozen_base_and_its_branch_stay_two(form) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down = nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 2, bias=False)

        def forward(self, x):
            return self.base(x), self.down(x)

    (row,) = rg.MergeLinears().explain(capture(One(), (torch.randn(2, 4),), form)).rows()
    assert row[1] == "refused"
    assert "base.weight is frozen and down.weight is trainable" in row[3]
