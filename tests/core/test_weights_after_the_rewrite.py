"""What becomes of weights that changed after a rewrite: moved, converted, trained, loaded, let go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, assert_same, capture, picture, randomise, values_of

X = torch.randn(2, 4)


def pair() -> nn.Module:
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 3, bias=False), "norm": nn.BatchNorm1d(4)}
    return randomise(Wrap(lambda self, x: self.b(y := self.norm(self.a(x))) @ self.c(y).t() / self.d, **parts)).eval()


def model() -> nn.Module:
    net = pair()
    net.c = nn.Linear(4, 3)
    net.register_buffer("d", torch.tensor(3.0))
    net.w = nn.Parameter(torch.randn(4, 4))
    net.function = lambda self, x: (
        self.b(y := self.norm(self.a(F.linear(x, self.w, self.a.bias * 1)))) @ self.c(y).t() / self.d
    )
    net.function = lambda self, x: self.b(y := self.norm(self.a(F.linear(x, self.w)))) @ self.c(y).t() / self.d
    return randomise(net).eval()


CHAIN = rg.compose(rg.FoldBatchNorm(), rg.MergeLinears(), rg.FuseBiasInLinear(), rg.ChangeTrueDivToMulByInverse())
CONVERSIONS = {
    "half": lambda gm: gm.half(),
    "double": lambda gm: gm.double(),
    "bfloat16": lambda gm: gm.to(torch.bfloat16),
    "there and back": lambda gm: gm.half().float(),
    "meta": lambda gm: gm.to("meta"),
    "meta and dtype": lambda gm: gm.to("meta").half(),
    "inside another module": lambda gm: nn.Sequential(gm).half(),
    "same": lambda gm: gm.to(torch.float32),
}
RULES = [rg.FoldBatchNorm(), rg.MergeLinears(), rg.FuseBiasInLinear(), rg.ChangeTrueDivToMulByInverse(), CHAIN]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("rule", RULES)
def test_what_comes_back_has_moved_likewise(rule, conversion, form):
    convert = CONVERSIONS[conversion]
    expected, gm = (capture(copy.deepcopy(net), (X,), form) for net in [model()] * 2)
    convert(expected)
    rule(gm)
    assert rg.history(gm)[0].applied
    objects = [id(module) for _, module in gm.named_modules()]
    convert(gm)
    assert objects == [id(module) for _, module in gm.named_modules()]
    rule(gm, reverse=True)
    shown, wanted = picture(gm), picture(expected)
    assert_same(values_of(wanted), values_of(shown))
    assert [t[0::1][2:] for t in shown["tensors"]] == [t[2:] for t in wanted["tensors"]]
    assert [name for name, *_ in shown["tensors"]] == [name for name, *_ in wanted["tensors"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("rule", [rg.MergeLinears(), rg.FuseBiasInLinear(), rg.FoldBatchNorm()])
def test_parameters_of_functional_calls_have_moved_likewise(rule, conversion, form):
    """They stand in the journal themselves, without a module around them, and some moves make them other objects."""

    def forward(self, x):
        y = F.linear(x, self.v) * F.linear(x, self.w, self.b)
        return F.batch_norm(F.conv1d(y.unsqueeze(-1), self.k), self.mean, self.var)

    net = Wrap(forward, mean=torch.randn(4), var=torch.rand(4) + 0.5)
    for name, shape in {"v": (4, 4), "w": (4, 4), "b": (4,), "k": (4, 4, 1)}.items():
        net.register_parameter(name, nn.Parameter(torch.randn(shape)))
    expected, gm = (capture(copy.deepcopy(net), (X,), form) for _ in range(2))
    CONVERSIONS[conversion](expected)
    rule(gm)
    assert rg.history(gm)[0].applied
    CONVERSIONS[conversion](gm)
    rule(gm, reverse=True)
    assert_same(values_of(picture(expected)), values_of(picture(gm)))
    assert [(n, p.device, p.dtype) for n, p in gm.named_parameters()] == [
        (n, p.device, p.dtype) for n, p in expected.named_parameters()
    ]


@pytest.mark.parametrize("rule", RULES)
def test_moved_and_applied_twice_and_undone_one_by_one(rule):
    gm = capture(model(), (X,), "fx")
    before = picture(gm)
    rule(gm)
    gm.double()
    rg.FuseBiasInLinear()(gm)
    gm.float()
    while rg.history(gm):
        rg.undo(gm)
    assert_same(values_of(before), values_of(picture(gm)))


def test_parameters_keep_their_identity_through_a_conversion():
    net = model()
    gm = capture(net, (X,), "fx")
    before = picture(gm)
    rg.MergeLinears()(gm)
    gm.double()
    gm.float()
    rg.undo(gm)
    assert gm.b.weight is net.b.weight
    assert_same({**before, "tensors": []}, {**picture(gm), "tensors": []})  # buffers are new, as after every `.to`


def test_a_fold_changed_after_the_move_is_still_noticed():
    gm = capture(model(), (X,), "fx")
    rg.FoldBatchNorm()(gm)
    gm.half()
    with torch.no_grad():
        gm.get_submodule("a").weight.mul_(2)
    with pytest.raises(rg.ReversalConflict, match=r"a.weight.*has changed since it was made"):
        rg.undo(gm)


def test_a_fold_changed_before_the_move_is_still_noticed():
    gm = capture(model(), (X,), "fx")
    rg.FoldBatchNorm()(gm)
    with torch.no_grad():
        gm.get_submodule("a").weight.mul_(2)
    for convert in (lambda: gm.half(), lambda: gm.to("meta")):
        convert()
        with pytest.raises(rg.ReversalConflict, match=r"has changed since it was made"):
            rg.undo(gm)


def test_a_copy_that_is_converted_does_not_touch_the_other():
    gm = capture(model(), (X,), "fx")
    before = picture(gm)
    rg.compose(rg.FoldBatchNorm(), rg.MergeLinears())(gm)
    other = copy.deepcopy(gm).half()
    rg.compose(rg.FoldBatchNorm(), rg.MergeLinears())(gm, reverse=True)
    assert_same(before, picture(gm))
    rg.compose(rg.FoldBatchNorm(), rg.MergeLinears())(other, reverse=True)
    assert {p.dtype for p in other.parameters()} == {torch.float16}


def test_a_shallow_copy_that_is_converted_leaves_the_history_of_the_other():
    """Modules are shared and move together; a parameter of the graph module itself is each one's own."""
    gm = capture(model(), (X,), "fx")
    rg.MergeLinears()(gm)
    other = copy.copy(gm)
    other.to("meta")
    rg.undo(gm)
    rg.undo(other)


# Training and loading.


def train(gm: nn.Module) -> None:
    optimiser = torch.optim.SGD([p for p in gm.parameters() if p.requires_grad], lr=0.1)
    gm(X).square().sum().backward()
    optimiser.step()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rule", [rg.MergeLinears(), rg.FuseBiasInLinear(), rg.compose(rg.MergeLinears(), rg.FuseBiasInLinear())]
)
def test_undo_of_a_rearrangement_carries_trained_values_back(rule, form):
    net = randomise(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    caller, gm = picture(net), capture(net, (X,), form)
    order = list(gm.state_dict())
    rule(gm)
    train(gm)
    rewritten = {name: value.clone() for name, value in gm.state_dict().items()}
    rule(gm, reverse=True)
    assert_same(caller, picture(net))  # the caller's own weights are not written
    assert list(gm.state_dict()) == order
    trained = copy.deepcopy(net)
    train(trained)
    assert gm.a.weight is not net.a.weight
    for name, value in trained.state_dict().items():
        assert torch.allclose(gm.state_dict()[name], value, atol=1e-6), name
    rule(gm)
    for name, value in gm.state_dict().items():
        assert torch.equal(value, rewritten[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_rearrangements_of_rearrangements_are_undone_one_by_one_after_training(form):
    net = randomise(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    gm = capture(net, (X,), form)
    rg.MergeLinears()(gm)
    rg.FuseBiasInLinear()(gm)
    train(gm)
    expected = gm(X)
    rg.undo(gm)
    assert torch.allclose(gm(X), expected, atol=1e-6)
    train(gm)
    expected = gm(X)
    rg.undo(gm)
    assert torch.allclose(gm(X), expected, atol=1e-6)
    assert [name for name, _ in gm.named_parameters()] == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_undo_of_a_trained_fold_is_a_conflict_and_loses_nothing(form):
    gm = capture(randomise(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval(), (X,), form)
    rg.FoldBatchNorm()(gm)
    train(gm)
    trained = picture(gm)
    for reverse in (lambda: rg.undo(gm), lambda: rg.FoldBatchNorm()(gm, reverse=True)):
        with pytest.raises(rg.ReversalConflict, match=r"0.weight \(1: folded 1 into 0\) has changed since"):
            reverse()
        assert_same(trained, picture(gm))
        assert len(rg.history(gm)) == 1


def test_a_merge_on_a_fold_after_training():
    """The merge alone can be taken back, with the new values; the fold below it can't, and says so."""
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "na": nn.BatchNorm1d(4)}
    net = randomise(Wrap(lambda self, x: self.na(self.a(x)) * self.b(x), **parts)).eval()
    gm = capture(net, (X,), "trace")
    both = rg.compose(rg.FoldBatchNorm(), rg.MergeLinears())
    both(gm)
    assert [len(step.applied) for step in rg.history(gm)] == [1, 1]
    train(gm)
    trained, weight = picture(gm), gm.get_submodule("a_b").weight.detach().clone()
    with pytest.raises(rg.ReversalConflict, match="has changed since"):
        both(gm, reverse=True)
    assert_same(trained, picture(gm))
    rg.undo(gm)
    assert torch.equal(torch.cat([gm.a.weight, gm.b.weight]), weight)
    with pytest.raises(rg.ReversalConflict, match="has changed since"):
        rg.undo(gm)


def test_missing_biases_that_were_trained_stay():
    net = randomise(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4, bias=False)))
    gm = capture(net, (X,), "fx")
    rg.MergeLinears()(gm)
    train(gm)
    with pytest.raises(rg.ReversalConflict, match=r"a_b\.bias"):
        rg.undo(gm)


def test_loading_into_the_rewritten_model():
    net = randomise(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    gm = capture(net, (X,), "fx")
    rg.MergeLinears()(gm)
    new = {name: torch.randn_like(value) for name, value in gm.state_dict().items()}
    gm.load_state_dict(new)
    expected = gm(X)
    rg.undo(gm)
    assert torch.allclose(gm(X), expected, atol=1e-6)
    assert torch.equal(torch.cat([gm.a.weight, gm.b.weight]), new["a_b.weight"])


def test_settings_made_meanwhile_come_along():
    gm = capture(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (X,), "fx")
    rg.MergeLinears()(gm)
    gm.eval().requires_grad_(False)
    rg.undo(gm)
    assert not gm.a.training
    assert not gm.b.training
    assert not any(p.requires_grad for p in gm.parameters())


# consume=True


@pytest.mark.parametrize("rule", [rg.MergeLinears(), rg.FuseBiasInLinear()])
@pytest.mark.parametrize("convert", [lambda gm: gm, lambda gm: gm.half()])
def test_consume_lets_go_and_a_rearrangement_still_comes_back(rule, convert):
    import gc
    import weakref

    net = randomise(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    gm, expected = capture(net, (X,), "fx"), capture(copy.deepcopy(net), (X,), "fx")
    weight = weakref.ref(net.a.weight)
    rule(gm, consume=True)
    del net
    gc.collect()
    assert weight() is None
    convert(gm)
    rule(gm, reverse=True)
    assert_same(values_of(picture(convert(expected))), values_of(picture(gm)))
    assert all(p.requires_grad for p in gm.parameters())


def test_consumed_folds_say_so():
    gm = capture(randomise(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval(), (X,), "fx")
    rg.FoldBatchNorm()(gm, consume=True)
    for convert in (lambda: gm, lambda: gm.half()):
        convert()
        after = picture(gm)
        with pytest.raises(rg.ReversalConflict, match="let go with consume=True"):
            rg.undo(gm)
        assert_same(after, picture(gm))


def test_consume_leaves_the_callers_model():
    net = randomise(Wrap(lambda self, x: self.a(x) * self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    before = picture(net)
    gm = capture(net, (X,), "fx")
    rg.MergeLinears()(gm, consume=True)
    gm.half()
    assert_same(before, picture(net))


def test_originals_that_the_caller_has_changed_are_named_and_nothing_happens():
    net = randomise(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).eval()
    gm = rg.FoldBatchNorm()(rg.symbolic_trace(net))
    with torch.no_grad():
        net[1].weight.add_(1)
    before = picture(gm)
    with pytest.raises(rg.ReversalConflict, match=r"or the model's own 0 or 1 has, which it was made from"):
        rg.undo(gm)
    with pytest.raises(rg.ReversalConflict, match=r"Undo before you train, load, or change the model"):
        rg.original_state_dict(gm)
    assert_same(before, picture(gm))
    with torch.no_grad():
        net[1].weight.sub_(1)


def test_a_conversion_of_the_graph_modules_own_weights_leaves_those_of_its_layers():
    class Own(rg.Transformation):
        def transform(self, graph_module):
            graph_module.w = nn.Parameter(graph_module.w.detach() * 2)
            with torch.no_grad():
                graph_module.a.bias.add_(1)
                graph_module.u.mul_(2)
            return graph_module

    def forward(self, x):
        return self.a(x), self.b(x), F.linear(x + 1, self.w), F.linear(x + 2, self.u)

    weights = {name: nn.Parameter(torch.randn(4, 4)) for name in "wu"}
    net = randomise(Wrap(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), **weights))
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    gm = rg.MergeLinears()(Own()(rg.symbolic_trace(net)))
    gm._apply(lambda tensor: tensor.double(), recurse=False)
    while rg.history(gm):
        rg.undo(gm)
    assert {name: value.dtype for name, value in gm.state_dict().items()} == {
        name: torch.float64 if name in "wu" else torch.float32 for name in expected
    }
    for name, value in gm.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


@pytest.mark.parametrize("undone", [False, True])
def test_a_cast_that_matters_only_after_a_conversion_is_not_removed(undone):
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x).to(torch.float32) / 3.0

    gm = rg.symbolic_trace(Cast())
    for node in gm.graph.nodes:
        node.meta["val"] = torch.empty(2, 4)
    if undone:
        rg.ChangeTrueDivToMulByInverse()(gm)
    gm.double()
    if undone:
        rg.undo(gm)
    rg.RemoveDeadWork()(gm)
    assert gm(X.double())[0].dtype is torch.float32
    assert not any("val" in node.meta for node in gm.graph.nodes)


def test_what_is_known_of_values_stays_where_nothing_is_converted():
    gm = rg.trace(nn.Linear(4, 4), (X,))
    gm.to(torch.float32).to("cpu")
    assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")
    gm.half()
    assert not any("val" in node.meta for node in gm.graph.nodes)
