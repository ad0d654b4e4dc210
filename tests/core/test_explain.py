"""`explain` is a dry run; applying is logged; `strict=True` raises where nothing was done."""

from __future__ import annotations

import json
import logging
import operator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import regraft as rg
from helpers import FORMS, Wrap, assert_same, capture, picture, randomise

X = torch.randn(2, 4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return (self.q(x) / 2.0) @ self.k(x).t() @ self.v(x)


def net() -> nn.Module:
    parts = [Attention(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)]
    return randomise(nn.Sequential(*parts)).eval()


ALL = rg.compose(rg.MergeLinears(), rg.ChangeTrueDivToMulByInverse(), rg.FoldBatchNorm(), rg.FuseBiasInLinear())
RULES = [*ALL.transformations, ALL]


class Largest(TorchDispatchMode):
    """The size in bytes of the largest tensor made on the CPU, views of the weights apart."""

    def __init__(self, model):
        super().__init__()
        self.size = 0
        self.known = {parameter.data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.data_ptr() not in self.known:
                self.size = max(self.size, value.nbytes)
        return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_it_says_what_applying_does_and_changes_nothing(rule, form):
    model = net()
    gm = capture(model, (X,), form)
    before, caller, random = picture(gm), picture(model), torch.get_rng_state()
    report = rule.explain(gm)
    assert_same(before, picture(gm))
    assert_same(caller, picture(model))
    assert rg.history(gm) == ()
    assert torch.equal(random, torch.get_rng_state())
    rule(gm)
    done = rg.Report("", rg.history(gm))
    assert report.rows() == done.rows()
    assert report.applied > 0


@pytest.mark.parametrize("rule", [rg.MergeLinears(), rg.FuseBiasInLinear(), rg.FoldBatchNorm()])
def test_it_allocates_nothing_big(rule):
    parts = {"a": nn.Linear(256, 256), "b": nn.Linear(256, 256), "c": nn.Linear(256, 256), "n": nn.BatchNorm1d(256)}
    model = Wrap(lambda self, x: self.n(self.c(self.a(x) + self.b(x))), **parts).eval()
    gm = capture(model, (), "fx")
    with Largest(gm) as largest:
        assert rule.explain(gm).applied
    assert largest.size < 256 * 256
    with Largest(gm) as largest:
        rule(gm)
    assert largest.size >= 256 * 256 * 4, "the measure must see what applying allocates"


def test_of_a_users_own_transformation():
    class Scale(rg.Transformation):
        def transform(self, graph_module):
            with torch.no_grad():
                graph_module.get_submodule("1").weight.mul_(2)
            for node in graph_module.graph.nodes:
                if node.target is operator.truediv:
                    node.target = operator.mul
            return graph_module

    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    assert Scale().explain(gm).applied == 1
    assert_same(before, picture(gm))


class Retargets(rg.Transformation):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target == self.old:
                node.target = self.new
        return graph_module


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: rg.compose(rg.MergeLinears(), rule)])
def test_of_what_leaves_no_valid_graph_it_raises_as_applying_does(wrap, form):
    gm = capture(net(), (X,), form)
    before, rule = picture(gm), wrap(Retargets("1", "nosuch"))
    for run in (rule, rule.explain):
        with pytest.raises(RuntimeError, match="nosuch"):
            run(gm)
        assert_same(before, picture(gm))


def test_of_a_composition_only_the_last_graph_has_to_be_valid():
    gm = capture(net(), (X,), "fx")
    rule = rg.compose(Retargets("1", "nosuch"), Retargets("nosuch", "3"))
    assert rule.explain(gm).applied == 2
    assert rule(gm)(X).shape == X.shape


def test_the_report():
    gm = capture(net(), (X,), "fx")
    report = ALL.explain(gm)
    text = str(report)
    assert "MergeLinears: 1 applied, 0 refused" in text
    assert "merged q + k + v" in text
    assert "3 has no bias" in text
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert (data["applied"], data["refused"]) == (report.applied, report.refused)
    assert {"transformation", "outcome", "site", "sentence"} == set(data["sites"][0])
    assert "<table>" in report._repr_html_()
    assert "3 has no bias" in report._repr_html_()


def test_no_candidate_is_said_loudly(caplog):
    gm = capture(nn.Sequential(nn.ReLU()), (X,), "fx")
    assert "no candidate site was found" in str(rg.MergeLinears().explain(gm))
    with caplog.at_level(logging.WARNING, "regraft"):
        rg.MergeLinears()(gm)
    assert "MergeLinears rewrote nothing: no candidate was found" in caplog.text


def test_one_info_line_per_site(caplog):
    gm = capture(net(), (X,), "fx")
    with caplog.at_level(logging.INFO, "regraft"):
        rg.MergeLinears()(gm)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines == ["merged q + k + v (0)"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "regraft"):
        rg.FuseBiasInLinear()(gm)
    assert "FuseBiasInLinear refused (3): 3 has no bias" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_strict(form):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    gm = capture(model, (X,), form)
    before = picture(gm)
    with pytest.raises(rg.NothingApplied, match="FuseBiasInLinear rewrote nothing: 0: 0 has no bias"):
        rg.FuseBiasInLinear()(gm, strict=True)
    with pytest.raises(rg.NothingApplied, match="no candidate was found"):
        rg.FoldBatchNorm()(gm, strict=True)
    assert_same(before, picture(gm))
    assert rg.history(gm) == ()
    gm = capture(net(), (X,), form)
    rg.FuseBiasInLinear()(gm, strict=True)
