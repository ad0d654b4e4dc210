"""Tests for the mutants of attention that had survived; docs/mutation.md explains those that cannot be caught."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap
from regraft.core.query import Facts
from regraft.core.vocabulary import read
from regraft.testing import assert_refused
from regraft.testing.parts import traced_with_shapes
from regraft.transformations._attention import constant, untransposed
from regraft.transformations._attention_calls import repeated
from regraft.transformations._attention_masks import largest
from regraft.transformations._constants import constant_value


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
    named = gm.graph.call_function(torch.full, ([],), {"fill_value": 0.4})
    sized = gm.graph.call_function(torch.full, (), {"size": [], "fill_value": 0.4})
    facts = Facts(gm)
    assert [constant(node, facts) for node in (full, zeros, ones)] == [0.3, 0.0, None]
    assert [constant(node, facts) for node in (named, sized)] == [0.4, None]


def test_a_buffer_is_a_number_only_where_no_checkpoint_replaces_it() -> None:
    parts = {"fixed": torch.tensor(2.0), "saved": torch.tensor(3.0), "two": torch.ones(2), "meta": torch.ones(())}
    parts["meta"] = parts["meta"].to("meta")
    gm = rg.symbolic_trace(Wrap(lambda m, x: (x, m.fixed, m.saved, m.two, m.meta), **parts))
    gm._non_persistent_buffers_set.update({"fixed", "two", "meta"})
    (values,) = gm.graph.output_node().args
    assert [constant(value, Facts(gm)) for value in values] == [None, 2.0, None, None, None]


def test_a_sum_of_what_are_no_scores_is_said_plainly() -> None:
    qkv = tuple(torch.randn(3, 2, 2, 5, 5))
    gm = traced_with_shapes(Attention(lambda m, q, k: q + k), qkv, {})
    assert_refused(rg.FuseAttention(), gm, match="adds two values, neither of them scores")


def test_bounds_of_masks() -> None:
    gm = torch.fx.symbolic_trace(Attention(lambda m, q, k: q @ k.mT + m.bias))
    (bias,) = (node for node in gm.graph.nodes if node.op == "get_attr")
    assert largest(bias, Facts(gm)) == pytest.approx(float(gm.bias.max()))
    assert largest(-0.5, Facts(gm)) == 0.5
    assert largest(bias, Facts(gm), 0) == math.inf
    assert largest(None, Facts(gm)) == math.inf
    for bad in (torch.tensor([0.0, math.nan]), torch.empty(0), torch.empty(5, device="meta")):
        gm.bias = bad
        assert largest(bias, Facts(gm)) == math.inf


def test_no_row_is_lost_to_masks_that_cannot_overflow() -> None:
    for scores in (lambda m, q, k: q @ k.mT + m.lowest, lambda m, q, k: q @ k.mT + m.lowest + m.bias):
        gm = attention(scores)
        assert torch.all not in calls(gm)
    for scores in (lambda m, q, k: q @ k.mT + m.lowest + m.lowest, lambda m, q, k: q @ k.mT + m.lowest + m.unit):
        assert torch.all in calls(attention(scores))


@pytest.mark.parametrize(
    ("scores", "scale"),
    [
        (lambda m, q, k: 0.3 * (q @ k.transpose(2, 3)), 0.3),
        (lambda m, q, k: (0.3 * q) @ k.transpose(2, 3), 0.3),
        (lambda m, q, k: (q / 2) @ k.transpose(2, 3), 0.5),
        (lambda m, q, k: (2 / q) @ k.transpose(2, 3), 1.0),
        (lambda m, q, k: (q * q) @ k.transpose(2, 3), 1.0),
        (lambda m, q, k: (q / k) @ k.transpose(2, 3), 1.0),
    ],
)
def test_a_scale_joins_the_call_and_a_number_that_is_divided_does_not(scores, scale: float) -> None:
    gm = attention(scores)
    (call,) = (node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention)
    assert call.kwargs["scale"] == scale
    assert len(calls(gm)) == (1 if scale != 1 else 2)


def test_a_number_that_is_divided_by_the_scores_is_no_scale() -> None:
    gm = traced_with_shapes(Attention(lambda m, q, k: 2 / (q @ k.mT)), tuple(torch.randn(3, 2, 2, 5, 4)), {})
    assert_refused(rg.FuseAttention(), gm, match="scales by something else than a number")


def test_bounds_of_masks_behind_views_and_choices() -> None:
    table, small, large = nn.Embedding(5, 2), torch.tensor([[0.5, -1.0]]), torch.tensor([[2.0], [3.0]])

    def forward(m, x):
        looked_up = m.table(x)
        parted = torch.unflatten(looked_up, 0, (1, -1))
        chosen = torch.where(x > 0, m.small, m.large)
        filled = torch.masked_fill(m.large, x > 0, -7.0)
        return looked_up, looked_up.permute(1, 0), parted, chosen, looked_up + m.large, filled, looked_up.sin()

    gm = torch.fx.symbolic_trace(Wrap(forward, table=table, small=small, large=large))
    (found,) = gm.graph.output_node().args
    most, facts = float(table.weight.detach().abs().max()), Facts(gm)
    assert [largest(node, facts) for node in found] == [most, most, most, 3.0, most + 3.0, 7.0, math.inf]
    assert [largest(node, facts, 1) for node in found] == [most, *(math.inf,) * 6]
    assert [largest(node, facts, 2) for node in found] == [largest(node, facts) for node in found]


@pytest.mark.parametrize(("lowest", "applied"), [(-50.0, 1), (-65504.0, 0), (-math.inf, 0)])
def test_in_float16_a_bias_may_be_added_and_what_hides_may_not(lowest: float, applied: int) -> None:
    qkv = tuple(torch.randn(3, 2, 2, 5, 4).half())
    model = Attention(lambda m, q, k: q @ k.mT + m.lowest).half()
    model.lowest = torch.where(torch.rand(5, 5) < 0.4, lowest, 0.0).half()
    gm = traced_with_shapes(model, qkv, {})
    report = rg.FuseAttention().explain(gm)
    assert report.applied == applied
    assert applied or "float16 rounds away the scores" in report.rows()[0][3]
    torch.testing.assert_close(rg.FuseAttention()(gm)(*qkv), model(*qkv), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("known", [True, False])
def test_a_mask_is_of_the_dtype_of_the_query_for_certain(known: bool) -> None:
    qkv = tuple(torch.randn(3, 2, 2, 5, 4).bfloat16())
    model = Attention(lambda m, q, k: (q @ k.mT + m.bias).to(q.dtype))
    model.bias = model.bias.bfloat16() if not known else model.bias
    gm = traced_with_shapes(model, qkv, {})
    if not known:
        (mask,) = (node for node in gm.graph.nodes if node.op == "get_attr")
        del mask.meta["val"]
    assert_refused(rg.FuseAttention(), gm, match="the mask 'bias' is not of torch.bfloat16")


FUSED = F.scaled_dot_product_attention


def of_three(function, q: torch.Tensor, kv: torch.Tensor, **parts) -> torch.fx.GraphModule:
    """A graph of a function of a query, a key and a value, whose buffers no checkpoint replaces."""

    class Three(Wrap):
        def forward(self, q, k, v):
            return self.function(self, q, k, v)

    gm = rg.symbolic_trace(Three(function, **parts))
    gm._non_persistent_buffers_set.update(parts)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(q, kv, kv)
    return gm


def settings(gm: torch.fx.GraphModule) -> dict[str, object]:
    (call,) = (node for node in gm.graph.nodes if node.target is FUSED)
    return call.kwargs


def twice(k: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(k, 2, 1)


@pytest.mark.parametrize(("start", "grouped"), [(0, True), (1, False)])
def test_an_index_that_adds_an_axis_takes_the_whole_of_the_others(start: int, grouped: bool) -> None:
    def repeat(k):  # one of two positions is expanded to two again
        return k[:, :, None, slice(1, None) if start else slice(None), :].expand(3, 2, 4, 2, 5).reshape(3, 8, 2, 5)

    q, kv = torch.randn(3, 8, 2, 5), torch.randn(3, 2, 2, 5)
    gm = of_three(lambda m, q, k, v: torch.softmax(q @ repeat(k).transpose(2, 3), -1) @ repeat(v), q, kv)
    expected = gm(q, kv, kv)
    assert settings(rg.FuseAttention()(gm)).get("enable_gqa", False) is grouped
    torch.testing.assert_close(gm(q, kv, kv), expected)


def test_how_often_heads_are_repeated() -> None:
    gm = traced_with_shapes(Wrap(lambda m, k: twice(k)), (torch.randn(1, 3, 5, 4),), {})
    source, node, _ = gm.graph.nodes
    assert repeated(node, gm) == (source, 2)


@pytest.mark.parametrize("forgotten", [None, "x", "expand", "reshape"])
def test_a_repetition_is_known_by_its_shapes(forgotten: str | None) -> None:
    wide = Wrap(lambda m, k: k.unsqueeze(2).expand(1, 3, 2, 5, 4).reshape(1, 6, 5, 4))
    gm = traced_with_shapes(wide, (torch.randn(1, 3, 5, 4),), {})
    nodes = {node.name: node for node in gm.graph.nodes}
    if forgotten is not None:
        del nodes[forgotten].meta["val"]
    assert repeated(nodes["reshape"], gm) == ((nodes["x"], 2) if forgotten is None else None)


def test_one_query_for_all_heads_keeps_the_repetition() -> None:
    gm = of_three(lambda m, q, k, v: FUSED(q, twice(k), twice(v)), torch.randn(2, 1, 5, 4), torch.randn(2, 3, 5, 4))
    assert_refused(rg.FuseAttention(), gm, match="another number of heads than the repeated keys")


def test_on_another_device_the_repetition_stays() -> None:
    with FakeTensorMode():
        q, kv = torch.empty(2, 6, 5, 4, device="cuda"), torch.empty(2, 3, 5, 4, device="cuda")
        gm = of_three(lambda m, q, k, v: FUSED(q, twice(k), twice(v)), q, kv)
    assert_refused(rg.FuseAttention(), gm, match="the keys and values are not on the CPU")


def test_the_report_says_what_a_call_no_longer_gets() -> None:
    q, kv, earlier = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4), torch.ones(5, 5, dtype=torch.bool).tril()
    forms = {
        "the mask is causal": (lambda m, q, k, v: FUSED(q, k, v, m.earlier), kv),
        "the keys and values are not repeated": (lambda m, q, k, v: FUSED(q, twice(k), twice(v)), q),
        "the keys and values are not repeated, the mask is causal": (
            lambda m, q, k, v: FUSED(q, twice(k), twice(v), m.earlier),
            q,
        ),
    }
    for sentence, (function, query) in forms.items():
        gm = rg.FuseAttention()(of_three(function, query, kv, earlier=earlier))
        assert [site.sentence for site in rg.history(gm)[0].applied] == [sentence]


def test_a_mask_of_one_number_before_a_query_of_one_position_is_not_causal() -> None:
    q, kv = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 5, 4)
    gm = of_three(lambda m, q, k, v: FUSED(q, k, v, m.mask), q, kv, mask=torch.ones(1, 1, dtype=torch.bool))
    assert_refused(rg.FuseAttention(), gm, match="not known to be causal")


def test_a_causal_mask_that_the_graph_writes_is_not_known() -> None:
    def forward(m, q, k, v):
        return FUSED(q, k, v, m.earlier), m.earlier.logical_not_()

    x = torch.randn(2, 3, 5, 4)
    gm = of_three(forward, x, x, earlier=torch.ones(5, 5, dtype=torch.bool).tril())
    assert_refused(rg.FuseAttention(), gm, match="not known to be causal")


def test_a_constant_is_known_by_its_weights_or_its_shape() -> None:
    earlier = torch.ones(5, 5, dtype=torch.bool).tril()
    gm = rg.symbolic_trace(Wrap(lambda m, x: (m.earlier, m.earlier.logical_not(), x), earlier=earlier))
    gm._non_persistent_buffers_set.add("earlier")
    (values,) = gm.graph.output_node().args
    found = [constant_value(value, gm, Facts(gm), 25) for value in values]
    assert found[0] is gm.earlier
    assert found[1:] == [None, None]
    assert constant_value(values[0], gm, Facts(gm), 24) is None
    values[1].meta["val"] = torch.empty(5, 5, dtype=torch.bool)
    assert torch.equal(constant_value(values[1], gm, Facts(gm), 25), ~earlier)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda m, q, k: q @ k, "fused attention, scale 1"),
        (lambda m, q, k: (q @ k + m.bias) + m.bias, "fused attention, scale 1, masks: 2"),
        (lambda m, q, k: (q @ k).masked_fill(m.later, -math.inf), "fused attention, scale 1, causal"),
    ],
)
@pytest.mark.parametrize("grouped", [True, False])
def test_the_report_says_what_became_of_the_masks(function, sentence: str, grouped: bool) -> None:
    def forward(m, q, k, v):
        k, v = (twice(k), twice(v)) if grouped else (k, v)
        return torch.softmax(function(m, q, k.transpose(2, 3)), -1) @ v

    q, kv = torch.randn(2, 6, 5, 4), torch.randn(2, 3 if grouped else 6, 5, 4)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    gm = rg.FuseAttention()(of_three(forward, q, kv, bias=torch.randn(5, 5), later=later))
    (site,) = rg.history(gm)[0].applied
    assert site.sentence == sentence + (", keys and values not repeated" if grouped else "")
