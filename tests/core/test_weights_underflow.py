"""`underflows`: what is not refused is as precise as rounding is, of each row and of each column."""

from __future__ import annotations

import pytest
import torch

from regraft.core.weights import scaled, underflows, wider


@pytest.mark.parametrize("shape", [(24, 40), (24, 10, 3), (24, 1, 3, 3), (1, 40)])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_does_not_underflow_is_precise(dtype: torch.dtype, groups: int, shape: tuple[int, ...]) -> None:
    groups = groups if shape[0] > 1 else 1
    smallest, answers = torch.finfo(dtype).smallest_normal, set()
    for power in range(-4, 16):
        weight = torch.randn(shape).to(dtype)
        weight[torch.rand(shape) < 0.2] = 0
        factors = (torch.rand(shape[0], *[1] * (len(shape) - 1)) + 0.1).to(wider(dtype)) * smallest * 2.0**power
        low = underflows(weight, factors, groups)
        answers.add(low)
        exact = (weight.double() * factors.double()).reshape(groups, -1, shape[1], weight[0, 0].numel())
        off = (scaled(weight, factors).double().view_as(exact) - exact).abs()
        exact = exact.abs()
        axes = (2, 3), (1, 3)
        precise = all((off.sum(axis) <= torch.finfo(dtype).eps * exact.sum(axis)).all() for axis in axes)
        assert low or precise
    assert answers == {True, False}


def test_rows_and_columns_of_one_group_say_nothing_of_another() -> None:
    weight, factors = torch.rand(8, 2, 1).half() + 0.5, torch.ones(8, 2, 1)
    factors[:4, 0] = 1e-6
    assert underflows(weight, factors, 2)
    assert not underflows(weight, torch.ones(8, 2, 1), 2)


def test_a_shift_that_is_not_as_small_hides_what_is_lost() -> None:
    weight, factors = torch.rand(8, 4) + 0.5, torch.full((8, 1), 1e-40, dtype=torch.float64)
    assert underflows(weight, factors)
    assert not underflows(weight, factors, shift=torch.rand(8) + 0.5)
    assert underflows(weight, factors, shift=torch.arange(8.0))
    assert underflows(weight.half(), factors.float() * 1e34, shift=torch.rand(8).half() + 0.5)


def test_zeros_and_what_is_not_there_lose_nothing() -> None:
    weight = torch.rand(8, 4).half() + 0.5
    weight[3], weight[:, 2] = 0, 0
    assert not underflows(weight, torch.ones(8, 1))
    assert not underflows(weight, torch.zeros(1, 1))
    assert not underflows(weight.to("meta"), torch.ones(8, 1))
    assert not underflows(weight[:0], torch.ones(1, 1))
