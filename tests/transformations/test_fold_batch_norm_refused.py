"""What the batch norm rules refuse, each with the module and the reason, and nothing changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

import regraft as rg
from helpers import FORMS, Wrap, capture, check_applied, check_refused, picture, randomise

X = torch.randn(2, 3, 6, 6)


def conv_norm(**options: object) -> nn.Sequential:
    return randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options))).eval()


def edited(edit) -> nn.Sequential:
    net = conv_norm()
    edit(net)
    return net


def shared_norm(self, x):
    return self.norm(self.first(x)) + self.norm(self.second(x))


def one_conv_two_norms(self, x):
    y = self.conv(x)
    return self.first(y) + self.second(y)


def called_twice(self, x):
    return self.norm(self.conv(x)) + F.pad(self.conv(x), (0, 0))


def same_block_twice(self, x):
    return self.block(x) + self.block(x * 2)


def under_two_names() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    return Wrap(lambda self, x: self.norm(self.conv(x)) + self.other(x), conv=conv, other=conv, norm=nn.BatchNorm2d(4))


def tied_weight() -> nn.Module:
    net = Wrap(
        lambda self, x: self.norm(self.conv(x)) + self.other(x),
        conv=nn.Conv2d(3, 4, 3),
        other=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
    )
    net.other.weight = net.conv.weight
    return net


def tied_gamma() -> nn.Module:
    net = Wrap(
        lambda self, x: self.last(self.norm(self.conv(x)).relu()),
        conv=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        last=nn.BatchNorm2d(4),
    )
    net.last.weight = net.norm.weight
    return net


def convs(**parts: nn.Module) -> dict[str, nn.Module]:
    return {name: nn.Conv2d(3, 4, 3) if part == "conv" else nn.BatchNorm2d(4) for name, part in parts.items()}


GRAPHS = {
    "a norm shared by two branches": (
        Wrap(shared_norm, **convs(first="conv", second="conv", norm="n")),
        2,
        "norm is called",
    ),
    "one conv with two norms": (
        Wrap(one_conv_two_norms, **convs(conv="conv", first="n", second="n")),
        2,
        "also used by",
    ),
    "a conv called twice": (Wrap(called_twice, **convs(conv="conv", norm="n")), 1, "conv is called 2 times"),
    "the same block twice": (
        Wrap(same_block_twice, block=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))),
        2,
        "called 2 times",
    ),
    "a conv under two names": (under_two_names(), 1, "conv"),
    "a tied weight": (tied_weight(), 1, "tied to"),
    "a tied gamma": (tied_gamma(), 2, "norm.weight"),
    "in place in between": (
        Wrap(lambda self, x: self.norm(self.conv(x).add_(1)), **convs(conv="conv", norm="n")),
        1,
        "neither takes its input",
    ),
    "the result is written elsewhere": (
        Wrap(lambda self, x: self.norm((y := self.conv(x), y.relu_())[0]), **convs(conv="conv", norm="n")),
        1,
        "",
    ),
    "the input of the layer is written": (
        Wrap(lambda self, x: (y := self.conv(z := x * 1), z.mul_(2), self.norm(y))[2], **convs(conv="conv", norm="n")),
        1,
        "in place",
    ),
    "the conv's weight is read elsewhere": (
        Wrap(lambda self, x: self.norm(self.conv(x)) * self.conv.weight.sum(), **convs(conv="conv", norm="n")),
        1,
        "conv.weight is also read by",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", GRAPHS)
def test_graphs(case, form):
    net, sites, words = GRAPHS[case]
    check_refused(rg.FoldBatchNorm(), randomise(net).eval(), (X,), form, words, sites=sites)


def freeze(net):
    net[0].requires_grad_(False)


def mixed(net):
    net[0].to(torch.bfloat16)


def half_statistics(net):
    net[1].running_mean = net[1].running_mean.half()


def overflow(net):
    net.half()
    net[1].running_var.zero_()
    net[1].eps = 1e-12


def overflow_below_zero(net):
    net.half()
    with torch.no_grad():
        net[1].weight.fill_(-60000)
        net[1].running_var.fill_(0.01)


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


def subclass(net):
    net[0].__class__ = OwnForward


def subclassed_norm(net):
    net[1].__class__ = OwnNorm


def instance_forward(net):
    net[0].forward = lambda x: nn.Conv2d.forward(net[0], x) * 2


EDITS = {
    "norm in training mode": (lambda net: net[1].train(), "1 is in training mode; call .eval()"),
    "conv in training mode": (lambda net: net[0].train(), "0 is in training mode; call .eval()"),
    "forward hook on the norm": (lambda net: net[1].register_forward_hook(lambda *a: None), "1 has"),
    "forward hook on the conv": (lambda net: net[0].register_forward_hook(lambda *a: None), "0 has"),
    "forward pre-hook": (lambda net: net[0].register_forward_pre_hook(lambda *a: None), "0 has"),
    "backward hook": (lambda net: net[0].register_full_backward_hook(lambda *a: None), "0 has"),
    "backward pre-hook": (lambda net: net[0].register_full_backward_pre_hook(lambda *a: None), "0 has"),
    "pruned": (lambda net: prune.l1_unstructured(net[0], "weight", 0.5), "0"),
    "weight norm": (lambda net: parametrizations.weight_norm(net[0]), "0"),
    "old weight norm": (lambda net: weight_norm(net[0]), "0"),
    "spectral norm": (lambda net: parametrizations.spectral_norm(net[0]), "0"),
    "frozen conv": (freeze, "0.weight is frozen and 1.weight is trainable"),
    "bfloat16 conv": (mixed, "bfloat16"),
    "half statistics": (half_statistics, "float16"),
    "overflow": (overflow, "not finite"),
    "overflow below zero": (overflow_below_zero, "not finite"),
    "an own forward of the instance": (instance_forward, "0"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules(edit):
    change, words = EDITS[edit]
    net = edited(change)
    for rule in (rg.FoldBatchNorm(), rg.FuseBatchNorm2dInConv2d()):
        check_refused(rule, net, (X,), "fx", words)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "edit", [name for name in EDITS if not name.startswith(("bfloat16 conv", "half statistics", "overflow"))]
)
def test_modules_as_captured_by_trace(edit):
    """Capture may leave a hooked or parametrized layer in its parts; then no rule may find a layer in them."""
    net = edited(EDITS[edit][0])
    gm = capture(net, (X,), "trace")
    before, caller = picture(gm), picture(net)
    rg.FoldBatchNorm()(gm)
    assert not rg.history(gm)[-1].applied
    assert picture(gm) == before
    assert picture(net) == caller


@pytest.mark.parametrize("change", [subclass, subclassed_norm])
def test_a_subclass_with_its_own_forward_is_not_its_parent(change):
    """fx traces into it, so a rule sees the parent's arithmetic at most; here it is kept whole, as a leaf."""
    net = edited(change)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return not isinstance(m, nn.Sequential)

    gm = torch.fx.GraphModule(net, Tracer().trace(net))
    before = picture(gm)
    rg.FoldBatchNorm()(gm)
    assert not rg.history(gm)[-1].applied
    assert picture(gm) == before


@pytest.mark.parametrize("form", FORMS)
def test_no_running_statistics(form):
    net = conv_norm(track_running_stats=False)
    gm = capture(net, (X,), form)
    before = picture(gm)
    rg.FoldBatchNorm()(gm)
    assert not rg.history(gm)[-1].applied
    assert picture(gm) == before
    if form == "fx":
        assert "1 keeps no running statistics" in rg.history(gm)[-1].refused[0].reason


@pytest.mark.parametrize("training", [True, None])
def test_a_functional_norm_in_training_mode(training):
    net = Wrap(
        lambda self, x: (
            F.batch_norm(self.conv(x), self.mean, self.var, training=True)
            if training
            else F.batch_norm(self.conv(x), None, None, training=True)
        ),
        conv=nn.Conv2d(3, 4, 3),
        mean=torch.zeros(4),
        var=torch.ones(4),
    )
    check_refused(rg.FoldBatchNorm(), net.eval(), (X,), "fx", "training mode")


def test_a_reshape_between_them_where_no_shapes_are_known():
    net = Wrap(lambda self, x: self.norm(self.layer(x).reshape(-1, 4)), layer=nn.Linear(6, 4), norm=nn.BatchNorm1d(4))
    check_refused(rg.FoldBatchNorm(), net.eval(), (X,), "fx", "it is 'reshape'")


@pytest.mark.parametrize(("dtype", "gamma"), [(torch.float16, 0.5), (torch.float32, 4.0)])
def test_a_weight_that_is_not_finite_before_the_fold_is_no_reason(dtype, gamma):
    net = conv_norm().to(dtype)
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = torch.inf
        net[1].weight.fill_(gamma)
        net[1].running_var.fill_(1)
    assert rg.FoldBatchNorm().explain(capture(net, (X.to(dtype),), "fx")).applied == 1


def test_computed_statistics_and_weights():
    net = Wrap(
        lambda self, x: F.batch_norm(self.conv(x), self.mean * 2, self.var),
        conv=nn.Conv2d(3, 4, 3),
        mean=torch.randn(4),
        var=torch.rand(4),
    )
    check_refused(rg.FoldBatchNorm(), net.eval(), (X,), "trace", "is computed by the graph")
    net = Wrap(
        lambda self, x: self.norm(F.conv2d(x, self.weight * 2)),
        weight=nn.Parameter(torch.randn(4, 3, 3, 3)),
        norm=nn.BatchNorm2d(4),
    )
    check_refused(rg.FoldBatchNorm(), net.eval(), (X,), "trace", "")


def test_statistics_written_in_the_graph():
    net = Wrap(
        lambda self, x: F.batch_norm(self.conv(x), self.mean.add_(1), self.var),
        conv=nn.Conv2d(3, 4, 3),
        mean=torch.randn(4),
        var=torch.rand(4),
    )
    check_refused(rg.FoldBatchNorm(), net.eval(), (X,), "trace", "")
    net = Wrap(
        lambda self, x: (self.var.add_(1), F.batch_norm(self.conv(x), self.mean, self.var))[1],
        conv=nn.Conv2d(3, 4, 3),
        mean=torch.randn(4),
        var=torch.rand(4),
    )
    check_refused(rg.FoldBatchNorm(), net.eval(), (X,), "trace", "")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", [1, (0, 1), "same"])
def test_a_norm_before_a_convolution_that_pads_with_zeros(padding, form):
    net = randomise(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=padding))).eval()
    check_refused(rg.FoldBatchNorm(), net, (X,), form, "pads with zeros")


def test_a_norm_before_a_convolution_that_pads_by_what_is_computed():
    norm, weight = nn.BatchNorm2d(3), nn.Parameter(torch.randn(4, 3, 3, 3))
    net = Wrap(lambda self, x: F.conv2d(self.norm(x), self.w, padding=x.shape[0]), norm=norm, w=weight)
    check_refused(rg.FoldBatchNorm(), randomise(net).eval(), (X,), "fx", "pads with zeros")


@pytest.mark.parametrize("form", FORMS)
def test_a_norm_before_a_transposed_convolution(form):
    net = randomise(nn.Sequential(nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 4, 3))).eval()
    check_refused(rg.FoldBatchNorm(), net, (X,), form, "transposed")


@pytest.mark.parametrize("parts", [(nn.Linear(4, 4), nn.BatchNorm1d(4)), (nn.BatchNorm1d(4), nn.Linear(4, 4))])
@pytest.mark.parametrize("rule", [rg.FoldBatchNorm(), rg.FuseBatchNorm1dInLinear()])
def test_three_axes_where_channels_equal_features(rule, parts):
    net = randomise(nn.Sequential(*parts)).eval()
    check_refused(rule, net, (torch.randn(2, 4, 4),), "trace", "axis")
    check_applied(rule, net, (torch.randn(3, 4),), "trace")


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_is_also_used_elsewhere(form):
    net = Wrap(
        lambda self, x: self.conv(y := self.norm(x)).sum() + y.sum(), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(3)
    )
    check_refused(rg.FoldBatchNorm(), randomise(net).eval(), (X,), form, "neither takes its input")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_fold_into(form):
    net = randomise(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU())).eval()
    check_refused(rg.FoldBatchNorm(), net, (X,), form, "1 neither takes its input from a")


def test_training_dropout_between():
    net = randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.BatchNorm2d(4))).eval()
    net[1].train()
    check_refused(rg.FoldBatchNorm(), net, (X,), "fx", "neither takes its input")


def test_other_kinds_of_norm_are_no_candidates():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.SyncBatchNorm(4)).eval()
    gm = rg.FoldBatchNorm()(capture(net, (X,), "fx"))
    assert not rg.history(gm)[0].applied


def test_lazy_layers():
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).eval()
    gm = capture(net, (X,), "fx")
    rg.FoldBatchNorm()(gm)
    assert not rg.history(gm)[0].applied


@pytest.mark.parametrize(("dtype", "sites"), [(torch.float16, 0), (torch.bfloat16, 1), (torch.float32, 1)])
def test_a_scale_that_would_lose_precision_below_the_normal_numbers(dtype, sites):
    net = randomise(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))).eval().to(dtype)
    with torch.no_grad():
        net[1].weight[2], net[1].running_var[2] = 1e-2, 3e4
    x = (torch.randn(2, 3, 6, 6).to(dtype),)
    if sites:
        check_applied(rg.FoldBatchNorm(), net, x, "trace")
    else:
        check_refused(rg.FoldBatchNorm(), net, x, "trace", "below the normal numbers of torch.float16")


def test_a_channel_that_training_has_let_die_is_no_reason():
    net = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8))).eval()
    with torch.no_grad():
        net[1].weight[2], net[0].weight[2], net[0].weight[3] = 1e-40, 1e-30, 0
    check_applied(rg.FoldBatchNorm(), net, (torch.randn(2, 3, 9, 9),), "trace")


@pytest.mark.parametrize("form", FORMS)
def test_channels_that_are_another_axis_than_the_features(form):
    net = randomise(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(4, 2))).eval()
    check_refused(rg.FoldBatchNorm(), net, (torch.randn(2, 3, 4),), form, "normalises 3 channels, another axis")
