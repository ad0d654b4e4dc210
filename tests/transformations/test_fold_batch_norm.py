"""`FoldBatchNorm`, `FuseBatchNorm2dInConv2d` and `FuseBatchNorm1dInLinear`: where they apply."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, assert_matches_float64, capture, check_applied, picture, randomise
from regraft.testing import assert_round_trip

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def layer(kind: str, rank: int, inputs: int, outputs: int, **options: object) -> nn.Module:
    if kind == "linear":
        return nn.Linear(inputs, outputs, **options)
    return {"conv": CONVS, "transposed": TRANSPOSED}[kind][rank](inputs, outputs, 3, **options)


def sample(kind: str, rank: int, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, channels, *((5,) * (0 if kind == "linear" else rank))).to(dtype)


KINDS = [(kind, rank) for kind in ("conv", "transposed") for rank in (1, 2, 3)] + [("linear", 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "rank"), KINDS)
def test_behind_every_layer(kind, rank, bias, affine, form):
    options = {} if kind == "linear" else {"groups": 2, "stride": 2}
    net = nn.Sequential(layer(kind, rank, 4, 6, bias=bias, **options), NORMS[rank](6, affine=affine, eps=0.1))
    gm = check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample(kind, rank, 4),), form)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["0"]
    assert gm.get_submodule("0").bias is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "rank"), [("conv", 1), ("conv", 2), ("conv", 3), ("linear", 1)])
def test_before_every_unpadded_layer(kind, rank, bias, affine, form):
    options = {} if kind == "linear" else {"groups": 2}
    net = nn.Sequential(NORMS[rank](4, affine=affine, eps=0.1), layer(kind, rank, 4, 6, bias=bias, **options))
    gm = check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample(kind, rank, 4),), form)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["1"]


def test_before_a_layer_without_outputs():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.utils.skip_init(nn.Linear, 4, 0))
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (torch.randn(3, 4),))


@pytest.mark.parametrize(("size", "padding"), [(3, "valid"), (1, "same"), (3, 0)])
def test_before_a_convolution_that_does_not_pad(size, padding):
    net = randomise(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, size, padding=padding))).eval()
    check_applied(rg.FoldBatchNorm(), net, (sample("conv", 2, 4),))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_before_a_convolution_that_pads_with_its_input(mode):
    net = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode))
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample("conv", 2, 4),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "rank", "behind"),
    [(*kind, True) for kind in KINDS] + [(*kind, False) for kind in KINDS if kind[0] != "transposed"],
)
def test_every_dtype(kind, rank, dtype, behind):
    norm, body = NORMS[rank](4), layer(kind, rank, 4, 4)
    net = nn.Sequential(body, norm) if behind else nn.Sequential(norm, body)
    gm = check_applied(rg.FoldBatchNorm(), randomise(net).to(dtype).eval(), (sample(kind, rank, 4, dtype),))
    assert {p.dtype for p in gm.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_arithmetic_is_one_precision_up(dtype):
    """Folding in the weight's own half precision loses up to four times what float32 does."""
    net = randomise(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))).to(dtype).eval()
    gm = rg.FoldBatchNorm()(capture(net, (), "fx"))
    conv, norm = copy.deepcopy(net).double()
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    exact = (conv.bias - norm.running_mean) * scale + norm.bias
    assert torch.equal(gm.get_submodule("0").bias.float(), exact.to(dtype).float())
    exact = conv.weight * scale.reshape(-1, 1, 1, 1)
    assert torch.equal(gm.get_submodule("0").weight.float(), exact.to(dtype).float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("groups", "kind"), [(1, "conv"), (4, "conv"), (1, "transposed"), (2, "transposed"), (4, "transposed")]
)
def test_groups(groups, kind, form):
    net = nn.Sequential(layer(kind, 2, 4, 8, groups=groups), nn.BatchNorm2d(8))
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample(kind, 2, 4),), form)


@pytest.mark.parametrize(
    "options",
    [{"padding": "same", "dilation": 2}, {"padding": 2, "stride": 2}, {"padding_mode": "circular", "padding": 1}],
)
def test_settings_of_the_convolution_stay(options):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, **options), nn.BatchNorm2d(4))
    gm = check_applied(rg.FuseBatchNorm2dInConv2d(), randomise(net).eval(), (sample("conv", 2, 3),))
    assert repr(gm.get_submodule("0")) == repr(net[0])


def test_settings_of_the_transposed_convolution_stay():
    net = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2, padding=1), nn.BatchNorm2d(6)
    )
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample("conv", 2, 4),))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("between", [nn.Identity(), nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_what_does_nothing_may_stand_between(between, form):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.BatchNorm2d(4))
    check_applied(rg.FuseBatchNorm2dInConv2d(), randomise(net).eval(), (sample("conv", 2, 3),), form)


def test_a_chain_of_norms_folds_one_after_the_other():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    x = sample("linear", 1, 4)
    gm = check_applied(rg.FuseBatchNorm1dInLinear(), randomise(net).eval(), (x,), "trace", sites=3)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["1", "4"]
    # Without shapes the first fold leaves a layer that looks at the rank of its input: not a plain linear any more.
    gm = rg.FuseBatchNorm1dInLinear()(capture(net, (x,), "fx"))
    assert (len(rg.history(gm)[0].applied), len(rg.history(gm)[0].refused)) == (2, 1)
    assert_matches_float64(net, gm, (x,))


@pytest.mark.parametrize("form", FORMS)
def test_functional_calls_with_parameters(form):
    def forward(self, x):
        y = F.conv2d(x, self.weight, self.bias, 2, groups=2)
        return F.batch_norm(y, self.mean, self.var, self.gamma, self.beta, eps=0.1)

    net = Wrap(
        forward,
        weight=nn.Parameter(torch.randn(6, 2, 3, 3)),
        bias=nn.Parameter(torch.randn(6)),
        mean=torch.randn(6),
        var=torch.rand(6) + 0.5,
        gamma=nn.Parameter(torch.randn(6)),
        beta=nn.Parameter(torch.randn(6)),
    )
    check_applied(rg.FuseBatchNorm2dInConv2d(), net.eval(), (torch.randn(2, 4, 5, 5),), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("function", "weight", "norm"),
    [
        (F.linear, (6, 4), 1),
        (F.conv1d, (6, 4, 3), 1),
        (F.conv3d, (6, 4, 3, 3, 3), 3),
        (F.conv_transpose1d, (4, 6, 3), 1),
        (F.conv_transpose2d, (4, 6, 3, 3), 2),
    ],
)
def test_functional_layers_of_every_kind(function, weight, norm, form):
    net = Wrap(
        lambda self, x: self.norm(function(x, bias=None, weight=self.weight)),
        weight=nn.Parameter(torch.randn(weight)),
        norm=NORMS[norm](6),
    )
    x = torch.randn(2, 4, *((5,) * (len(weight) - 2)))
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (x,), form)


@pytest.mark.parametrize("form", FORMS)
def test_keyword_calls(form):
    net = Wrap(lambda self, x: self.norm(input=self.conv(input=x)), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample("conv", 2, 3),), form)


def test_a_list_as_first_argument_elsewhere_does_not_abort():
    class First(nn.Module):
        def forward(self, values):
            return values[0] * 2

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, First) or super().is_leaf_module(m, name)

    net = Wrap(lambda self, x: self.first([self.norm(self.conv(x))]), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    net.first = First()
    randomise(net).eval()
    gm = torch.fx.GraphModule(net, Tracer().trace(net))
    rg.FoldBatchNorm()(gm)
    assert len(rg.history(gm)[0].applied) == 1
    assert_matches_float64(net, gm, (sample("conv", 2, 3),))


@pytest.mark.parametrize("form", FORMS)
def test_reading_the_shape_of_the_result_does_not_hinder(form):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y).reshape(y.size(0), -1)

    net = Wrap(forward, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    check_applied(rg.FoldBatchNorm(), randomise(net).eval(), (sample("conv", 2, 3),), form)


def test_inside_a_nested_graph_module():
    inner = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    net = randomise(nn.Sequential(nn.ReLU(), inner)).eval()

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, torch.fx.GraphModule) or super().is_leaf_module(m, name)

    gm = torch.fx.GraphModule(net, Tracer().trace(net))
    before, exact = picture(gm), copy.deepcopy(gm)
    rule = rg.FoldBatchNorm()
    rule(gm)
    assert [site.where for site in rg.history(gm)[0].applied] == ["1.1"]
    assert_matches_float64(exact, gm, (sample("conv", 2, 3),))
    rule(gm, reverse=True)
    assert picture(gm) == before


def test_another_capture_of_the_same_model_is_not_changed():
    net = randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    x = sample("conv", 2, 3)
    first, second = capture(net, (x,), "fx"), capture(net, (x,), "fx")
    rg.FoldBatchNorm()(first)
    assert torch.equal(second(x), net(x))
    rg.FoldBatchNorm()(second)
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("x", [torch.randn(5, 4), torch.randn(3, 4, 4)])
@pytest.mark.parametrize("behind", [True, False])
def test_a_graph_without_shapes_is_right_for_every_rank(behind, x):
    """Where C equals L or the features, a `BatchNorm1d` beside a linear layer means two different things."""
    parts = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
    net = randomise(nn.Sequential(*parts if behind else parts[::-1])).eval()
    gm = rg.FuseBatchNorm1dInLinear()(capture(net, (), "fx"))
    assert_matches_float64(net, gm, (x,))


def test_an_unbatched_input_of_a_convolution_without_shapes():
    net = randomise(nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1))).eval()
    gm = rg.FoldBatchNorm()(capture(net, (), "fx"))
    for shape in [(2, 4, 5), (4, 4)]:
        assert_matches_float64(net, gm, (torch.randn(shape),))


def test_nothing_finite_is_lost_to_a_zero_variance_or_a_nan():
    net = randomise(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).eval()
    with torch.no_grad():
        net[1].running_var[0], net[0].weight[1] = 0.0, float("nan")
    gm = capture(net, (), "fx")
    rg.FoldBatchNorm()(gm)
    assert_matches_float64(net, gm, (sample("conv", 2, 3),))


@pytest.mark.parametrize(
    ("rule", "net", "sites"),
    [
        (rg.FuseBatchNorm2dInConv2d(), nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)), 0),
        (rg.FuseBatchNorm2dInConv2d(), nn.Sequential(nn.ConvTranspose2d(4, 4, 1), nn.BatchNorm2d(4)), 0),
        (rg.FuseBatchNorm2dInConv2d(), nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), 0),
        (rg.FuseBatchNorm1dInLinear(), nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)), 0),
        (rg.FuseBatchNorm1dInLinear(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 1),
    ],
)
def test_each_rule_keeps_to_its_pair(rule, net, sites):
    gm = rule(capture(randomise(net).eval(), (), "fx"))
    assert len(rg.history(gm)[0].applied) == sites


def rows_of(layers: str) -> tuple[nn.Module, torch.Tensor]:
    """A row of layers: `n` a norm; `l` linear, `c` convolution, `p` padded, `t` transposed, `d` dropout."""
    linear = "l" in layers
    makes = {
        "n": (lambda: nn.BatchNorm1d(4)) if linear else (lambda: nn.BatchNorm2d(4)),
        "l": lambda: nn.Linear(4, 4),
        "c": lambda: nn.Conv2d(4, 4, 3),
        "p": lambda: nn.Conv2d(4, 4, 3, padding=1),
        "t": lambda: nn.ConvTranspose2d(4, 4, 2),
        "d": nn.Dropout,
    }
    model = randomise(nn.Sequential(*(makes[layer]() for layer in layers))).eval()
    return model, torch.randn(3, 4) if linear else torch.randn(2, 4, 9, 8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layers", "sites"),
    [
        ("cnn", 2),
        ("cnnn", 3),
        ("nnc", 2),
        ("nnnc", 3),
        ("nncnn", 4),
        ("tnn", 2),
        ("nnp", 0),
        ("nnpn", 1),
        ("nnt", 0),
        ("cndn", 2),
        ("nnl", 2),
        ("nnnl", 3),
        ("lnn", 2),
        ("lnnn", 3),
        ("nlnnl", 3),
        ("nnlnnln", 5),
        ("nnnnnnnnnnl", 10),
    ],
)
def test_norms_in_a_row_and_applied_twice_is_applied_once(layers, sites, form):
    model, x = rows_of(layers)
    gm = capture(model, (x,), form)
    if form == "fx" and "l" in layers:  # without ranks a linear layer takes in one norm, which is then in its way
        sites = layers.count("l")
    report = assert_round_trip(rg.FoldBatchNorm(), gm, (x,))
    assert report.applied == sites
    assert report.applied + report.refused == layers.count("n")
    places = [int(row[2]) for row in report.rows() if row[1] == "refused"]
    assert places == sorted(places)


@pytest.mark.parametrize("layers", ["lnn", "nnl"])
def test_a_second_norm_where_the_rank_is_not_known_says_how_to_make_it_known(layers):
    model, _ = rows_of(layers)
    applied, refused = rg.FoldBatchNorm().explain(torch.fx.symbolic_trace(model)).rows()
    assert applied[1] == "applied"
    assert "is a RankedLinear, into which a batch norm was folded without knowing the rank of its input" in refused[3]
    assert "rg.trace(model, args)" in refused[3]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("layers", ["cnnn", "nnnc", "nncn"])
def test_norms_in_a_row_come_back_one_by_one(layers, order):
    model, x = rows_of(layers)
    gm = capture(model, (x,), "trace")
    before, expected = picture(gm), gm(x)
    rg.FoldBatchNorm()(gm)
    sites = [site.id for site in rg.history(gm)[0].applied]
    for index in order:
        if sites[index] not in {site.id for step in rg.history(gm) for site in step.applied}:
            continue
        now = picture(gm)
        try:
            rg.undo(gm, site=sites[index])
        except rg.ReversalConflict:
            assert picture(gm) == now
        torch.testing.assert_close(gm(x), expected)
    while rg.history(gm):
        rg.undo(gm)
    assert picture(gm) == before
