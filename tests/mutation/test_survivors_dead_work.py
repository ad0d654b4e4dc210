"""Tests for the mutants of dead work and of the core that had survived; docs/mutation.md explains the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regraft as rg
from helpers import Wrap
from regraft.core import weights
from regraft.core.weights import scaled
from regraft.testing import assert_refused


@torch.fx.wrap
def unknown(value: Tensor) -> Tensor:
    """Something of which regraft knows nothing."""
    return value + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + torch.rand_like(m.weight),
        lambda m, x: x + unknown(m.weight),
        lambda m, x: x + m.weight.add_(1),
    ],
)
def test_what_is_drawn_written_or_unknown_is_no_constant(function) -> None:
    x = torch.randn(4)
    gm = rg.symbolic_trace(Wrap(function, weight=torch.randn(4)))
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["val"] = x
    assert rg.RemoveDeadWork().explain(gm).rows() == []


class Sizes(TorchDispatchMode):
    """Notes how many elements each result in double precision has, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sizes += [result.numel()] if isinstance(result, Tensor) and result.dtype is torch.float64 else []
        return result


@pytest.mark.parametrize(("shape", "blocks"), [((1000, 400), 4), ((3, 1 << 18), 3), ((4, 4), 1), ((1 << 18,), 2)])
def test_little_of_a_large_weight_is_held_in_the_higher_precision(shape: tuple[int, ...], blocks: int) -> None:
    weight = torch.randn(shape)
    for rows in (1, len(weight)):
        factors = torch.rand((rows, *(1,) * (len(shape) - 1)), dtype=torch.float64)
        with Sizes() as seen:
            found = scaled(weight, factors)
        assert torch.equal(found, (weight.double() * factors).float())
        assert max(seen.sizes) <= max(weights._BLOCK, weight[0].numel())
        assert blocks <= len(seen.sizes) <= 10 * blocks


def test_a_weight_without_elements_is_scaled() -> None:
    assert scaled(torch.empty(0, 4), torch.ones(1, 1, dtype=torch.float64)).shape == (0, 4)


def test_a_call_of_which_nothing_is_known_is_not_dead() -> None:
    gm = rg.symbolic_trace(Wrap(lambda m, x: (unknown(x), x * 2)[1]))
    assert_refused(rg.RemoveDeadWork(), gm, match="nothing is known of what unknown does")


def test_what_is_computed_from_values_that_stay_apart_stays_apart() -> None:
    def forward(m, x):
        one, other = x.sin(), x.sin()
        other.add_(1)
        return (one * 2) - (other * 2)

    assert_refused(rg.RemoveDeadWork(), rg.symbolic_trace(Wrap(forward)), match="'mul_1' and 'mul' read different")
