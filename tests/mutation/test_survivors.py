"""Tests for the mutants that had survived; docs/mutation.md explains those that cannot be caught."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from regraft.core.weights import Concatenate, same_bits, scaled, wider
from regraft.testing import assert_refused, assert_round_trip
from regraft.testing.parts import add_one, traced_with_shapes


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


class Buffer(nn.Module):
    """Divides by a buffer, and rounds."""

    def __init__(self, divisor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("divisor", divisor)

    def forward(self, x):
        return (x / self.divisor).floor()


class Divided(nn.Module):
    def forward(self, x):
        return x / 4


class Subclass(torch.Tensor):
    """No ordinary tensor."""


def test_only_a_buffer_of_powers_of_two_is_inverted_before_rounding() -> None:
    exact = rg.symbolic_trace(Buffer(torch.tensor([8.0, 0.5])))
    assert assert_round_trip(rg.ChangeTrueDivToMulByInverse(), exact, (torch.randn(3, 2),)).applied == 1
    for divisor in ([3.0, 7.0], [8.0, 7.0]):
        gm = rg.symbolic_trace(Buffer(torch.tensor(divisor)))
        assert_refused(rg.ChangeTrueDivToMulByInverse(), gm, match="rounded or compared")


def test_a_divisor_of_another_class_stays() -> None:
    gm = rg.symbolic_trace(Buffer(torch.tensor([8.0]).as_subclass(Subclass)))
    assert_refused(rg.ChangeTrueDivToMulByInverse(), gm, match="is a Subclass")


def test_the_report_names_the_divisor_and_its_inverse() -> None:
    gm = rg.ChangeTrueDivToMulByInverse()(rg.symbolic_trace(Divided()))
    assert [site.sentence for site in rg.history(gm)[0].applied] == ["/ 4 became * 0.25"]


@pytest.mark.parametrize("shape", [(300, 200), (3, 40000), (1, 70000), (40000,), (4, 4)])
@pytest.mark.parametrize("one", [True, False])
def test_a_large_weight_is_scaled_in_blocks(shape: tuple[int, ...], one: bool) -> None:
    weight = torch.randn(shape)
    factors = torch.randn(1 if one else len(weight), *(1,) * (len(shape) - 1), dtype=torch.float64)
    result = scaled(weight, factors)
    assert result.dtype is weight.dtype
    assert torch.equal(result, (weight.double() * factors).float())


def test_a_scalar_weight_is_scaled() -> None:
    assert scaled(torch.tensor(3.0), torch.tensor(2.0, dtype=torch.float64)).item() == 6


def test_halves_are_computed_in_float32_and_the_others_in_float64() -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [wider(dtype) for dtype in types] == [torch.float32, torch.float32, torch.float64, torch.float64]


def test_the_same_bits() -> None:
    one = torch.tensor([1.0, math.nan])
    assert same_bits(one, one.clone())
    assert same_bits(torch.tensor([1j]), torch.tensor([1j]))
    assert same_bits(torch.tensor([1]), torch.tensor([1]))
    assert same_bits(one.to("meta"), one.to("meta"))
    others = [one.double(), one[:1], torch.tensor([[1.0, math.nan]]), one.to("meta"), torch.tensor([1.0, 0.0])]
    assert not any(same_bits(one, other) for other in others)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1j]), torch.tensor([-1j]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([2]))


def test_zeros_that_were_put_in_come_out_only_while_they_are_zeros() -> None:
    a, b = torch.randn(2), torch.randn(3)
    joined = Concatenate(0, ((2,), (4,), (3,)), (False, True, False), ((2,), (3, 1)))
    whole = joined.compute(a, b.reshape(3, 1))
    assert torch.equal(whole, torch.cat([a, torch.zeros(4), b]))
    back = joined.invert(whole)
    assert back is not None
    assert torch.equal(back[0], a)
    assert torch.equal(back[1], b.reshape(3, 1))
    assert joined.invert(whole + 1) is None
    assert joined.invert(whole.to("meta")) is not None


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 2)

    def forward(self, x):
        return self.q(x) + self.q(x)


def test_the_same_layer_twice_is_said_plainly() -> None:
    assert_refused(
        rg.MergeLinears(), rg.symbolic_trace(Twice()), match="q is called 2 times, and a rewrite of one call"
    )


class Rows(nn.Module):
    """Rearranges the rows of a layer, then normalises."""

    def __init__(self, shape: tuple[int, ...], norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.shape, self.norm = nn.Linear(4, 4), shape, norm

    def forward(self, x):
        return self.norm(self.linear(x).reshape(self.shape))


class HalfOfTheStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return F.batch_norm(self.linear(x), self.mean, None)


def test_a_norm_without_a_variance_is_refused() -> None:
    gm = torch.fx.symbolic_trace(HalfOfTheStatistics().eval())
    assert_refused(rg.FoldBatchNorm(), gm, match="keeps no running statistics")


@pytest.mark.parametrize(("shape", "sites"), [((-1, 4), 1), ((8, 1, 3), 0), ((3, 4, 2), 0), ((3, 2, 4), 0)])
def test_only_whole_rows_may_stand_between(shape: tuple[int, ...], sites: int) -> None:
    x = torch.randn(2, 3, 4)
    model = Rows(shape, nn.BatchNorm1d(shape[1])).eval()
    gm = traced_with_shapes(model, (x,), {})
    assert assert_round_trip(rg.FoldBatchNorm(), gm, (x,)).applied == sites


def test_ranks_that_are_known_fold_where_they_fit() -> None:
    for model, x in (
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 4, 5, 5)),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)),
    ):
        gm = traced_with_shapes(model.eval(), (x,), {})
        assert assert_round_trip(rg.FoldBatchNorm(), gm, (x,)).applied == 1
    gm = traced_with_shapes(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (torch.randn(2, 4, 4),), {})
    assert_refused(rg.FoldBatchNorm(), gm, match="not the axis of the features")


def test_only_a_layer_that_takes_several_ranks_minds_the_rank() -> None:
    for layer, norm, same in ((nn.Conv2d, nn.BatchNorm2d, True), (nn.Conv1d, nn.BatchNorm1d, False)):
        gm = rg.FoldBatchNorm()(torch.fx.symbolic_trace(nn.Sequential(layer(4, 4, 3), norm(4)).eval()))
        assert (type(gm.get_submodule("0")) is layer) == same


def test_a_layer_of_two_names_that_is_called_once() -> None:
    gm = torch.fx.symbolic_trace(Block().eval())
    gm.add_submodule("other", gm.q)
    assert_refused(rg.MergeLinears(), gm, match="q is registered under several names")
