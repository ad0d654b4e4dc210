"""`compose`: none, one, several and compositions; in place or not; reversed; pickled."""

from __future__ import annotations

import operator
import pickle

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, Wrap, assert_matches_float64, assert_same, capture, copies, picture, randomise, values_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return (self.q(y) / 7.0) @ self.k(y).transpose(-1, -2) @ self.v(y)


X = torch.randn(2, 4, 4)
ALL = (rg.ChangeTrueDivToMulByInverse(), rg.MergeLinears(), rg.FoldBatchNorm(), rg.FuseBiasInLinear())


def net() -> nn.Module:
    return randomise(Net()).eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "parts",
    [
        (),
        (rg.MergeLinears(),),
        ALL,
        ALL[::-1],
        (rg.compose(*ALL[:2]), rg.compose(), rg.compose(rg.compose(ALL[2]))),
        (*ALL, *ALL),
        (rg.LintAndRecompile(), rg.MergeLinears(), rg.LintAndRecompile()),
    ],
)
def test_there_and_back(parts, form):
    model = net()
    gm = capture(model, (X,), form)
    before, caller = picture(gm), picture(model)
    t = rg.compose(*parts)
    assert t.preserves_computation
    assert isinstance(t, rg.ReversibleTransformation)
    assert t(gm) is gm
    assert_matches_float64(model, gm, (X,), slack=8)
    assert_same(caller, picture(model))
    for other in copies(gm).values():
        assert_same(values_of(before), values_of(picture(t(other, reverse=True))))
    assert t(gm, reverse=True) is gm
    assert_same(before, picture(gm))


@pytest.mark.parametrize("form", FORMS)
def test_not_in_place(form):
    model = net()
    gm = capture(model, (X,), form)
    before = picture(gm)
    t = rg.compose(*ALL, inplace=False)
    new = t(gm)
    assert new is not gm
    assert_same(before, picture(gm))
    assert not rg.history(gm)
    assert_matches_float64(model, new, (X,), slack=8)
    rewritten = picture(new)
    back = t(new, reverse=True)
    assert back is not new
    assert_same(rewritten, picture(new))
    assert_same(before, picture(back))


def test_not_in_place_shares_every_weight_that_is_not_rewritten():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)).eval()
    gm = capture(model, (), "fx")
    new = rg.compose(rg.FoldBatchNorm(), inplace=False)(gm)
    assert new.get_submodule("0") is gm.get_submodule("0") is model[0]
    assert new.get_submodule("1") is not model[1]


def test_one_step_of_a_composition_is_undone_alone():
    gm = capture(net(), (X,), "fx")
    rg.compose(*ALL[:3])(gm)
    rg.undo(gm, "ChangeTrueDivToMulByInverse")
    assert [step.transformation for step in rg.history(gm)] == ["MergeLinears", "FoldBatchNorm"]
    assert "truediv" in gm.code


def test_reversing_what_was_never_applied_changes_nothing():
    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    rg.compose(*ALL)(gm, reverse=True)
    assert_same(before, picture(gm))


def test_compositions_pickle():
    t = rg.compose(*ALL, inplace=False)
    again = pickle.loads(pickle.dumps(t))
    assert again.signature == t.signature
    gm = capture(net(), (X,), "fx")
    new = t(gm)
    assert_same(values_of(picture(gm)), values_of(picture(again(new, reverse=True))))


def test_lints_and_recompiles_once(monkeypatch):
    gm = capture(net(), (X,), "fx")
    calls = []
    original = type(gm).recompile
    monkeypatch.setattr(type(gm), "recompile", lambda self: (calls.append(1), original(self))[1])
    rg.compose(*ALL)(gm)
    assert len(calls) == 1
    rg.compose(*ALL)(gm, lint_and_recompile=False)
    assert len(calls) == 1


class Twice(rg.Transformation):
    """Has no reverse."""

    preserves_computation = False

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target == operator.mul:
                node.args = (node.args[0], node.args[1] * 2)
        return graph_module


class Times(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("parts", [(Twice(),), (rg.MergeLinears(), Twice()), (rg.compose(Twice()), rg.MergeLinears())])
def test_what_has_no_reverse_is_not_applied_again(parts):
    gm = rg.symbolic_trace(Times())
    t = rg.compose(*parts)
    assert not isinstance(t, rg.ReversibleTransformation)
    t(gm)
    before = picture(gm)
    with pytest.raises(TypeError, match=r"cannot be reversed, for Twice has no reverse: .* regraft\.undo\(gm\)"):
        t(gm, reverse=True)
    assert_same(before, picture(gm))
    assert gm(torch.tensor(1.0)) == 4


@pytest.mark.parametrize("parts", [(), (Twice(),), (rg.MergeLinears(),)])
def test_an_option_that_there_is_not_is_refused(parts):
    gm = rg.symbolic_trace(Times())
    with pytest.raises(TypeError, match="unexpected keyword argument 'revers'"):
        rg.compose(*parts)(gm, revers=True)
    assert not rg.history(gm)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"did you mean compose\(MergeLinears\(\)\)\?"):
        rg.compose(rg.MergeLinears)
    with pytest.raises(TypeError, match="got 3"):
        rg.compose(3)
    with pytest.raises(TypeError, match=r": compose\(one, two\)"):
        rg.compose([rg.MergeLinears(), rg.FuseBiasInLinear()])


def test_nodes_marked_by_the_parts():
    gm = capture(net(), (X,), "fx")
    t = rg.compose(rg.ChangeTrueDivToMulByInverse(), rg.FuseBiasInLinear())
    t(gm)
    names = [node.name for node in t.get_transformed_nodes(gm)]
    assert set(names) == {n.name for part in t.transformations for n in part.get_transformed_nodes(gm)}
    assert len(names) == 7
    assert all(t.transformed(node) for node in t.get_transformed_nodes(gm))


def test_a_failing_part_of_a_copy_leaves_the_original():
    class Fails(rg.Transformation):
        def transform(self, graph_module):
            raise ValueError("no")

    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    for inplace in (True, False):
        with pytest.raises(ValueError, match="no"):
            rg.compose(*ALL, Fails(), inplace=inplace)(gm)
        assert_same(before, picture(gm))
        assert not rg.history(gm)


def test_options_go_to_the_parts():
    gm = capture(Wrap(lambda self, x: x + 1), (X,), "fx")
    with pytest.raises(rg.NothingApplied):
        rg.compose(rg.MergeLinears())(gm, strict=True)


def test_it_shows_its_parts():
    parts = (rg.MergeLinears(), rg.RemoveDeadWork(largest_constant=3))
    t = rg.compose(*parts, rg.compose(rg.FuseNorm(), inplace=False))
    shown = "compose(MergeLinears(), RemoveDeadWork(largest_constant=3), compose(FuseNorm(), inplace=False))"
    assert repr(t) == shown
    assert t.explain(capture(net(), (X,), "fx")).title == shown
    assert repr(rg.compose()) == "compose()"
