"""Tests for the mutants that had survived; docs/mutation.md explains those that cannot be caught."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import regraft as rg
from regraft.core.weights import Concatenate, same_bits, scaled, wider
from regraft.testing import assert_refused, assert_round_trip
from regraft.testing.parts import add_one, randomised, traced_with_shapes
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations import _packed as packed
from regraft.transformations import _packed_linear as packed_linear
from regraft.transformations._activations import NONE, Activation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.q(x), self.k(x)


class Vector(nn.Module):
    """A weight that is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
        self.other = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias), F.linear(x, self.other)


@pytest.mark.parametrize("rule", [rg.FuseBiasInLinear, rg.MergeLinears])
def test_a_hook_is_not_lost(rule: type[rg.Rewrite]) -> None:
    model = Block().eval()
    model.q.register_forward_hook(add_one)
    model.k.register_forward_hook(add_one)
    assert_refused(rule(), torch.fx.symbolic_trace(model), match="q has hooks")


@pytest.mark.parametrize("rule", [rg.FuseBiasInLinear, rg.MergeLinears])
def test_a_weight_that_is_a_vector(rule: type[rg.Rewrite]) -> None:
    assert_refused(rule(), torch.fx.symbolic_trace(Vector()), match="not a matrix|no bias")


def test_a_fused_layer_says_how_many_features_it_takes() -> None:
    gm = rg.FuseBiasInLinear()(torch.fx.symbolic_trace(Block().eval()))
    assert (gm.q.in_features, gm.q.out_features) == (5, 2)


def test_the_merged_layer_stands_where_its_parts_stood() -> None:
    gm = rg.MergeLinears()(torch.fx.symbolic_trace(nn.Sequential(Block().eval())))
    assert [name for name, module in gm.named_modules() if isinstance(module, nn.Linear)] == ["0.q_k"]


class Buffer(nn.Module):
    """Divides by a buffer, and rounds."""

    def __init__(self, divisor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("divisor", divisor)

    def forward(self, x):
        return (x / self.divisor).floor()


class Divided(nn.Module):
    def forward(self, x):
        return x / 4


class Subclass(torch.Tensor):
    """No ordinary tensor."""


def test_only_a_buffer_of_powers_of_two_is_inverted_before_rounding() -> None:
    exact = rg.symbolic_trace(Buffer(torch.tensor([8.0, 0.5])))
    assert assert_round_trip(rg.ChangeTrueDivToMulByInverse(), exact, (torch.randn(3, 2),)).applied == 1
    for divisor in ([3.0, 7.0], [8.0, 7.0]):
        gm = rg.symbolic_trace(Buffer(torch.tensor(divisor)))
        assert_refused(rg.ChangeTrueDivToMulByInverse(), gm, match="rounded or compared")


def test_a_divisor_of_another_class_stays() -> None:
    gm = rg.symbolic_trace(Buffer(torch.tensor([8.0]).as_subclass(Subclass)))
    assert_refused(rg.ChangeTrueDivToMulByInverse(), gm, match="is a Subclass")


def test_the_report_names_the_divisor_and_its_inverse() -> None:
    gm = rg.ChangeTrueDivToMulByInverse()(rg.symbolic_trace(Divided()))
    assert [site.sentence for site in rg.history(gm)[0].applied] == ["/ 4 became * 0.25"]


@pytest.mark.parametrize("shape", [(300, 200), (3, 40000), (1, 70000), (40000,), (4, 4)])
@pytest.mark.parametrize("one", [True, False])
def test_a_large_weight_is_scaled_in_blocks(shape: tuple[int, ...], one: bool) -> None:
    weight = torch.randn(shape)
    factors = torch.randn(1 if one else len(weight), *(1,) * (len(shape) - 1), dtype=torch.float64)
    result = scaled(weight, factors)
    assert result.dtype is weight.dtype
    assert torch.equal(result, (weight.double() * factors).float())


def test_a_scalar_weight_is_scaled() -> None:
    assert scaled(torch.tensor(3.0), torch.tensor(2.0, dtype=torch.float64)).item() == 6


def test_halves_are_computed_in_float32_and_the_others_in_float64() -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [wider(dtype) for dtype in types] == [torch.float32, torch.float32, torch.float64, torch.float64]


def test_the_same_bits() -> None:
    one = torch.tensor([1.0, math.nan])
    assert same_bits(one, one.clone())
    assert same_bits(torch.tensor([1j]), torch.tensor([1j]))
    assert same_bits(torch.tensor([1]), torch.tensor([1]))
    assert same_bits(one.to("meta"), one.to("meta"))
    others = [one.double(), one[:1], torch.tensor([[1.0, math.nan]]), one.to("meta"), torch.tensor([1.0, 0.0])]
    assert not any(same_bits(one, other) for other in others)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1j]), torch.tensor([-1j]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([2]))


def test_zeros_that_were_put_in_come_out_only_while_they_are_zeros() -> None:
    a, b = torch.randn(2), torch.randn(3)
    joined = Concatenate(0, ((2,), (4,), (3,)), (False, True, False), ((2,), (3, 1)))
    whole = joined.compute(a, b.reshape(3, 1))
    assert torch.equal(whole, torch.cat([a, torch.zeros(4), b]))
    back = joined.invert(whole)
    assert back is not None
    assert torch.equal(back[0], a)
    assert torch.equal(back[1], b.reshape(3, 1))
    assert joined.invert(whole + 1) is None
    assert joined.invert(whole.to("meta")) is not None


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 2)

    def forward(self, x):
        return self.q(x) + self.q(x)


def test_the_same_layer_twice_is_said_plainly() -> None:
    assert_refused(
        rg.MergeLinears(), rg.symbolic_trace(Twice()), match="q is called 2 times, and a rewrite of one call"
    )


class Rows(nn.Module):
    """Rearranges the rows of a layer, then normalises."""

    def __init__(self, shape: tuple[int, ...], norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.shape, self.norm = nn.Linear(4, 4), shape, norm

    def forward(self, x):
        return self.norm(self.linear(x).reshape(self.shape))


class HalfOfTheStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return F.batch_norm(self.linear(x), self.mean, None)


def test_a_norm_without_a_variance_is_refused() -> None:
    gm = torch.fx.symbolic_trace(HalfOfTheStatistics().eval())
    assert_refused(rg.FoldBatchNorm(), gm, match="keeps no running statistics")


@pytest.mark.parametrize(("shape", "sites"), [((-1, 4), 1), ((8, 1, 3), 0), ((3, 4, 2), 0), ((3, 2, 4), 0)])
def test_only_whole_rows_may_stand_between(shape: tuple[int, ...], sites: int) -> None:
    x = torch.randn(2, 3, 4)
    model = Rows(shape, nn.BatchNorm1d(shape[1])).eval()
    gm = traced_with_shapes(model, (x,), {})
    assert assert_round_trip(rg.FoldBatchNorm(), gm, (x,)).applied == sites


def test_ranks_that_are_known_fold_where_they_fit() -> None:
    for model, x in (
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 4, 5, 5)),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)),
    ):
        gm = traced_with_shapes(model.eval(), (x,), {})
        assert assert_round_trip(rg.FoldBatchNorm(), gm, (x,)).applied == 1
    gm = traced_with_shapes(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (torch.randn(2, 4, 4),), {})
    assert_refused(rg.FoldBatchNorm(), gm, match="not the axis of the features")


def test_only_a_layer_that_takes_several_ranks_minds_the_rank() -> None:
    for layer, norm, same in ((nn.Conv2d, nn.BatchNorm2d, True), (nn.Conv1d, nn.BatchNorm1d, False)):
        gm = rg.FoldBatchNorm()(torch.fx.symbolic_trace(nn.Sequential(layer(4, 4, 3), norm(4)).eval()))
        assert (type(gm.get_submodule("0")) is layer) == same


def test_a_layer_of_two_names_that_is_called_once() -> None:
    gm = torch.fx.symbolic_trace(Block().eval())
    gm.add_submodule("other", gm.q)
    assert_refused(rg.MergeLinears(), gm, match="q is registered under several names")


class Function(nn.Module):
    """A model of some layers and one function of them."""

    def __init__(self, function, **layers) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def shaped(function, x: torch.Tensor, **layers) -> torch.fx.GraphModule:
    return traced_with_shapes(randomised(Function(function, **layers)).eval(), (x,), {})


IMAGE = torch.randn(2, 4, 6, 6)


def test_padding_grows_the_kernel_size_that_the_layer_states() -> None:
    gm = rg.FusePad()(shaped(lambda m, x: m.conv(F.pad(x, (0, 1, 0, 2))), IMAGE, conv=nn.Conv2d(4, 4, 3)))
    assert gm.conv.kernel_size == tuple(gm.conv.weight.shape[2:]) == (5, 4)


@pytest.mark.parametrize("cubic", [False, True])
def test_the_report_names_the_form_of_gelu(cubic: bool) -> None:
    def exact(_, x):
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))

    def by_tanh(_, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    gm = rg.FuseGelu()(shaped(by_tanh if cubic else exact, torch.randn(3, 4)))
    assert rg.history(gm)[0].applied[0].sentence == ("fused GELU in its tanh form" if cubic else "fused GELU")


def test_gelu_by_a_square_and_not_by_a_cube_of_it() -> None:
    def gelu(square):
        return lambda m, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * square(x))))

    x = torch.randn(3, 4)
    for square, applied in ((lambda x: x**2, 1), (torch.square, 1), (lambda x: x * x, 1), (lambda x: x**3, 0)):
        assert assert_round_trip(rg.FuseGelu(), shaped(gelu(square), x), (x,)).applied == applied


def test_what_works_in_place_is_not_taken_out() -> None:
    x = torch.randn(3, 4)
    gm = shaped(lambda m, x: (x + 1).div_(1), x)
    assert_refused(rg.RemoveDeadWork(), gm, "works in place; use the out-of-place form")
    gm = shaped(lambda m, x: m.drop(x + 1), x, drop=nn.Dropout(inplace=True))
    assert assert_round_trip(rg.RemoveDeadWork(), gm, (x,)).applied == 1


@pytest.mark.parametrize(
    ("function", "applied"),
    [
        (lambda m, x: (x.relu(), x.relu() + 1), 1),
        (lambda m, x: (x.relu() + 1, x.relu()), 1),
        (lambda m, x: (x.relu(), x.relu()), 0),
        (lambda m, x: x.to(torch.float32), 1),
        (lambda m, x: x.to(torch.float32, False, True), 0),
        (lambda m, x: x.transpose(1, 1), 1),
        (lambda m, x: x.transpose(0, 1), 0),
        (lambda m, x: x.transpose(0, 1) + 1, 0),
    ],
)
def test_what_is_repeated_or_unchanged_for_the_caller(function, applied: int) -> None:
    x = torch.randn(3, 3)
    assert assert_round_trip(rg.RemoveDeadWork(), shaped(function, x), (x,)).applied == applied


def test_an_input_that_nobody_reads_is_no_candidate() -> None:
    class Two(nn.Module):
        def forward(self, x, y):
            return x + 1

    assert rg.RemoveDeadWork().explain(torch.fx.symbolic_trace(Two())).rows() == []


@pytest.mark.parametrize(("size", "fused"), [((2, 4, 6, 6), True), ((1, 4, 1, 1), False), ((6,), False)])
def test_only_an_addend_as_large_as_the_result_is_packed_along(size: tuple[int, ...], fused: bool) -> None:
    def forward(m, x):
        addend = x[0, 0, 0] if size == (6,) else x[: size[0], :, : size[2], : size[3]]
        return m.conv(x) + addend

    gm = shaped(forward, IMAGE, conv=nn.Conv2d(4, 4, 1))
    report = assert_round_trip(rg.PrepackForCpu(), gm, (IMAGE,))
    assert ("packed, with add" in [row[3] for row in report.rows()]) is fused


def test_a_packed_layer_says_which_activation_it_has() -> None:
    gm = rg.PrepackForCpu()(
        shaped(lambda m, x: m.b(m.a(x).relu()), torch.randn(3, 4), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    )
    assert repr(gm.a) == "PackedLinear(in_features=4, out_features=4, bias=True, activation=relu)"
    assert repr(gm.b) == "PackedLinear(in_features=4, out_features=4, bias=True)"


def test_bounds_that_are_computed_are_no_activation_of_onednn() -> None:
    gm = shaped(lambda m, x: F.hardtanh(m.conv(x), -x.size(0), 1), IMAGE, conv=nn.Conv2d(4, 4, 1))
    assert ("applied", "conv", "packed") in [
        row[1:] for row in assert_round_trip(rg.PrepackForCpu(), gm, (IMAGE,)).rows()
    ]


OPERATORS = {
    mkldnn.LINEAR: "linear",
    mkldnn.MKL: "sgemm",
    mkldnn.CONV: "conv",
    mkldnn.CONV_ADD: "conv_add",
    mkldnn.CONV_SUM: "conv_sum",
    mkldnn.TRANSPOSED: "transposed",
}
KINDS = tuple(OPERATORS)
needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()), reason="no oneDNN or no MKL"
)


@needs_onednn
def test_every_operator_is_there_and_none_for_float64() -> None:
    for kind in KINDS:
        assert mkldnn.works(kind, torch.float32)
        assert not mkldnn.works(kind, torch.float64)
    for kind in (mkldnn.LINEAR, mkldnn.CONV):
        assert mkldnn.works(kind, torch.float32, Activation("relu"))


@needs_onednn
@pytest.mark.parametrize("off", ["is_available", "_get_mkldnn_enabled"])
def test_without_onednn_only_mkl_is_left(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = torch.backends.mkldnn if off == "is_available" else torch._C
    monkeypatch.setattr(owner, off, lambda: False)
    assert [kind for kind in KINDS if mkldnn._has(kind, torch.float32)] == [mkldnn.MKL]
    assert not mkldnn._has(mkldnn.MKL, torch.bfloat16)


@needs_onednn
@pytest.mark.parametrize("broken", KINDS)
@pytest.mark.filterwarnings("ignore:regraft does not use")
def test_each_operator_is_tried_itself(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkldnn, OPERATORS[broken], lambda *_: torch.zeros(()))
    assert [kind for kind in KINDS if not mkldnn.works.__wrapped__(kind, torch.float32)] == [broken]


@needs_onednn
def test_so_many_sizes_of_an_input_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SIZES", 2)
    layer, counts = packed.PackedConv2d.of(nn.Conv2d(4, 4, 1)), []
    with torch.no_grad():
        for size in (5, 6, 7):
            layer(torch.randn(2, 4, size, size))
            counts.append(len(layer._copies.packs))
    assert counts == [1, 2, 1]


@needs_onednn
def test_an_operator_that_fails_is_warned_of_once_and_not_for_each_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("gone")

    monkeypatch.setattr(mkldnn, "linear", fail)
    with pytest.warns(UserWarning, match="linear operator in torch.float32: gone"):
        assert not mkldnn.works.__wrapped__(mkldnn.LINEAR, torch.float32, NONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not mkldnn.works.__wrapped__(mkldnn.LINEAR, torch.float32, Activation("relu"))


def test_the_operators_are_for_plain_calls_alone() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    assert mkldnn.usable(x, weight, None)
    for devices in (("meta", "meta"), ("cpu", "meta"), ("meta", "cpu")):
        assert not mkldnn.usable(x.to(devices[0]), weight.to(devices[1]), None)
    with torch.autocast("cpu", torch.bfloat16):
        assert not mkldnn.usable(x, weight, None)
    with TorchDispatchMode():
        assert not mkldnn.usable(x, weight, None)
    seen = []
    torch.vmap(lambda row: (seen.append(mkldnn.usable(x, weight, None)), row)[1])(x)
    assert seen == [False]


@needs_onednn
def test_each_call_takes_the_operator_that_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def spied(name: str) -> None:
        real = getattr(mkldnn, name)
        monkeypatch.setattr(mkldnn, name, lambda *args: (calls.append(name), real(*args))[1])

    with torch.no_grad():  # whether an operator works is tried once, before the calls are counted
        warm, addend = packed.PackedConv2d.of(nn.Conv2d(4, 4, 1)), IMAGE.to(memory_format=torch.channels_last)
        warm(IMAGE), warm(IMAGE, addend)
    assert all(mkldnn.computed_in(kind, torch.float32) for kind in KINDS)
    for name in ("linear", "sgemm", "pack_linear", "pack_sgemm", "pack_conv", "conv", "conv_add", "conv_sum"):
        spied(name)
    with torch.no_grad():
        for way, expected in (
            ("onednn", ["pack_linear", "linear", "linear", "linear"]),
            ("mkl", ["pack_sgemm", "sgemm", "sgemm"]),
            ("plain", []),
        ):
            monkeypatch.setattr(packed_linear, "ranked", lambda *_, way=way: (way,))
            layer, x = packed_linear.PackedLinear.of(nn.Linear(7, 4)), torch.randn(16, 7)
            for _ in range(3):
                torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
            assert calls == expected
            calls.clear()
        conv = packed.PackedConv2d.of(nn.Conv2d(4, 4, 1))
        conv(IMAGE)
        conv(IMAGE)
        assert calls == ["pack_conv", "conv", "conv"]
        for other, expected in (
            (IMAGE.to(memory_format=torch.channels_last), "conv_add"),
            (IMAGE, "conv"),
            (IMAGE[:1].to(memory_format=torch.channels_last), "conv"),
        ):
            calls.clear()
            torch.testing.assert_close(conv(IMAGE, other), F.conv2d(IMAGE, conv.weight, conv.bias) + other)
            assert calls == [expected]


@pytest.mark.parametrize(("training", "applied"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("functional", [False, True])
def test_dropout_between_layer_and_norm(functional: bool, training: bool, applied: int) -> None:
    layers = {"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4), "drop": nn.Dropout(0.5)}

    def forward(m, x):
        y = m.conv(x)
        return m.norm(F.dropout(y, 0.5, training) if functional else m.drop(y))

    gm = shaped(forward, IMAGE, **layers)
    if not functional:
        gm.drop.train(training)
    assert rg.FoldBatchNorm().explain(gm).applied == applied


def test_a_norm_of_three_axes_called_as_a_function_is_not_for_the_rule_of_two() -> None:
    def forward(m, x):
        return F.batch_norm(m.conv(x), m.norm.running_mean, m.norm.running_var)

    x = torch.randn(2, 4, 3, 3, 3)
    gm = shaped(forward, x, conv=nn.Conv3d(4, 4, 1), norm=nn.BatchNorm3d(4))
    assert_refused(rg.FuseBatchNorm2dInConv2d(), gm, "is a batch norm of another number of axes")
    gm = shaped(forward, IMAGE, conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4))
    assert assert_round_trip(rg.FuseBatchNorm2dInConv2d(), gm, (IMAGE,)).applied == 1


def test_a_scale_that_overflows_together_with_the_weight_is_refused() -> None:
    gm = shaped(lambda m, x: m.norm(m.conv(x)), IMAGE, conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)).half()
    with torch.no_grad():
        gm.conv.weight.fill_(200.0)
        gm.norm.running_var.fill_(1e-6)
        gm.norm.weight.fill_(2.0)
    assert_refused(rg.FoldBatchNorm(), gm, "makes a scale that is not finite in torch.float16")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_made_from_a_grouped_call_states_its_channels(transposed: bool) -> None:
    layer = nn.ConvTranspose2d(4, 6, 1, groups=2) if transposed else nn.Conv2d(4, 6, 1, groups=2)
    call = F.conv_transpose2d if transposed else F.conv2d

    def forward(m, x):
        return m.norm(call(x, m.layer.weight, m.layer.bias, groups=2))

    gm = rg.FoldBatchNorm()(shaped(forward, IMAGE, layer=layer, norm=nn.BatchNorm2d(6)))
    (made,) = [m for m in gm.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    assert (made.in_channels, made.out_channels) == (4, 6)


def test_a_scaled_value_that_is_written_before_the_layer_reads_it() -> None:
    def forward(m, x):
        y = x + 1
        scaled_value = y * 2
        y.add_(1)
        return m.linear(scaled_value)

    gm = shaped(forward, torch.randn(3, 4), linear=nn.Linear(4, 4))
    assert_refused(rg.FoldScale(), gm, "node 'add_' changes 'add' in place")


@pytest.mark.parametrize(
    ("function", "applied"),
    [
        (lambda y: y * 0.001, 1),
        (lambda y: y / 0.001, 0),
        (lambda y: y * 1000.0, 0),
        (lambda y: y / 1000.0, 1),
    ],
)
def test_a_scale_that_overflows_together_with_half_a_weight(function, applied: int) -> None:
    gm = shaped(lambda m, x: function(m.linear(x)), torch.randn(3, 4), linear=nn.Linear(4, 4)).half()
    with torch.no_grad():
        gm.linear.weight.fill_(100.0)
    assert rg.FoldScale().explain(gm).applied == applied


class ProxiedBuffers(torch.fx.Tracer):
    """Buffers are read by nodes, as parameters are."""

    proxy_buffer_attributes = True


class ByBuffer(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.linear, self.written = nn.Linear(4, 4), written
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        if self.written:
            self.scale.add_(1)
        return self.linear(x) * self.scale


def test_a_scale_in_a_buffer_goes_with_the_fold_unless_it_is_written() -> None:
    gm = rg.FoldScale()(torch.fx.symbolic_trace(ByBuffer(False).eval().requires_grad_(False)))
    assert rg.history(gm)[0].applied
    assert not hasattr(gm, "scale")
    written = ByBuffer(True).eval().requires_grad_(False)
    gm = torch.fx.GraphModule(written, ProxiedBuffers().trace(written))
    assert_refused(rg.FoldScale(), gm, "changes 'scale.*' in place")


def test_a_number_scales_a_layer_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = Function(lambda m, x: m.linear(x) * 2, linear=nn.Linear(4, 4)).eval()
    gm = rg.FoldScale()(torch.fx.symbolic_trace(net))
    assert rg.history(gm)[0].applied
    assert gm.linear.weight.is_meta


def test_a_module_with_settings_stands_for_those_alone() -> None:
    net = nn.Sequential(nn.ELU(1.0), nn.ELU(0.5), nn.CELU(0.5))
    gm = rg.ReplaceActivation({nn.ELU(0.5): nn.ReLU})(torch.fx.symbolic_trace(net))
    assert [type(module) for module in gm.children()] == [nn.ELU, nn.ReLU, nn.CELU]


@pytest.mark.parametrize("through", [torch.float64, torch.float32])
def test_a_norm_in_float64_is_fused_where_it_stays_in_it(through: torch.dtype) -> None:
    def forward(_, x):
        y = x.to(through)
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.float64)

    x = torch.randn(3, 4, dtype=torch.float64)
    assert rg.FuseNorm().explain(shaped(forward, x)).applied == (through is torch.float64)


def test_a_half_that_is_read_elsewhere_is_not_written_in_place() -> None:
    gm = torch.fx.symbolic_trace(Function(lambda m, x: F.gelu(y := m.a(x)) + F.relu_(y), a=nn.Linear(4, 4)))
    rg.ReducePrecision()(gm)
    reasons = [refusal.reason for refusal in rg.history(gm)[-1].refused]
    assert reasons[0] == "relu_ works in place; use the out-of-place form"
