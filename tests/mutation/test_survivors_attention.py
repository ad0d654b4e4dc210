"""Tests for the mutants of attention that had survived; docs/mutation.md explains those that cannot be caught."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap
from regraft.core.vocabulary import read
from regraft.testing import assert_refused
from regraft.testing.parts import traced_with_shapes
from regraft.transformations._attention import constant, untransposed
from regraft.transformations._attention_masks import largest


class Attention(nn.Module):
    """Attention as a function of a query, a key and a value."""

    def __init__(self, scores) -> None:
        super().__init__()
        self.scores = scores
        self.register_buffer("bias", torch.rand(5, 5), persistent=False)
        self.register_buffer("lowest", torch.where(torch.rand(5, 5) < 0.4, torch.finfo(torch.float32).min, 0.0))
        self.register_buffer("unit", self.lowest * torch.finfo(torch.float32).eps)  # with which it overflows

    def forward(self, q, k, v):
        return torch.softmax(self.scores(self, q, k), -1) @ v


def attention(scores) -> torch.fx.GraphModule:
    qkv = tuple(torch.randn(3, 2, 2, 5, 4))
    model = Attention(scores).eval()
    gm = rg.FuseAttention()(traced_with_shapes(model, qkv, {}))
    torch.testing.assert_close(gm(*qkv), model(*qkv))
    return gm


def calls(gm: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


@pytest.mark.parametrize(
    "turned", [lambda k: k.transpose(-1, -2), lambda k: k.permute(0, 1, 3, 2), lambda k: torch.adjoint(k)]
)
def test_nothing_is_left_of_a_key_that_was_transposed(turned) -> None:
    assert calls(attention(lambda m, q, k: q @ turned(k))) == [F.scaled_dot_product_attention]


def test_a_transposition_is_of_the_last_two_axes() -> None:
    turns = Wrap(lambda m, x: (x.permute(0, 2, 1), x.permute(1, 0, 2), x.view(3, 2, 4)))
    gm = traced_with_shapes(turns, (torch.randn(2, 3, 4),), {})
    x, swapped, others, viewed = list(gm.graph.nodes)[:4]
    assert [untransposed(read(node, gm)) for node in (swapped, others, viewed)] == [x, None, None]


def test_numbers_that_a_graph_makes() -> None:
    gm = torch.fx.symbolic_trace(nn.ReLU())
    full, zeros, ones = (
        gm.graph.call_function(function, arguments)
        for function, arguments in [(torch.full, ([], 0.3)), (torch.zeros, ([],)), (torch.ones, ([],))]
    )
    assert [constant(node, gm) for node in (full, zeros, ones)] == [0.3, 0.0, None]


def test_a_sum_of_what_are_no_scores_is_said_plainly() -> None:
    qkv = tuple(torch.randn(3, 2, 2, 5, 5))
    gm = traced_with_shapes(Attention(lambda m, q, k: q + k), qkv, {})
    assert_refused(rg.FuseAttention(), gm, match="adds two values, neither of them scores")


def test_bounds_of_masks() -> None:
    gm = torch.fx.symbolic_trace(Attention(lambda m, q, k: q @ k.mT + m.bias))
    (bias,) = (node for node in gm.graph.nodes if node.op == "get_attr")
    assert largest(bias, gm) == pytest.approx(float(gm.bias.max()))
    assert largest(-0.5, gm) == 0.5
    assert largest(bias, gm, 0) == math.inf
    assert largest(None, gm) == math.inf
    for bad in (torch.tensor([0.0, math.nan]), torch.empty(0), torch.empty(5, device="meta")):
        gm.bias = bad
        assert largest(bias, gm) == math.inf


def test_no_row_is_lost_to_masks_that_cannot_overflow() -> None:
    for scores in (lambda m, q, k: q @ k.mT + m.lowest, lambda m, q, k: q @ k.mT + m.lowest + m.bias):
        gm = attention(scores)
        assert torch.all not in calls(gm)
    for scores in (lambda m, q, k: q @ k.mT + m.lowest + m.lowest, lambda m, q, k: q @ k.mT + m.lowest + m.unit):
        assert torch.all in calls(attention(scores))
