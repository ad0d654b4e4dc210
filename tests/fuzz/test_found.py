"""What the fuzzer has found, as small as it made it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from regraft.testing import assert_round_trip, assert_same_picture, picture
from regraft.testing.parts import randomised


class Functional(nn.Module):
    """A layer's weights, used without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 2), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return F.linear(x, self.linear.weight, self.linear.bias), F.linear(x, self.other.weight) / self.norm.eps


@pytest.mark.parametrize("capture", [lambda m, x: torch.fx.symbolic_trace(m), lambda m, x: rg.trace(m, (x,))])
@pytest.mark.parametrize("rule", [rg.MergeLinears, rg.FuseBiasInLinear, rg.ChangeTrueDivToMulByInverse])
def test_a_layer_whose_weights_are_used_by_a_function_is_the_callers(rule, capture) -> None:
    model, x = randomised(Functional()).eval(), torch.randn(3, 4)
    before = picture(model)
    report = assert_round_trip(rule(), capture(model, x), (x,))
    assert report.applied
    assert_same_picture(before, picture(model), "the caller's model")


def test_the_inverse_of_a_layers_weight_stands_beside_the_layer() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x) / self.norm.running_var

    model, x = randomised(Scaled()).eval(), torch.randn(3, 4)
    before, gm = picture(model), rg.trace(model, (x,))
    assert_round_trip(rg.ChangeTrueDivToMulByInverse(), gm, (x,))
    rg.ChangeTrueDivToMulByInverse()(gm)
    assert_same_picture(before, picture(model), "the caller's model")


def _written_through_a_cast(x):
    y = x.sin()
    z = y * 1
    z.type_as(x).add_(1)  # of one type, so z itself
    return y + z


def _returned_through_a_cast(x):
    y = x.reshape(2, 8)
    return (y * 1).type_as(x)


def _written_through_a_diagonal(x):
    y = x.sin()
    torch.einsum("ii->i", y).mul_(2)
    return y + x.sin()


@pytest.mark.parametrize("function", [_written_through_a_cast, _returned_through_a_cast, _written_through_a_diagonal])
def test_operations_that_return_their_argument_without_saying_so(function) -> None:
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(4, 4)
    for gm in (rg.trace(Model(), (x,)), rg.symbolic_trace(Model())):
        given = x.clone()
        found = rg.RemoveDeadWork()(gm)(given)
        assert torch.equal(found, function(x.clone()))
        found.add_(1)
        assert torch.equal(given, x), "the caller's input was written into"
