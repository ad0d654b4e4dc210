"""`PrepackForCpu`: right at every size, fused only where nothing is lost, and never in the way of torch."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import regraft as rg
from helpers import FORMS, Wrap, assert_matches_float64, capture, check_applied, check_refused, randomise, run
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations import _packed_linear as packed_linear
from regraft.transformations._activations import NONE, Activation
from regraft.transformations._packed import CONVOLUTIONS as PACKED
from regraft.transformations._packed import PackedConv2d
from regraft.transformations._packed_linear import PackedLinear

PACK = rg.PrepackForCpu()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.Hardtanh(-0.5, 0.25),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.LeakyReLU(0.2),
    nn.Sigmoid(),
    nn.Tanh(),
]
IMAGE = (torch.randn(2, 4, 9, 8),)


def packed(model, inputs, form="fx"):
    """The packed graph, warmed up: float32 linear layers pack at the second call."""
    gm = PACK(capture(model, inputs, form))
    run(gm, inputs)
    return gm


def test_the_private_operators_are_where_they_were():
    """A new torch that moves them makes regraft fall back, silently slow; so this fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.backends.mkldnn.is_available()
        for kind in (mkldnn.LINEAR, mkldnn.MKL, mkldnn.CONV, mkldnn.CONV_ADD, mkldnn.CONV_SUM):
            assert mkldnn.works(kind, torch.float32)
    assert mkldnn.works(mkldnn.CONV_SUM, torch.float32, Activation("relu"))
    for name in ("relu", "swish", "sigmoid", "tanh", "hardswish", "hardsigmoid"):
        assert mkldnn.works(mkldnn.CONV, torch.float32, Activation(name))


@pytest.fixture
def unknown():
    """Nothing is known yet of what the operators can do, and what is found out is forgotten."""
    mkldnn.works.cache_clear()
    yield
    mkldnn.works.cache_clear()


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def half(request, monkeypatch, unknown):
    """A half precision, on a processor that has no instructions for it."""
    has = mkldnn._has
    monkeypatch.setattr(mkldnn, "_has", lambda kind, dtype: dtype is torch.float32 and has(kind, dtype))
    monkeypatch.setattr(packed_linear, "_TIMES", {})
    return request.param


def test_what_a_half_is_computed_in(half):
    for kind in (mkldnn.LINEAR, mkldnn.CONV, mkldnn.TRANSPOSED):
        assert not mkldnn.works(kind, half)
        assert mkldnn.computed_in(kind, half) is torch.float32
        assert mkldnn.computed_in(kind, torch.float32) is torch.float32
        assert mkldnn.computed_in(kind, torch.float64) is None
    assert mkldnn.computed_in(mkldnn.MKL, half) is torch.float32
    assert mkldnn.computed_in(mkldnn.CONV, half, Activation("no such")) is None


def test_a_half_that_the_processor_knows_stays_one(monkeypatch, unknown):
    monkeypatch.setattr(mkldnn, "_has", lambda kind, dtype: True)
    monkeypatch.setattr(
        mkldnn, "_example", lambda kind, dtype, *_: (torch.ones(1, dtype=dtype), torch.ones(1).double())
    )
    assert mkldnn.computed_in(mkldnn.CONV, torch.float16) is torch.float16
    monkeypatch.setattr(
        mkldnn, "_example", lambda kind, dtype, *_: (torch.zeros(1, dtype=dtype), torch.ones(1).double())
    )
    with pytest.warns(UserWarning, match="disagrees"):
        assert mkldnn.computed_in(mkldnn.LINEAR, torch.float16) is None, "one that is wrong is not used in float32"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Linear, (6, 9)),
        (nn.Conv1d, (2, 9, 7)),
        (nn.Conv2d, (2, 9, 7, 5)),
        (nn.Conv3d, (2, 9, 5, 4, 3)),
        (nn.ConvTranspose2d, (2, 9, 5, 4)),
    ],
    ids=str,
)
def test_a_layer_in_half_precision_is_rounded_once(half, layer, size, bias, monkeypatch):
    fastest(monkeypatch, "onednn")
    plain = randomise(nn.Linear(9, 4, bias) if layer is nn.Linear else layer(9, 4, 3, bias=bias)).to(half)
    x = torch.randn(size).to(half)
    gm = PACK(capture(nn.Sequential(plain, nn.ReLU()), (x,), "fx"))
    for given in (x, x[:1], 2 * x):
        exact = copy.deepcopy(plain).double()(given.double()).relu()
        found = run(gm, (given,))[0]
        assert found.dtype is half
        assert ((found.double() - exact).abs() <= torch.finfo(half).eps / 2 * 1.01 * exact.abs() + 1e-5).all()
    packs = gm.get_submodule("0")._copies.packs
    assert {one.dtype for one in pytree.tree_leaves(packs) if isinstance(one, Tensor)} == {torch.float32}
    with torch.no_grad():
        plain.weight.add_(1)
    assert_matches_float64(nn.Sequential(plain, nn.ReLU()), gm, (x,), slack=6)


@pytest.mark.parametrize("function", [F.relu, torch.relu_, torch.sigmoid])
@pytest.mark.parametrize("other", ["half", "float32", "whole numbers", "of one pixel"])
def test_what_is_added_to_a_convolution_in_half_precision(half, function, other):
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x, y):
            return function(self.c(x) + y)

    model = randomise(Added()).to(half)
    x, y = torch.randn(2, 4, 7, 5).to(half), torch.randn(2, 4, 7, 5)
    pixel = y[..., :1, :1].to(half)
    y = {"half": y.to(half), "float32": y, "whole numbers": (3 * y).int(), "of one pixel": pixel}[other]
    gm = packed(model, (x, y))
    before = y.clone()
    assert_matches_float64(model, gm, (x, y), slack=6)
    assert torch.equal(y, before)


def test_a_sum_in_half_precision_that_is_written_in_place(half):
    model = randomise(
        Wrap(
            lambda m, x: F.relu(m.b(F.relu(m.a(x))).add_(m.a2(x))), **{n: nn.Conv2d(4, 4, 1) for n in ("a", "b", "a2")}
        )
    )
    gm = packed(model.to(half), (torch.randn(2, 4, 7, 5).to(half),))
    for size in [(2, 4, 7, 5), (1, 4, 3, 3)]:
        assert_matches_float64(model, gm, (torch.randn(size).to(half),), slack=6)


def test_an_operator_that_is_gone_or_wrong_is_not_used(monkeypatch, unknown):
    monkeypatch.setattr(mkldnn, "conv", lambda *a: torch.zeros(2, 8, 5, 4))
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 3)))
    with pytest.warns(UserWarning, match="disagrees"):
        check_refused(PACK, model, IMAGE, "fx", "packs no convolution in float32", sites=2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(form, activation, dtype):
    model = randomise(nn.Sequential(nn.Linear(6, 10), *([activation] if activation else []), nn.Linear(10, 3)))
    model = model.to(dtype)
    gm = check_applied(PACK, model, (torch.randn(5, 7, 6).to(dtype),), form, sites=2)
    assert not any(type(m) is type(activation) for m in gm.modules())
    for size in [(35, 6), (5, 7, 6), (5, 7, 6), (1, 6), (6,), (0, 6), (3, 1, 2, 6), (35, 6)] * (form == "fx"):
        assert_matches_float64(model, gm, (torch.randn(size).to(dtype),), slack=6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution(form, activation, dtype):
    layers = [nn.Conv2d(4, 6, 3, padding=1), *([activation] if activation else []), nn.Conv2d(6, 6, 1, groups=2)]
    model = randomise(nn.Sequential(*layers)).to(dtype)
    gm = check_applied(PACK, model, (IMAGE[0].to(dtype),), form, sites=3)
    for size in [(2, 4, 9, 8), (1, 4, 9, 8), (8, 4, 9, 8), (2, 4, 17, 5), (1, 4, 1, 1), (2, 4, 9, 8)] * (form == "fx"):
        assert_matches_float64(model, gm, (torch.randn(size).to(dtype),), slack=6)
        assert all(out.is_contiguous() for out in run(gm, (torch.randn(size).to(dtype),)))


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": "same", "dilation": 2},
        {"dilation": (1, 3)},
        {"groups": 4},
        {"bias": False},
        {"padding": (2, 0), "stride": (1, 2)},
    ],
    ids=str,
)
def test_geometries(settings):
    check_applied(PACK, randomise(nn.Sequential(nn.Conv2d(4, 8, 3, **settings))), IMAGE, sites=2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_dilated_convolution_by_channel_is_given_an_image_that_is_padded(axes, dtype, form, monkeypatch):
    padded = []
    monkeypatch.setattr(F, "pad", lambda x, around, pad=F.pad: padded.append(around) or pad(x, around))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    model = randomise(nn.Sequential(kind(4, 4, 3, padding=8, dilation=8, groups=4), nn.ReLU())).to(dtype)
    x = torch.randn(2, 4, *(6, 7, 9)[:axes]).to(dtype)
    gm = check_applied(PACK, model, (x,), form, sites=2)
    padded.clear()
    for given in (x, x[:1], torch.cat([x, x], -1), x) if form == "fx" else (x,):
        assert_matches_float64(model, gm, (given,), slack=6)
        assert padded == ([(8, 8)] if axes < 3 else [])
        padded.clear()


@pytest.mark.parametrize(
    ("capability", "padding", "dilation", "groups", "around"),
    [
        *(("AVX512", 6, 3, 4, 0), ("AVX512", 7, 3, 4, 7), ("AVX2", 4, 2, 4, 0), ("AVX2", 5, 3, 4, 5)),
        *(("AVX512", 9, 1, 4, 0), ("AVX512", 9, 3, 2, 0), ("AVX512", (9, 2), 3, 4, 0), ("AVX512", (2, 9), 3, 4, 9)),
    ],
)
def test_when_an_image_is_padded_before(capability, padding, dilation, groups, around, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    conv = nn.Conv2d(4, 4, 7, padding=padding, dilation=dilation, groups=groups)
    layer = PackedConv2d.of(conv)
    assert layer._around() == around
    assert layer._geometry()[0][-1] == conv.padding[-1] - around
    assert PackedConv2d.of(nn.Conv2d(4, 8, 7, padding=padding, dilation=dilation, groups=4))._around() == 0


class Residual(nn.Module):
    """Two convolutions whose sum, in one of its spellings, goes through an activation."""

    def __init__(self, add, activation):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.add, self.activation = add, activation

    def forward(self, x):
        first = self.a(x)
        second = self.activation(self.add(self.b(x), first))
        return self.activation(self.add(self.c(self.activation(second * 2)), second))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("add", [operator.add, operator.iadd, torch.add, lambda a, b: b + a, lambda a, b: b.add_(a)])
@pytest.mark.parametrize("activation", [torch.relu, F.silu, F.softplus])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_by_the_convolution(form, add, activation, dtype):
    model = randomise(Residual(add, activation)).to(dtype)
    gm = check_applied(PACK, model, (IMAGE[0].to(dtype),), form, sites=4)
    plain = activation is F.softplus
    assert plain or [gm.get_submodule(name).inplace for name in "abc"] == [False, True, True]
    if form == "fx":
        assert_matches_float64(model, gm, (torch.randn(3, 4, 5, 5).to(dtype),), slack=6)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.a(x) + x,  # the caller's tensor
        lambda self, x: (y := x * 2, self.a(y) + y, y)[1:],  # returned as well
        lambda self, x: (y := x * 2, z := self.a(y) + y, y.sum() + z)[2],  # read later
        lambda self, x: (y := x * 2, v := y.transpose(2, 3), self.a(y) + y, v)[2:],  # a view is read later
        lambda self, x: (y := (x * 2).transpose(0, 1).cos_().transpose(0, 1), self.a(x) + y)[1],  # itself a view
        lambda self, x: (y := x * 2, self.a(y) + y)[1],  # the convolution reads it
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_memory_that_others_read_is_not_written(forward, form):
    model = randomise(Wrap(forward, a=nn.Conv2d(4, 4, 1)))
    gm = packed(model, IMAGE, form)
    assert not gm.a.inplace
    kept = IMAGE[0].clone()
    assert_matches_float64(model, gm, IMAGE)
    assert torch.equal(kept, IMAGE[0])


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.a(x) + self.bias,
        lambda self, x: self.a(x) + 1.0,
        lambda self, x: torch.add(self.a(x), x, alpha=2),
        lambda self, x: self.a(x) + self.a(x),
        lambda self, x: (y := self.a(x), y + torch.relu(y))[1],
        lambda self, x: self.a(x) + x[:1],
        lambda self, x: self.a(x[:1]) + x,
        lambda self, x: self.a(x) + x.double(),
        lambda self, x: (y := x * 2, y.add_(self.a(x)), y)[1:],  # into what the caller gets as well
        lambda self, x: (y := x * 2, z := self.a(x).add_(y), y, z)[1:],
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_other_additions_stay_right(forward, form):
    model = randomise(Wrap(forward, a=nn.Conv2d(4, 4, 1), bias=nn.Parameter(torch.randn(4, 1, 1))))
    assert_matches_float64(model, packed(model, IMAGE, form), IMAGE)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.a(x).view(x.shape[0], -1),
        lambda self, x: torch.relu(self.a(x)).view(2, -1),
        lambda self, x: self.a(x).flatten(2).view(2, -1),
        lambda self, x: torch.as_strided(self.a(x), (2, 3), (3, 1)),
        lambda self, x: {"kept": self.a(x), "both": (self.a(x),)},
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_who_needs_the_usual_layout_gets_it(forward, form):
    model = randomise(Wrap(forward, a=nn.Conv2d(4, 4, 1)))
    gm = packed(model, IMAGE, form)
    assert_matches_float64(model, gm, IMAGE)
    assert [out.stride() for out in run(gm, IMAGE)] == [out.stride() for out in run(model, IMAGE)]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: F.layer_norm(self.a(x), (8,)).view(2, -1),
        lambda self, x: self.norm(self.a(x)).view(2, -1),
        lambda self, x: self.linear(self.a(x)).view(2, -1),
        lambda self, x: (self.a(x) @ self.matrix).view(2, -1),
        lambda self, x: (x * 2).view(self.a(x).shape[0], -1),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_has_the_usual_layout_is_left_alone(forward, form):
    parts = {"norm": nn.LayerNorm(8), "linear": nn.Linear(8, 8), "matrix": nn.Parameter(torch.randn(8, 8))}
    gm = packed(randomise(Wrap(forward, a=nn.Conv2d(4, 4, 1), **parts)), IMAGE, form)
    assert not [node for node in gm.graph.nodes if node.target is torch.ops.aten.contiguous.default]


@pytest.mark.parametrize("axes", [2, 3])
def test_images_are_joined_with_their_channels_last(axes):
    """torch lays the result with the channels first where its inputs differ, and each convolution then copies it."""
    conv, pool = (nn.Conv2d, F.max_pool2d) if axes == 2 else (nn.Conv3d, F.max_pool3d)
    inputs = (torch.randn(2, 4, 6, *(8,) * (axes - 1)),)
    model = Wrap(
        lambda self, x: self.b(torch.cat([pool(x, 2), self.a(x), self.a(x).tanh()], dim=1)),
        a=conv(4, 8, 3, 2, padding=1),
        b=conv(20, 4, 1),
    )
    gm = check_applied(PACK, randomise(model), inputs, "trace", sites=4)
    lies = []
    layout = mkldnn.channels_last(axes)
    gm.get_submodule("b").register_forward_pre_hook(
        lambda _, given: lies.append(given[0].is_contiguous(memory_format=layout))
    )
    run(gm, inputs)
    assert lies == [True]
    laid = [node for node in gm.graph.nodes if node.kwargs.get("memory_format") is layout]
    assert [node.args[0].name.startswith("max_pool") for node in laid] == [True]


@pytest.mark.parametrize("form", FORMS)
def test_beside_a_convolution_that_is_not_packed_twice_is_once(form):
    """Its values are channels last for all that is known, so what was laid for them is met again."""
    model = Wrap(
        lambda self, x: self.b(torch.cat([self.c(x), self.a(x), x], 1)).view(2, -1),
        a=nn.Conv2d(4, 8, 3, padding=1),
        b=nn.Conv2d(20, 4, 2, padding="same"),
        c=nn.Conv2d(4, 8, 2, padding="same"),
    )
    gm = packed(randomise(model), IMAGE, form)
    once = str(gm.graph)
    assert_matches_float64(model, gm, IMAGE)
    PACK(gm)
    assert str(gm.graph) == once


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: torch.cat([self.a(x), self.a(x)], 1),
        lambda self, x: torch.cat([x.sin(), x.cos()], 1) * self.a(x).mean(),
        lambda self, x: torch.cat([self.a(x).mean((2, 3)), x.mean((2, 3))], 1),
    ],
)
def test_what_is_joined_of_one_kind_is_left_alone(forward):
    model = randomise(Wrap(forward, a=nn.Conv2d(4, 4, 1)))
    gm = packed(model, IMAGE, "trace")
    assert_matches_float64(model, gm, IMAGE)
    assert not [node for node in gm.graph.nodes if node.kwargs.get("memory_format") is torch.channels_last]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_laid_as_the_caller_gets_it_before_it_is_enlarged(mode, form):
    model = randomise(Wrap(lambda self, x: F.interpolate(self.a(x), scale_factor=2.0, mode=mode), a=nn.Conv2d(4, 8, 3)))
    gm = check_applied(PACK, model, IMAGE, form, sites=3)
    assert [out.stride() for out in run(gm, IMAGE)] == [out.stride() for out in run(model, IMAGE)]
    laid, _ = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default)
    assert laid.args[0].op == "call_module"


@pytest.mark.parametrize("form", FORMS)
def test_an_image_of_one_pixel_that_is_enlarged_lies_as_the_caller_gets_it(form):
    """It lies both ways, so that torch may enlarge it either way."""
    inputs = (torch.randn(2, 4, 3, 3),)
    model = randomise(Wrap(lambda self, x: F.interpolate(self.a(x), (4, 5), mode="bilinear"), a=nn.Conv2d(4, 8, 3)))
    gm = packed(model, inputs, form)
    assert [out.stride() for out in run(gm, inputs)] == [out.stride() for out in run(model, inputs)]


def test_an_image_that_is_enlarged_and_read_is_laid_behind():
    forward = lambda self, x: (y := F.interpolate(self.a(x), scale_factor=2.0), torch.relu(self.b(y)))
    model = randomise(Wrap(forward, a=nn.Conv2d(4, 8, 3), b=nn.Conv2d(8, 4, 1)))
    gm = check_applied(PACK, model, IMAGE, "trace", sites=3)
    assert [out.stride() for out in run(gm, IMAGE)] == [out.stride() for out in run(model, IMAGE)]


def test_weights_that_change_are_packed_again():
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 7 * 6, 5)))
    gm = packed(model, IMAGE)
    run(gm, IMAGE)
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.mul_(1.5)
    assert_matches_float64(model, gm, IMAGE)  # the parameters are the model's
    for parameter in gm.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(gm.parameters(), lr=0.1, fused=True).step()  # of which torch counts nothing
    assert_matches_float64(model, gm, IMAGE)
    gm.load_state_dict(randomise(copy.deepcopy(model), 7).state_dict())
    assert_matches_float64(model, gm, IMAGE)
    gm.get_submodule("2").weight = nn.Parameter(torch.randn(5, 6 * 7 * 6))
    changed = copy.deepcopy(model)
    changed[2].weight = gm.get_submodule("2").weight
    assert_matches_float64(changed, gm, IMAGE)
    rg.undo(gm)
    assert_matches_float64(changed, gm, IMAGE)


def fastest(monkeypatch, *ways):
    """Let the ways to compute a linear layer be as fast as is said here, the fastest first."""
    monkeypatch.setattr(packed_linear, "ranked", lambda *_: ways)


needs_mkl = pytest.mark.skipif(not mkldnn.works(mkldnn.MKL, torch.float32), reason="a build without MKL")


@needs_mkl
@pytest.mark.parametrize("way", ["mkl", "pixels"])
def test_a_weight_is_packed_for_a_number_of_rows_that_comes_twice_running(way, monkeypatch, without_avx512):
    fastest(monkeypatch, way, "onednn", "plain")
    model = randomise(nn.Sequential(nn.Linear(7, 5)))
    gm = PACK(capture(model, (torch.randn(4, 7),), "fx"))
    layer = gm.get_submodule("0")
    assert isinstance(layer, PackedLinear)
    packs = []
    for rows in (6, 4, 6, 4, 4, 6, 6, 9, 9):  # some that do not come back, and of three the oldest goes
        assert_matches_float64(model, gm, (torch.randn(rows, 7),))
        packs.append((rows, [(key, way) for key, (way, _) in layer._copies.packs.items()]))
    four, six, nine = ((rows, way) for rows in (4, 6, 9))
    assert packs == [
        *((6, []), (4, []), (6, []), (4, []), (4, [four]), (6, [four]), (6, [four, six]), (9, [four, six])),
        (9, [six, nine]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [nn.Identity(), nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_onednn_packs_a_weight_once_for_all_rows(activation, dtype, monkeypatch):
    fastest(monkeypatch, "onednn", "plain", "mkl")
    model = randomise(nn.Sequential(nn.Linear(7, 64), activation)).to(dtype)
    gm = PACK(capture(model, (torch.randn(4, 7).to(dtype),), "fx"))
    packs = gm.get_submodule("0")._copies.packs
    for rows in (1, 5, 300):
        assert_matches_float64(model, gm, (torch.randn(rows, 7).to(dtype),))
        packs = gm.get_submodule("0")._copies.packs
        assert packs[rows] == ("onednn", packs["onednn"])
    assert list(packs) == ["onednn", 1, 5, 300]
    assert packs[1][1] is packs[5][1] is packs[300][1]


@pytest.fixture
def without_avx512(monkeypatch, unknown):
    """A processor that has AVX2 and no more, as far as torch says so."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "activation", [nn.Identity(), nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Hardswish()]
)
def test_a_layer_by_pixels(activation, half, monkeypatch, without_avx512):
    fastest(monkeypatch, "pixels")
    if half is not None:
        has = mkldnn._has
        monkeypatch.setattr(mkldnn, "_has", lambda kind, dtype: dtype is not half and has(kind, dtype))
    computed, conv = [], mkldnn.conv
    for sizes, bias in (((7, 64), True), ((1, 5), False), ((6, 1), True), ((33, 31), False)):
        model = randomise(nn.Sequential(nn.Linear(*sizes, bias=bias), activation)).to(half or torch.float32)
        x = torch.randn(3, 5, sizes[0]).to(half or torch.float32)
        gm = PACK(capture(model, (x,), "fx"))
        for given in (x, x[:1], x[:, 0], x.mT.contiguous().mT, x[:, ::2]):
            for _ in range(2):  # the second of an equal number of rows packs
                run(gm, (given,))
            with monkeypatch.context() as patch:
                patch.setattr(mkldnn, "conv", lambda *args: computed.append(args[0].dtype) or conv(*args))
                assert_matches_float64(model, gm, (given,))
            found, expected = run(gm, (given,))[0], run(model, (given,))[0]
            assert found.stride() == expected.stride()
            assert found.dtype is expected.dtype
    assert len(computed) == 20
    assert set(computed) == {torch.float32}


@pytest.mark.parametrize(("capability", "there"), [("AVX2", True), ("AVX512", False), ("DEFAULT", False)])
def test_rows_are_pixels_without_avx_512_alone(monkeypatch, capability, there, unknown):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(packed_linear, "_TIMES", {})
    monkeypatch.setattr(packed_linear, "_BY_PIXELS", {})
    monkeypatch.setattr(packed_linear, "seconds", lambda *runs, **_: [1.0 for _ in runs])
    assert mkldnn.works(mkldnn.PIXELS, torch.float32) is there
    for rows in (1, 2, 9):
        ways = packed_linear.ranked(torch.randn(rows, 7), torch.randn(5, 7), None, rows, NONE)
        assert ("pixels" in ways) is (there and rows > 1)
        faster = packed_linear.as_good_by_pixels(torch.randn(rows, 7), torch.randn(5, 7), None)
        assert faster is (there and rows > 1)  # within a twentieth


@pytest.mark.parametrize(("times", "as_good"), [((2.15, 2), True), ((2.25, 2), False), ((1, 2), True)])
def test_in_a_program_a_layer_by_pixels_has_to_keep_up_with_the_product(times, as_good, monkeypatch, without_avx512):
    left, x, weight = list(times), torch.randn(4, 7), torch.randn(5, 7)
    monkeypatch.setattr(packed_linear, "_BY_PIXELS", {})
    monkeypatch.setattr(packed_linear, "seconds", lambda *runs, **_: [[run(), left.pop(0)][1] for run in runs])
    assert packed_linear.as_good_by_pixels(x, weight, None) is as_good
    assert packed_linear.as_good_by_pixels(x[:3], weight, None) is as_good  # which is not timed again
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not packed_linear.as_good_by_pixels(x, weight, None)


@pytest.mark.parametrize(
    ("activation", "capability", "inside"),
    [
        *((activation, "AVX512", True) for activation in (nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh())),
        *((activation, "AVX2", False) for activation in (nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh())),
        *((activation, "AVX2", True) for activation in (nn.ReLU(), nn.Sigmoid(), nn.Hardswish())),
    ],
)
def test_without_avx_512_an_exponential_comes_after_the_product(monkeypatch, activation, capability, inside):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    fastest(monkeypatch, "onednn")
    assert mkldnn.computed_in(mkldnn.LINEAR, torch.float32)
    computed, product = [], mkldnn.linear
    monkeypatch.setattr(mkldnn, "linear", lambda *given: computed.append(given[3]) or product(*given))
    model = randomise(nn.Sequential(nn.Linear(7, 64), activation))
    gm = PACK(capture(model, (torch.randn(4, 7),), "fx"))
    for rows in (1, 4):
        assert_matches_float64(model, gm, (torch.randn(rows, 7),))
    assert [one is not NONE for one in computed] == [inside] * 2


def test_where_torch_itself_is_fastest_nothing_is_packed(monkeypatch):
    fastest(monkeypatch, "plain", "onednn", "mkl")
    model = randomise(nn.Sequential(nn.Linear(7, 64), nn.ReLU()))
    gm = PACK(capture(model, (torch.randn(4, 7),), "fx"))
    for _ in range(3):
        assert_matches_float64(model, gm, (torch.randn(4, 7),))
    assert gm.get_submodule("0")._copies.packs == {4: ("plain", None)}


@needs_mkl
def test_rows_that_do_not_come_back_take_the_weight_that_is_packed_for_any(monkeypatch):
    fastest(monkeypatch, "onednn", "mkl", "plain")
    layer, x = PackedLinear.of(randomise(nn.Linear(7, 5))), torch.randn(300, 7)
    with torch.no_grad():
        layer(x[:2])
        fastest(monkeypatch, "mkl", "plain", "onednn")
        calls, real = [], mkldnn.linear
        monkeypatch.setattr(mkldnn, "linear", lambda *given: (calls.append(len(given[0])), real(*given))[1])
        layer(x)
        assert calls == [300]
        assert list(layer._copies.packs) == ["onednn", 2]
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))  # and these come back
    assert list(layer._copies.packs) == ["onednn", 2, 300]


def test_each_way_is_timed_once_for_about_so_many_rows_and_for_each_kind_of_layer(monkeypatch):
    timed = []
    monkeypatch.setattr(packed_linear, "_TIMES", {})
    monkeypatch.setattr(packed_linear, "seconds", lambda *runs, **_: timed.extend(runs) or [1.0 for _ in runs])

    def new(layer, rows):
        timed.clear()
        with torch.no_grad():
            PackedLinear.of(layer)(torch.randn(rows, layer.in_features, dtype=layer.weight.dtype))
        return bool(timed)

    layer = nn.Linear(7, 5)
    assert [new(layer, rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [True, True, True, False, True, False, True]
    assert [new(nn.Linear(7, 5, bias=bias), 1) for bias in (True, False)] == [False, True]
    assert [new(nn.Linear(7, 5), 1), new(nn.Linear(5, 7), 1), new(nn.Linear(7, 5).bfloat16(), 1)] == [False, True, True]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert new(layer, 1)


def test_nothing_is_timed_where_results_are_to_be_the_same_everywhere(monkeypatch):
    monkeypatch.setattr(packed_linear, "_TIMES", {})
    monkeypatch.setattr(packed_linear, "seconds", lambda *_, **__: pytest.fail("timed"))
    layer, x = PackedLinear.of(randomise(nn.Linear(7, 5))), torch.randn(4, 7)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert layer._copies.packs == {4: ("plain", None)}


def test_the_ranking_follows_the_clock_and_saves_memory_where_the_times_are_close(monkeypatch, without_avx512):
    if not mkldnn.works(mkldnn.LINEAR, torch.float32) or not mkldnn.works(mkldnn.MKL, torch.float32):
        pytest.skip("a build without one of the ways")
    x, weight = torch.randn(4, 7), torch.randn(5, 7)
    for times, expected in (
        ((1.0, 0.5, 0.4, 0.6), ("mkl", "onednn", "pixels", "plain")),
        ((1.0, 0.4, 0.5, 0.3), ("pixels", "onednn", "mkl", "plain")),
        ((1.0, 0.96, 0.97, 0.98), ("plain", "onednn", "mkl", "pixels")),
        ((1.0, 0.5, 0.49, 0.48), ("onednn", "pixels", "mkl", "plain")),
    ):
        left = list(times)
        monkeypatch.setattr(packed_linear, "_TIMES", {})
        monkeypatch.setattr(packed_linear, "seconds", lambda *_, left=left, **__: left)
        assert packed_linear.ranked(x, weight, None, 4, NONE) == expected
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("times", "shortest"),
    [
        ((4, 3, 4, 2, 3, 2.5, 1, 2, 0.3), [1]),
        ((9, 8, 4, 2), [4]),
        ((70, 60, 50), [60]),
        ((15, 30, 1), [15]),
        ((1, 7, 2, 6, 3, 8, 0.5, 5), [1, 6]),  # in turns, until one of them has taken long
    ],
)
def test_what_takes_long_is_timed_less_often(times, shortest, monkeypatch):
    ticks = iter([tick for time in times for tick in (0.0, time / 1000)])
    monkeypatch.setattr(packed_linear.time, "perf_counter", lambda: next(ticks))
    assert packed_linear.seconds(*[lambda: None for _ in shortest]) == [time / 1000 for time in shortest]


@pytest.mark.parametrize("cold", [False, True])
def test_before_a_cold_call_the_caches_are_filled_with_something_else(cold, monkeypatch):
    order, real = [], torch.Tensor.sum

    def summed(tensor):
        order.append(tensor.numel() * tensor.element_size())
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "sum", summed)
    packed_linear.seconds(lambda: order.append("a"), lambda: order.append("b"), cold=cold)
    size = torch.get_num_threads() * packed_linear.CACHE if cold else 0
    assert order == [size, "a", size, "b"] * packed_linear.ROUNDS


def test_large_weights_are_timed_as_they_are_found_in_a_network(monkeypatch):
    asked = []
    monkeypatch.setattr(packed_linear, "_TIMES", {})
    monkeypatch.setattr(packed_linear, "seconds", lambda *runs, cold: asked.append(cold) or [1.0 for _ in runs])
    for features in (8, 256):
        packed_linear.ranked(torch.randn(2, 256), torch.randn(features, 256), None, 2, NONE)
    assert asked == [False, True]


def test_moving_and_copying():
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 7 * 6, 5)))
    gm = packed(model, IMAGE)
    run(gm, IMAGE)
    settled = run(gm, IMAGE)[0]  # at the second call of a number of rows, MKL may take over from torch's own product
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), copy.copy(gm)):
        run(other, IMAGE)
        assert torch.equal(run(other, IMAGE)[0], settled)
    other = copy.deepcopy(gm).double()
    torch.testing.assert_close(other(IMAGE[0].double()), copy.deepcopy(model).double()(IMAGE[0].double()))
    other = copy.deepcopy(gm).bfloat16()
    assert other(IMAGE[0].bfloat16()).dtype is torch.bfloat16
    assert list(gm.state_dict()) == list(model.state_dict())
    assert all(parameter is other for parameter, other in zip(gm.parameters(), model.parameters(), strict=True))
    assert isinstance(gm.get_submodule("0"), nn.Conv2d)
    assert isinstance(gm.get_submodule("3"), nn.Linear)


def test_gradients_autocast_compilation_and_vmap_get_the_plain_layers():
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 3), nn.SiLU(), nn.Flatten(), nn.Linear(6 * 7 * 6, 5), nn.ReLU()))
    gm = packed(model, IMAGE)
    gm(IMAGE[0]).sum().backward()
    got = [parameter.grad for parameter in gm.parameters()]
    gm.zero_grad()
    model(IMAGE[0]).sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert gm(IMAGE[0]).dtype is torch.bfloat16
    with torch.no_grad():
        batch = torch.stack([IMAGE[0], 2 * IMAGE[0]])
        torch.testing.assert_close(torch.vmap(gm)(batch), torch.vmap(model)(batch))
        with forward_ad.dual_level():
            x = forward_ad.make_dual(IMAGE[0], batch[1])
            tangents = [forward_ad.unpack_dual(f(x)).tangent for f in (gm, model)]
        assert tangents[0] is not None
        torch.testing.assert_close(*tangents)
    with torch.inference_mode():
        torch.testing.assert_close(gm(IMAGE[0]), model(IMAGE[0]))
    exported = torch.export.export(gm, IMAGE).module()
    torch.testing.assert_close(exported(*IMAGE), model(*IMAGE))


@pytest.mark.parametrize("form", FORMS)
def test_tied_and_shared_layers(form):
    model = randomise(
        Wrap(lambda self, x: self.b(F.relu(self.a(F.relu(self.a(x))))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    )
    model.b.weight = model.a.weight
    gm = check_applied(PACK, model, (torch.randn(3, 6),), form, sites=2)
    assert gm.a.weight is gm.b.weight is model.a.weight
    assert gm.a.activation is NONE


def test_what_is_packed():
    gm = packed(randomise(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(252, 5))), IMAGE)
    assert type(gm.get_submodule("0")) is PackedConv2d
    assert type(gm.get_submodule("2")) is PackedLinear


def hooked():
    layer = nn.Linear(8, 3)
    layer.register_forward_hook(lambda *args: None)
    return layer


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(8, 3).double()), "packs no linear in float64"),
        (nn.Sequential(nn.Conv1d(4, 3, 1)), "over one axis in float32"),
        (nn.Sequential(nn.ConvTranspose1d(4, 3, 1)), "only those over two axes"),
        (nn.Sequential(nn.Conv2d(4, 3, 2, padding="same")), "differently"),
        (nn.Sequential(nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect")), "zeros"),
        (nn.Sequential(hooked()), "hooks"),
        (Wrap(lambda self, x: F.linear(x, self.w * 2), w=nn.Parameter(torch.randn(3, 8))), "computed by the graph"),
        (Wrap(lambda self, x: F.linear(x, self.w) + self.w, w=nn.Parameter(torch.randn(8, 8))), "is read by 2 nodes"),
        (Wrap(lambda self, x: F.linear(x, self.w), w=nn.Parameter(torch.randn(8))), "is a vector"),
    ],
)
def test_refused(model, words):
    flat = isinstance(getattr(model, "0", None), (nn.Linear, nn.Conv1d, nn.ConvTranspose1d))
    size = (2, 4, 8) if flat else (2, 4, 8, 8)
    convs = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d)
    sites = 1 + any(isinstance(layer, convs) for layer in model.modules())
    check_refused(PACK, randomise(model), (torch.randn(size),), "fx", words, sites=sites)


CONVOLUTIONS = {
    "1d, groups": (nn.Conv1d(4, 8, 3, padding=1, groups=2), nn.Conv1d(8, 8, 5, stride=2, groups=8), (2, 4, 30)),
    "3d": (nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(6, 4, (1, 2, 3), stride=(1, 2, 1), groups=2), (2, 4, 5, 7, 6)),
    "transposed": (
        nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, output_padding=2),
        nn.ConvTranspose2d(6, 8, 2, stride=2, groups=2, dilation=3, bias=False),
        (2, 4, 5, 6),
    ),
    "transposed, then not": (nn.ConvTranspose2d(4, 6, 2, stride=2), nn.Conv2d(6, 4, 3, padding=1), (2, 4, 5, 6)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_the_caller_gets_is_laid_out_as_in_the_capture(layout):
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 1))).eval()
    x = torch.randn(2, 4, 8, 8).to(memory_format=layout)
    gm = PACK(rg.trace(model, (x,)))
    assert run(gm, (x,))[0].stride() == model(x).stride()
    assert len([n for n in gm.graph.nodes if "contiguous" in n.name]) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU("tanh"), nn.SiLU(), nn.LeakyReLU(0.2)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_over_other_axes_and_transposed(form, activation, name, dtype):
    first, second, size = CONVOLUTIONS[name]
    model = randomise(nn.Sequential(copy.deepcopy(first), activation, copy.deepcopy(second))).eval().to(dtype)
    gm = check_applied(PACK, model, (torch.randn(size).to(dtype),), form, sites=3)
    assert not any(type(m) is type(activation) for m in gm.modules())
    assert sum(isinstance(m, PACKED) for m in gm.modules()) == 2
    for batch, more in ((2, 0), (1, 0), (7, 3), (2, 1), (2, 0)) if form == "fx" else ():
        x = torch.randn(batch, size[1], *(n + more for n in size[2:])).to(dtype)
        assert_matches_float64(model, gm, (x,), slack=6)
        assert all(out.is_contiguous() for out in run(gm, (x,)))
        if x.ndim > 3:
            layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
            assert_matches_float64(model, gm, (x.to(memory_format=layout),), slack=6)


FUNCTIONS = {
    "linear": (lambda m, x: F.relu(F.linear(x, m.m, m.b)), 1),
    "linear without bias": (lambda m, x: F.linear(x, m.m).sum(-1), 1),
    "convolution": (lambda m, x: F.silu(F.conv2d(x, m.k, m.b, padding=1, groups=2)).mean(), 2),
    "convolution and a sum": (lambda m, x: F.conv2d(x, m.k, padding="same", groups=2) + x, 2),
    "transposed": (lambda m, x: F.conv_transpose2d(x, m.t, m.c, 2), 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_functional_layers(name, dtype):
    function, sites = FUNCTIONS[name]
    shapes = {"m": (8, 8), "b": (8,), "k": (8, 4, 3, 3), "t": (8, 3, 2, 2), "c": (3,)}
    model = Wrap(function, **{key: nn.Parameter(torch.empty(shape)) for key, shape in shapes.items()})
    model, inputs = randomise(model).eval().to(dtype), (torch.randn(2, 8, 9, 8).to(dtype),)
    sites -= name == "convolution"  # whose result goes no further than the mean
    gm = check_applied(PACK, model, inputs, "trace", sites=sites)
    assert sum(isinstance(m, (PackedLinear, *PACKED)) for m in gm.modules()) == 1
    assert not gm.graph.find_nodes(op="get_attr")
    run(gm, inputs)
    assert_matches_float64(model, gm, inputs, slack=6)


def test_a_functional_layer_is_taken_back_with_what_it_has_learnt():
    model = randomise(Wrap(lambda m, x: F.linear(x, m.m), m=nn.Parameter(torch.empty(3, 8))))
    gm = PACK(rg.trace(model, (torch.randn(2, 8),)))
    with torch.no_grad():
        gm.get_submodule("linear").weight.add_(1)
    expected = gm.get_submodule("linear").weight.detach().clone()
    rg.undo(gm)
    assert torch.equal(gm.get_parameter("m"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_private_operators_of_other_convolutions(dtype):
    assert mkldnn.computed_in(mkldnn.TRANSPOSED, dtype) is not None
    for kind in (mkldnn.CONV, mkldnn.CONV_ADD, mkldnn.CONV_SUM):
        assert mkldnn.computed_in(kind, dtype, axes=3) is not None


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv3d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x):
        first = self.a(x)
        return torch.relu(self.b(first) + first) + first.mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_in_three_dimensions(dtype):
    model, x = randomise(Volume()).eval().to(dtype), torch.randn(2, 4, 5, 6, 7).to(dtype)
    gm = check_applied(PACK, model, (x,), "trace", sites=3)
    assert "add" not in [n.target for n in gm.graph.nodes]
    assert len(gm.graph.find_nodes(op="call_module", target="b")[0].args) == 2


def test_a_sum_is_not_fused_where_onednn_has_none():
    for layer, size in ((nn.ConvTranspose2d(4, 4, 1), (2, 4, 5, 6)), (nn.Conv1d(4, 4, 1, groups=2), (2, 4, 9))):
        model = randomise(Wrap(lambda m, x: torch.relu(m.layer(x) + x), layer=layer)).eval()
        gm = check_applied(PACK, model, (torch.randn(size),), "trace", sites=2)
        assert len(gm.graph.find_nodes(op="call_module", target="layer")[0].args) == 1


def test_a_wrong_transposed_operator_is_not_used(monkeypatch, unknown):
    monkeypatch.setattr(mkldnn, "transposed", lambda *a: torch.zeros(2, 8, 18, 14))
    model = randomise(nn.Sequential(nn.ConvTranspose2d(4, 6, 3)))
    with pytest.warns(UserWarning, match="disagrees"):
        check_refused(PACK, model, IMAGE, "fx", "packs no transposed convolution in float32", sites=2)


def packed_by_onednn(monkeypatch):
    """A model with a convolution and a linear layer, an input, and its graph, in which oneDNN packs both."""
    fastest(monkeypatch, "onednn")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8)).eval()
    x = torch.randn(16, 3, 8, 8)
    gm = rg.PrepackForCpu()(rg.trace(model, (x,)))
    return model, x, gm


@pytest.mark.skipif(not mkldnn.works(mkldnn.LINEAR, torch.float32), reason="a build without oneDNN")
def test_verify_notices_a_weight_that_was_written_behind_torchs_back(monkeypatch):
    model, x, gm = packed_by_onednn(monkeypatch)
    with torch.no_grad():
        gm(x)
        for layer in ("0", "3"):
            model.get_submodule(layer).weight.data.mul_(2)
            assert not rg.verify(model, gm, (x,)).ok
            gm.get_submodule(layer).repack()
            assert rg.verify(model, gm, (x,)).ok


@pytest.mark.skipif(not mkldnn.works(mkldnn.LINEAR, torch.float32), reason="a build without oneDNN")
def test_a_weight_that_lies_where_another_was_freed_is_packed_anew(monkeypatch):
    model, x, gm = packed_by_onednn(monkeypatch)
    with torch.no_grad():
        for layer in ("0", "3"):
            weight = gm.get_submodule(layer).weight
            memory = bytearray(weight.nbytes)
            for scale in (1, 3):
                values = weight.detach() * scale
                weight.data = torch.empty(0)
                weight.data = torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values)
                torch.testing.assert_close(gm(x), model(x), atol=1e-4, rtol=1e-4)


def test_a_weight_whose_changes_cannot_be_seen_is_not_packed():
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        gm = rg.PrepackForCpu()(rg.symbolic_trace(model))
    reason = rg.history(gm)[-1].refused[0].reason
    assert reason == "0.weight was made in inference mode, where torch does not count what is written to it"
    ordinary = nn.Sequential(nn.Linear(4, 8)).eval()
    gm = rg.PrepackForCpu()(rg.symbolic_trace(ordinary))
    with torch.inference_mode():
        gm.get_submodule("0").weight = nn.Parameter(torch.randn(8, 4))
        x = torch.randn(5, 4)
        gm(x), gm(x)
        gm.get_submodule("0").weight.mul_(2)
        torch.testing.assert_close(gm(x), nn.functional.linear(x, gm.get_submodule("0").weight, ordinary[0].bias))


def test_weights_made_within_inference_mode_can_be_trained_and_packed():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    with torch.inference_mode():
        gm = rg.PrepackForCpu()(rg.FoldBatchNorm()(rg.symbolic_trace(model)))
    assert not any(weight.is_inference() for weight in gm.parameters())
    assert [step.transformation for step in rg.history(gm) if step.applied] == ["FoldBatchNorm", "PrepackForCpu"]
    gm(torch.randn(1, 3, 8, 8)).sum().backward()
    assert gm.get_submodule("0").weight.grad is not None
