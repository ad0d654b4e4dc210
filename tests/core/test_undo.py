"""Undo in any order, of a step, of a site; conflicts that name the step; edits that others made in between."""

from __future__ import annotations

import copy
import itertools
import operator

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, Wrap, assert_matches_float64, assert_same, capture, copies, picture, randomise, values_of

X = torch.randn(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        y = self.norm(self.first(x)) / 3.0
        z = self.q(y) * self.k(y) + self.v(y)
        return self.last(z / 7.0)


def net() -> nn.Module:
    return randomise(Net()).eval()


INDEPENDENT = (rg.ChangeTrueDivToMulByInverse(), rg.MergeLinears(), rg.FoldBatchNorm())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("form", FORMS)
def test_independent_steps_in_any_order(order, form):
    model = net()
    gm = capture(model, (X,), form)
    before = picture(gm)
    steps = []
    for rule in INDEPENDENT:
        rule(gm)
        steps.append(rg.history(gm)[-1])
    for number in order:
        rg.undo(gm, steps[number])
        assert_matches_float64(model, gm, (X,), slack=8)
    assert_same(before, picture(gm))
    assert rg.history(gm) == ()


@pytest.mark.parametrize("form", FORMS)
def test_one_site_at_a_time_in_any_order(form):
    model = net()
    gm = capture(model, (X,), form)
    before = picture(gm)
    for order in ([0, 1], [1, 0]):
        rg.ChangeTrueDivToMulByInverse()(gm)
        sites = rg.history(gm)[-1].applied
        assert len(sites) == 2
        for number in order:
            rg.undo(gm, site=sites[number].id)
            assert_matches_float64(model, gm, (X,), slack=8)
        assert_same(before, picture(gm))
        assert rg.history(gm) == ()


def test_a_site_by_its_place():
    gm = capture(net(), (X,), "fx")
    rg.FuseBiasInLinear()(gm)
    rg.undo(gm, site="q")
    assert [site.where for site in rg.history(gm)[0].applied] == ["first", "k", "v", "last"]
    assert gm.get_submodule("q").bias is not None
    with pytest.raises(ValueError, match=r"nothing was applied at 'q'.*'first', 'k', 'last', 'v'"):
        rg.undo(gm, site="q")
    with pytest.raises(ValueError, match=r"nothing was applied at 'nowhere'"):
        rg.undo(gm, site="nowhere")


def test_a_step_by_name_id_and_itself():
    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    for take in (lambda s: s, lambda s: s.id, lambda s: s.transformation):
        rg.MergeLinears()(gm)
        rg.undo(gm, take(rg.history(gm)[0]))
        assert_same(before, picture(gm))
    with pytest.raises(ValueError, match="there is nothing to undo"):
        rg.undo(gm)
    rg.MergeLinears()(gm)
    with pytest.raises(ValueError, match=r"there is no step 'FoldBatchNorm'.*MergeLinears"):
        rg.undo(gm, "FoldBatchNorm")


@pytest.mark.parametrize("form", FORMS)
def test_a_conflict_names_the_later_step_and_changes_nothing(form):
    gm = capture(net(), (X,), form)
    before = picture(gm)
    rg.FuseBiasInLinear()(gm)
    fused = picture(gm)
    rg.MergeLinears()(gm)
    assert len(rg.history(gm)[-1].applied) == 0  # each has its own padded input now
    rg.undo(gm, "MergeLinears")
    rg.undo(gm)
    rg.MergeLinears()(gm)
    merged = picture(gm)
    rg.FuseBiasInLinear()(gm)
    both = picture(gm)
    for other in (gm, copy.deepcopy(gm)):
        with pytest.raises(
            rg.ReversalConflict, match=r"MergeLinears.*FuseBiasInLinear.* at q_k_v; undo that one first"
        ):
            rg.MergeLinears()(other, reverse=True)
        with pytest.raises(rg.ReversalConflict):
            rg.undo(other, "MergeLinears")
    assert_same(both, picture(gm))
    assert [step.transformation for step in rg.history(gm)] == ["MergeLinears", "FuseBiasInLinear"]
    rg.undo(gm, site="q_k_v")
    rg.MergeLinears()(gm, reverse=True)
    assert gm.get_submodule("first").bias is None
    rg.undo(gm)
    assert_same(before, picture(gm))
    assert merged != before != fused


def test_a_chain_on_one_layer_is_undone_at_once():
    """A norm folded into a layer whose bias is then fused, which is then merged: all in one call, and one by one."""
    model = randomise(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    gm = capture(model, (X,), "trace")
    before = picture(gm)
    t = rg.compose(rg.FoldBatchNorm(), rg.FuseBiasInLinear())
    t(gm)
    assert [len(step.applied) for step in rg.history(gm)] == [1, 1]
    with pytest.raises(rg.ReversalConflict, match="FuseBiasInLinear"):
        rg.undo(gm, "FoldBatchNorm")
    for other in copies(gm).values():
        assert_same(values_of(before), values_of(picture(t(other, reverse=True))))
    rg.undo(gm)
    rg.undo(gm)
    assert_same(before, picture(gm))


# Others edit the graph in between.


def add_relu(gm):
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        node = gm.graph.call_function(torch.relu, (output.args[0],))
    output.args = (node,)
    gm.recompile()


def dead_code(gm):
    with gm.graph.inserting_after(next(iter(gm.graph.nodes))):
        gm.graph.call_function(torch.relu, (next(iter(gm.graph.nodes)),))
    gm.graph.eliminate_dead_code()
    gm.recompile()


@pytest.mark.parametrize("rule", [*INDEPENDENT, rg.FuseBiasInLinear()])
@pytest.mark.parametrize("form", FORMS)
def test_an_edit_elsewhere_stays(rule, form):
    model = net()
    gm = capture(model, (X,), form)
    before = picture(gm)
    rule(gm)
    add_relu(gm)
    assert torch.allclose(gm(X), model(X).relu(), atol=1e-5)
    rule(gm, reverse=True)
    assert torch.equal(gm(X), model(X).relu())
    names = [node.name for node in gm.graph.nodes]
    assert names == [n[0] for n in before["nodes "][:-1]] + ["relu", "output"]


@pytest.mark.parametrize("rule", [*INDEPENDENT, rg.FuseBiasInLinear()])
def test_dead_code_elimination_in_between(rule):
    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    rule(gm)
    dead_code(gm)
    rule(gm, reverse=True)
    assert_same(before, picture(gm))


def test_what_others_have_removed_or_changed_is_a_conflict():
    gm = capture(net(), (X,), "fx")
    rg.ChangeTrueDivToMulByInverse()(gm)
    for node in gm.graph.nodes:
        if node.target is operator.mul and node.args[1] == 1 / 3.0:
            node.target = operator.add
    gm.recompile()
    broken = picture(gm)
    with pytest.raises(rg.ReversalConflict, match="'truediv' now computes something else, by something other than"):
        rg.undo(gm)
    assert_same(broken, picture(gm))
    assert len(rg.history(gm)[0].applied) == 2


def test_a_module_that_another_library_replaced():
    """As torchao's `quantize_` and PEFT do it: another module under the same name."""

    class Quantised(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    gm = capture(net(), (X,), "fx")
    rg.MergeLinears()(gm)
    gm.q_k_v = Quantised(gm.q_k_v)
    after = picture(gm)
    with pytest.raises(rg.ReversalConflict, match="'q_k_v' has been replaced since, by something other than regraft"):
        rg.undo(gm)
    assert_same(after, picture(gm))
    gm.q_k_v = gm.q_k_v.inner
    rg.undo(gm)
    gm.last = Quantised(gm.last)
    before = picture(gm)
    rg.MergeLinears()(gm)
    rg.undo(gm)
    assert_same(before, picture(gm))


def test_a_weight_that_another_library_replaced():
    """As torchao does it in place: a tensor subclass as the parameter."""

    class Quantised(torch.Tensor):
        pass

    gm = capture(net(), (X,), "fx")
    rg.FoldBatchNorm()(gm)
    first = gm.get_submodule("first")
    first.weight = nn.Parameter(first.weight.detach().as_subclass(Quantised), requires_grad=False)
    with pytest.raises(rg.ReversalConflict, match=r"first\.weight"):
        rg.undo(gm)
    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    gm.q.weight = nn.Parameter(gm.q.weight.detach().as_subclass(Quantised), requires_grad=False)
    rg.MergeLinears()(gm)
    assert [site.sentence for site in rg.history(gm)[0].applied] == ["merged k + v"]
    assert "q.weight is a Quantised" in rg.history(gm)[0].refused[0].reason
    del before


def test_a_name_that_others_have_taken():
    gm = capture(net(), (X,), "fx")
    rg.MergeLinears()(gm)
    gm.add_submodule("q", nn.ReLU())
    with pytest.raises(rg.ReversalConflict, match="something else is now called 'q'"):
        rg.undo(gm)
    gm.delete_submodule("q")
    rg.undo(gm)


def test_another_step_of_a_users_own_on_the_same_nodes():
    class MulToAdd(rg.Transformation):
        def transform(self, graph_module):
            for node in graph_module.graph.nodes:
                if node.target is operator.mul:
                    node.target = operator.add
            return graph_module

    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    rg.ChangeTrueDivToMulByInverse()(gm)
    MulToAdd()(gm)
    with pytest.raises(rg.ReversalConflict, match=r"step 1.*MulToAdd"):
        rg.undo(gm, "ChangeTrueDivToMulByInverse")
    rg.undo(gm)
    rg.undo(gm)
    assert_same(before, picture(gm))


def test_unused_modules_deleted_by_others_come_back():
    gm = capture(net(), (X,), "fx")
    before = picture(gm)
    rg.MergeLinears()(gm)
    gm.delete_all_unused_submodules()
    rg.undo(gm)
    assert_same(before, picture(gm))


def test_forget():
    gm = capture(net(), (X,), "fx")
    rg.MergeLinears()(gm)
    original = torch.utils.weak.TensorWeakRef(gm.q_k_v.weight)
    assert original() is not None
    assert rg.forget(gm) is gm
    assert rg.history(gm) == ()
    code = gm.code
    rg.MergeLinears()(gm, reverse=True)
    assert gm.code == code
    with pytest.raises(ValueError, match="nothing to undo"):
        rg.undo(gm)


def test_forget_frees_the_originals():
    import weakref

    model = net()
    gm = capture(model, (), "fx")
    q = weakref.ref(model.q)
    rg.MergeLinears()(gm)
    del model
    assert q() is not None
    rg.forget(gm)
    import gc

    gc.collect()
    assert q() is None


def test_ties_and_identity_come_back():
    model = Wrap(lambda self, x: self.c(self.a(x) + self.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    model.c.bias = model.a.bias  # tied: `a` is refused by every rule, `b` is not
    gm = capture(randomise(model), (X,), "fx")
    before = picture(gm)
    rg.FuseBiasInLinear()(gm)
    assert [site.where for site in rg.history(gm)[0].applied] == ["b"]
    rg.undo(gm)
    assert_same(before, picture(gm))
    assert gm.c.bias is gm.a.bias is model.a.bias


def test_strides_dtype_and_subclass_attributes_come_back():
    model = net()
    model.q.weight = nn.Parameter(torch.randn(4, 4).t())
    model.q.note = "mine"
    gm = capture(model, (X,), "fx")
    before = picture(gm)
    rg.MergeLinears()(gm)
    rg.undo(gm)
    assert_same(before, picture(gm))
    assert gm.q.note == "mine"
    assert gm.q is model.q
