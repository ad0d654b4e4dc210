"""`MergeLinears`: where it applies, what it refuses, and that everything about the layers comes back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

import regraft as rg
from helpers import (
    FORMS,
    Wrap,
    applied,
    assert_matches_float64,
    capture,
    check_applied,
    check_refused,
    picture,
    randomise,
)

MERGE = rg.MergeLinears()
X = torch.randn(2, 3, 8)


class Heads(nn.Module):
    """Siblings q, k, v, ... of the given widths; those in `biased` have a bias."""

    def __init__(self, widths=(8, 8, 8), biased=None):
        super().__init__()
        biased = [True] * len(widths) if biased is None else biased
        self.heads = nn.ModuleDict(
            {name: nn.Linear(8, n, bias=b) for name, n, b in zip("qkvghi", widths, biased, strict=False)}
        )

    def forward(self, x):
        return [head(x) for head in self.heads.values()]


def linear(width=8, **options) -> nn.Linear:
    return nn.Linear(8, width, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("widths", "biased"),
    [
        ((8, 8), None),
        ((8, 2, 2), None),
        ((16, 8, 4, 1), None),
        ((4,) * 6, None),
        ((8, 8, 8), [False] * 3),
        ((8, 4, 2), [True, False, True]),
        ((8, 4), [False, True]),
    ],
)
def test_any_number_of_any_widths(widths, biased, form):
    gm = check_applied(MERGE, randomise(Heads(widths, biased)), (X,), form)
    (merged,) = [m for m in gm.modules() if isinstance(m, nn.Linear)]
    assert merged.out_features == sum(widths)
    assert (merged.bias is None) == (biased is not None and not any(biased))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 3, 2, 8)])
def test_every_dtype_and_rank(dtype, shape):
    check_applied(MERGE, randomise(Heads((8, 4, 2))).to(dtype), (torch.randn(shape).to(dtype),))


@pytest.mark.parametrize("form", FORMS)
def test_at_the_top_level_of_the_model(form):
    net = Wrap(lambda self, x: self.a(x) + self.b(x), a=linear(), b=linear())
    gm = check_applied(MERGE, randomise(net), (X,), form)
    assert gm.get_submodule("a_b").out_features == 16


@pytest.mark.parametrize("form", FORMS)
def test_the_new_name_is_taken(form):
    net = Wrap(lambda self, x: self.a(x) + self.b(x) + self.a_b(x.relu()), a=linear(), b=linear(), a_b=linear())
    check_applied(MERGE, randomise(net), (X,), form)


@pytest.mark.parametrize("form", FORMS)
def test_keyword_calls(form):
    net = Wrap(lambda self, x: self.a(input=x) + self.b(x), a=linear(), b=linear())
    check_applied(MERGE, randomise(net), (X,), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [True, False])
def test_functional_calls(biased, form):
    def forward(self, x):
        return F.linear(x, self.w1, self.b1 if biased else None) @ F.linear(input=x, weight=self.w2).transpose(-1, -2)

    parts = {"w1": nn.Parameter(torch.randn(4, 8)), "w2": nn.Parameter(torch.randn(4, 8))}
    net = Wrap(forward, **parts, **({"b1": nn.Parameter(torch.randn(4))} if biased else {}))
    check_applied(MERGE, net, (X,), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_module_and_a_functional_call(form):
    net = Wrap(lambda self, x: self.a(x) + F.linear(x, self.w), a=linear(), w=nn.Parameter(torch.randn(8, 8)))
    check_applied(MERGE, randomise(net), (X,), form)


@pytest.mark.parametrize("form", FORMS)
def test_several_groups(form):
    net = nn.Sequential(*(Wrap(lambda self, x: self.q(x) * self.k(x), q=linear(), k=linear()) for _ in range(3)))
    check_applied(MERGE, randomise(net), (X,), form, sites=3)


def test_inside_a_nested_graph_module():
    inner = torch.fx.symbolic_trace(randomise(Wrap(lambda self, x: self.q(x) * self.k(x), q=linear(), k=linear())))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, torch.fx.GraphModule) or super().is_leaf_module(m, name)

    net = nn.Sequential(nn.ReLU(), inner)
    gm = torch.fx.GraphModule(net, Tracer().trace(net))
    exact, before = copy.deepcopy(gm), picture(gm)
    MERGE(gm)
    assert applied(MERGE, gm) == 1
    assert_matches_float64(exact, gm, (X,))
    MERGE(gm, reverse=True)
    assert picture(gm) == before


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_do_not_follow_each_other(form):
    net = Wrap(lambda self, x: self.b(x) * self.a(x).relu().sigmoid(), a=linear(), b=linear())
    check_applied(MERGE, randomise(net), (X,), form)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trainable", [True, False])
def test_mode_and_requires_grad(training, trainable):
    net = randomise(Heads()).train(training).requires_grad_(trainable)
    gm = check_applied(MERGE, net, (X,))
    (merged,) = [m for m in gm.modules() if isinstance(m, nn.Linear)]
    assert merged.training is training
    assert all(p.requires_grad is trainable for p in merged.parameters())


def test_gradients_are_those_of_the_layers():
    net = randomise(Heads((8, 4))).double()
    gm = MERGE(capture(copy.deepcopy(net), (X,), "fx"))
    for model in (net, gm):
        q, k = model(X.double())
        (q.sum() + (k**2).sum()).backward()
    (merged,) = [m for m in gm.modules() if isinstance(m, nn.Linear)]
    expected = torch.cat([net.heads["q"].weight.grad, net.heads["k"].weight.grad])
    assert torch.allclose(merged.weight.grad, expected)


def test_on_the_meta_device_nothing_is_allocated():
    with torch.device("meta"):
        net = Wrap(lambda self, x: self.a(x) + self.b(x), a=nn.Linear(8, 2**20), b=nn.Linear(8, 2**20))
    gm = capture(net, (), "fx")
    before = picture(gm)
    MERGE(gm)
    assert gm.get_submodule("a_b").weight.is_meta
    assert picture(MERGE(gm, reverse=True)) == before


def test_the_random_state_is_not_consumed():
    gm = capture(Heads(), (X,), "fx")
    state = torch.get_rng_state()
    MERGE(gm)
    MERGE(gm, reverse=True)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.view(2, 3, 2, 4),  # divides the last axis only: right for any stride of the others
        lambda y: y.reshape(-1),
        lambda y: y.contiguous().view(-1),
        lambda y: y.view(y.shape[0], y.shape[1], 2, 4),
        lambda y: y.transpose(1, 2),
        lambda y: y.unsqueeze(0).flatten(),
    ],
)
def test_users_that_do_not_need_contiguous_input(use, form):
    net = Wrap(lambda self, x: use(self.a(x)) + use(self.b(x)), a=linear(), b=linear())
    if form == "trace" and "contiguous" in use.__code__.co_names:
        return  # export drops it: it does nothing while the input is contiguous
    check_applied(MERGE, randomise(net), (X,), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.view(-1),
        lambda y: y.view(-1) * 2,  # which the caller does not get
        lambda y: y.view(6, 8)[0].norm(),
        lambda y: y.view((-1,)),
        lambda y: torch.as_strided(y, (2, 8), (8, 1)),
        lambda y: y.transpose(-1, -2).view(-1, 3) if False else y.unsqueeze(0).view(-1),
        lambda y: torch.view_as_complex(y.unflatten(-1, (4, 2))).real,
    ],
)
def test_users_that_need_contiguous_input(use, form):
    net = Wrap(lambda self, x: (use(self.a(x)), self.b(x)), a=linear(), b=linear())
    gm = capture(randomise(net), (X,), form)
    MERGE(gm)
    assert_matches_float64(net, gm, (X,))


GRAPHS = {
    "called twice on one input": (Wrap(lambda self, x: self.a(x) + self.a(x), a=linear()), "called 2 times"),
    "called twice, a sibling too": (
        Wrap(lambda self, x: self.a(x) + self.b(x) + self.a(x.relu()), a=linear(), b=linear()),
        "a is called 2 times",
    ),
    "input written by a method": (
        Wrap(lambda self, x: (y := self.a(z := x * 1), z.add_(1), y + self.b(z))[2], a=linear(), b=linear()),
        "changes 'mul' in place",
    ),
    "input written by an operator": (
        Wrap(lambda self, x: (y := self.a(z := x * 1), z.__iadd__(1), y + self.b(z))[2], a=linear(), b=linear()),
        "in place",
    ),
    "input written by a functional": (
        Wrap(lambda self, x: (y := self.a(z := x * 1), F.relu(z, True), y + self.b(z))[2], a=linear(), b=linear()),
        "in place",
    ),
    "input written by out=": (
        Wrap(lambda self, x: (y := self.a(z := x * 1), torch.neg(x, out=z), y + self.b(z))[2], a=linear(), b=linear()),
        "in place",
    ),
    "input written through a view": (
        Wrap(lambda self, x: (y := self.a(z := x * 1), z[0].zero_(), y + self.b(z))[2], a=linear(), b=linear()),
        "in place",
    ),
    "input written through an older view": (
        Wrap(
            lambda self, x: (y := self.a(z := (w := x * 1).view(6, 8)), w.mul_(2), y + self.b(z))[2],
            a=linear(),
            b=linear(),
        ),
        "in place",
    ),
    "input written by a module": (
        Wrap(
            lambda self, x: (y := self.a(z := x * 1), self.r(z), y + self.b(z))[2],
            a=linear(),
            b=linear(),
            r=nn.ReLU(True),
        ),
        "in place",
    ),
    "one frozen": (
        Wrap(lambda self, x: self.a(x) + self.b(x), a=linear().requires_grad_(False), b=linear()),
        "a.weight is frozen and b.weight is trainable",
    ),
    "a frozen bias": (
        Wrap(lambda self, x: self.a(x) + self.b(x), a=linear(), b=linear()),
        "b.bias is frozen",
    ),
    "a tied weight": (
        Wrap(lambda self, x: self.a(x) + self.b(x), a=linear(), b=linear(), e=nn.Embedding(8, 8)),
        "tied",
    ),
    "a weight read elsewhere": (
        Wrap(lambda self, x: self.a(x) + self.b(x) * self.a.weight.sum(), a=linear(), b=linear()),
        "a.weight is also read",
    ),
}
GRAPHS["a frozen bias"][0].b.bias.requires_grad_(False)
GRAPHS["a tied weight"][0].e.weight = GRAPHS["a tied weight"][0].b.weight
GRAPHS["a tied weight"][0].function = lambda self, x: self.a(x) + self.b(x) + self.e(torch.tensor([1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", GRAPHS)
def test_refused(case, form):
    net, words = GRAPHS[case]
    if form == "trace" and "in place" in words:  # export may make the sibling read the result of the write
        gm = MERGE(capture(net, (X,), form))
        assert not applied(MERGE, gm)
        assert_matches_float64(net, gm, (X,))
    else:
        check_refused(MERGE, randomise(net), (X,), form, words)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


EDITS = {
    "forward hook": lambda net: net.a.register_forward_hook(lambda *a: None),
    "pre-hook": lambda net: net.a.register_forward_pre_hook(lambda *a: None),
    "backward hook": lambda net: net.b.register_full_backward_hook(lambda *a: None),
    "pruned": lambda net: prune.random_unstructured(net.a, "weight", 0.5),
    "weight norm": lambda net: parametrizations.weight_norm(net.b),
    "old weight norm": lambda net: weight_norm(net.b),
    "orthogonal": lambda net: parametrizations.orthogonal(net.a),
    "mode": lambda net: net.a.train(not net.a.training),
    "dtype": lambda net: net.a.to(torch.bfloat16),
    "tensor hook": lambda net: net.a.weight.register_hook(lambda grad: grad),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_refused_modules(edit):
    net = randomise(Wrap(lambda self, x: self.a(x) + self.b(x), a=linear(), b=linear()))
    EDITS[edit](net)
    check_refused(MERGE, net, (X,), "fx", "parametrized" if edit in ("weight norm", "orthogonal") else "")


def test_a_subclass_with_its_own_forward():
    net = randomise(Wrap(lambda self, x: self.a(x) + self.b(x), a=linear(), b=Doubled(8, 8)))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    gm = torch.fx.GraphModule(net, Tracer().trace(net))
    before = picture(gm)
    MERGE(gm)
    assert picture(gm) == before
    assert_matches_float64(net, gm, (X,))


@pytest.mark.parametrize("form", FORMS)
def test_a_computed_weight(form):
    net = Wrap(
        lambda self, x: F.linear(x, self.w * x.mean()) + self.a(x), a=linear(), w=nn.Parameter(torch.randn(8, 8))
    )
    check_refused(MERGE, randomise(net), (X,), form, "computed by the graph")


@pytest.mark.parametrize("form", FORMS)
def test_what_the_caller_gets_is_laid_out_as_it_was(form):
    model = randomise(Heads((8, 4)).eval())
    gm = MERGE(capture(model, (X,), form))
    for found, expected in zip(gm(X), model(X), strict=True):
        assert found.stride() == expected.stride()
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), "a part keeps the whole alive"
    rg.undo(gm)
    assert not [node for node in gm.graph.nodes if node.target is torch.clone]
