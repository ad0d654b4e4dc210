"""FuseNorm: the ways in which people write layer norm and RMS norm, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import Wrap, check_applied, check_refused, randomise
from regraft.testing import assert_refused
from regraft.testing.parts import traced_with_shapes

X = (torch.randn(3, 5, 8) * 2 + 1,)


def llama(m: Any, x: Any) -> Any:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.w * h.to(x.dtype)


def t5(m: Any, x: Any) -> Any:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return m.w * (x * torch.rsqrt(variance + 1e-6)).to(m.w.dtype)


def gemma(m: Any, x: Any) -> Any:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + m.w.float())).type_as(x)


def layer(m: Any, x: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return m.w * (x - mean) / torch.sqrt(variance + 1e-5) + m.b


def layer_in_float32(m: Any, x: Any) -> Any:
    h = x.float()
    d = h - h.mean(-1, keepdim=True)
    h = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-5)
    return m.w * h.to(x.dtype) + m.b


def centred(x: Any) -> Any:
    return x - x.mean(-1, keepdim=True)


FORMS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "llama": (llama, "rms_norm"),
    "t5": (t5, "rms_norm"),
    "divided": (lambda m, x: x / torch.sqrt((x * x).mean(-1, True) + 1e-5) * m.w, "rms_norm"),
    "no weight": (lambda m, x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), "rms_norm"),
    "two axes": (lambda m, x: x * (x.square().mean((-2, -1), keepdim=True) + 1e-5).rsqrt(), "rms_norm"),
    "before a gate": (lambda m, x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * x.sin(), "rms_norm"),
    "layer": (
        lambda m, x: m.w * (centred(x) / torch.sqrt((centred(x) ** 2).mean(-1, keepdim=True) + 1e-5)) + m.b,
        "layer_norm",
    ),
    "var": (
        lambda m, x: centred(x) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * m.w + m.b,
        "layer_norm",
    ),
    "var, correction": (
        lambda m, x: centred(x) * torch.rsqrt(torch.var(x, -1, correction=0, keepdim=True) + 1e-5),
        "layer_norm",
    ),
    "in float32": (layer_in_float32, "layer_norm"),
}


def model_of(function: Callable[[Any, Any], Any]) -> nn.Module:
    return Wrap(function, w=nn.Parameter(torch.rand(8) + 0.5), b=nn.Parameter(torch.randn(8)))


@pytest.mark.parametrize("name", FORMS)
def test_applied(name: str) -> None:
    function, target = FORMS[name]
    gm = check_applied(rg.FuseNorm(), model_of(function), X, "trace")
    assert [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == target]
    assert not [n for n in gm.graph.nodes if "sqrt" in n.name]
    kind, shape = "layer" if target == "layer_norm" else "RMS", (5, 8) if name == "two axes" else (8,)
    assert rg.history(gm)[-1].applied[0].sentence == f"fused {kind} norm over {shape}"


def layer_with_wide_weights(m: Any, x: Any) -> Any:
    h = x.float()
    h = centred(h) * torch.rsqrt(centred(h).square().mean(-1, keepdim=True) + 1e-5)
    return (h * m.w.float() + m.b.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma", "layer"])
def test_weights_in_float32_beside_half_precision(name: str, dtype: torch.dtype) -> None:
    function, target = {"gemma": (gemma, "rms_norm"), "layer": (layer_with_wide_weights, "layer_norm")}[name]
    model, x = model_of(function).to(dtype), X[0].to(dtype)
    gm = check_applied(rg.FuseNorm(), model, (x,), "trace")
    (norm,) = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == target]
    assert norm.meta["val"].dtype is torch.float32  # and the casts of the model stand around it
    # they round where the model rounds: the results differ by what float32 differs, and hardly ever after rounding
    with torch.no_grad():
        assert float((gm(x) != model(x)).double().mean()) < (1.0 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "t5", "in float32", "divided"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check_applied(rg.FuseNorm(), model_of(FORMS[name][0]).to(dtype), (X[0].to(dtype),), "trace")


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "unbiased": (lambda m, x: centred(x) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), "unbiased"),
    "eps outside": (lambda m, x: x / ((x.square().mean(-1, keepdim=True) + m.w).sqrt()), "should be a number"),
    "another value": (lambda m, x: x.sin() * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), "should be"),
    "bias": (lambda m, x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * m.w + m.b, "adds a bias"),
    "in float64": (
        lambda m, x: (x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).float(),
        "float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    check_refused(rg.FuseNorm(), model_of(function), X, "trace", word)


def turned(function: Callable[[Any, Any], Any], seen: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda m, x: seen(function(m, x.transpose(0, 1).contiguous().transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("name", ["llama", "no weight", "layer", "var"])
@pytest.mark.parametrize("seen", [lambda y: y.view(15, 8), lambda y: (y * 2).view(15, 8)])
def test_a_result_that_is_viewed_in_the_order_of_the_input_is_refused(name: str, seen: Callable[[Any], Any]) -> None:
    """The fused calls give what is contiguous."""
    function = FORMS[name][0]
    model = model_of(turned(function, seen))
    check_refused(rg.FuseNorm(), model, X, "trace", "node 'view' may tell in which order")
    model = model_of(lambda m, x: (y := turned(function, lambda y: y)(m, x).reshape(15, 8)) @ y.mT)
    check_applied(rg.FuseNorm(), model, X, "trace")


ALL_AXES: dict[str, Callable[[Any, Any], Any]] = {
    "rms, ()": lambda m, x: x * (x.square().mean((), keepdim=True) + 1e-5).rsqrt(),
    "rms, None": lambda m, x: x * (x.square().mean(None, keepdim=True) + 1e-5).rsqrt(),
    "layer, ()": lambda m, x: (x - x.mean((), True)) / ((x - x.mean((), True)).pow(2).mean((), True) + 1e-5).sqrt(),
    "var, None": lambda m, x: (x - x.mean(None, True)) / (x.var(None, False, keepdim=True) + 1e-5).sqrt(),
}


@pytest.mark.parametrize("name", ALL_AXES)
def test_no_axis_means_all_of_them(name: str) -> None:
    gm = check_applied(rg.FuseNorm(), model_of(ALL_AXES[name]), X, "trace")
    assert rg.history(gm)[-1].applied[0].sentence.endswith("norm over (3, 5, 8)")
    weighted = model_of(lambda m, x: ALL_AXES[name](m, x) * m.w)
    check_refused(rg.FuseNorm(), weighted, X, "trace", "has not the sizes of the axes [0, 1, 2]")
    check_refused(rg.FuseNorm(), model_of(ALL_AXES[name]), (X[0][0, 0, 0],), "trace", "no axes")
    check_applied(rg.FuseNorm(), model_of(lambda m, x: ALL_AXES[name](m, x) * m.b[:5, None].clone()), X, "trace")


def lucidrains(m: Any, x: Any) -> Any:
    variance = torch.var(x, dim=1, unbiased=False, keepdim=True)
    return (x - torch.mean(x, dim=1, keepdim=True)) / (variance + 1e-5).sqrt() * m.w + m.b


def sam(m: Any, x: Any) -> Any:
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return m.w.flatten()[:, None, None] * ((x - mean) / torch.sqrt(variance + 1e-6)) + m.b.flatten()[:, None, None]


def rms_of_channels(m: Any, x: Any) -> Any:
    h = x.float()
    return m.w * (h * torch.rsqrt(h.pow(2).mean(-3, keepdim=True) + 1e-6)).to(x.dtype)


CHANNELS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "lucidrains": (lucidrains, "layer_norm"),
    "sam": (sam, "layer_norm"),
    "rms": (rms_of_channels, "rms_norm"),
    "plain": (lambda m, x: x * (x.square().mean([1], keepdim=True) + 1e-5).rsqrt(), "rms_norm"),
    "two axes": (lambda m, x: x * (x.square().mean((1, 2), keepdim=True) + 1e-5).rsqrt(), "rms_norm"),
    "the middle axis": (lambda m, x: x / torch.sqrt((x * x).mean(-2, True) + 1e-5), "rms_norm"),
}
IMAGE = torch.randn(3, 8, 5, 6) * 2 + 1


def of_channels(function: Callable[[Any, Any], Any]) -> nn.Module:
    return Wrap(function, w=nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5), b=nn.Parameter(torch.randn(1, 8, 1, 1)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CHANNELS)
def test_over_channels(name: str, layout: torch.memory_format) -> None:
    function, target = CHANNELS[name]
    x = IMAGE.contiguous(memory_format=layout)
    gm = check_applied(rg.FuseNorm(), of_channels(function), (x,), "trace")
    (norm,) = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == target]
    assert [weight is not None for weight in norm.args[2:-1]] == [name in ("lucidrains", "sam", "rms")] * len(
        norm.args[2:-1]
    )
    assert not [n for n in gm.graph.nodes if "sqrt" in n.name]
    for other in (x, torch.randn(x.shape).contiguous(memory_format=layout)):
        assert gm(other).stride() == of_channels(function)(other).stride()  # somebody may view it in other sizes


@pytest.mark.parametrize("name", ["lucidrains", "rms"])
def test_over_channels_in_half_precision(name: str) -> None:
    model = of_channels(CHANNELS[name][0]).bfloat16()
    if name == "rms":
        check_applied(rg.FuseNorm(), model, (IMAGE.bfloat16(),), "trace")
    else:
        gm = rg.FuseNorm()(rg.trace(model, (IMAGE.bfloat16(),)))
        assert rg.verify(model, gm, (IMAGE.bfloat16(),)).ok


def test_over_channels_of_any_number_of_pixels() -> None:
    height = torch.export.Dim("height", min=2)
    model = of_channels(lucidrains)
    gm = rg.trace(model, (IMAGE,), dynamic_shapes=({2: height},))
    assert rg.FuseNorm().explain(gm).applied == 1
    taller = torch.randn(3, 8, 9, 6)
    torch.testing.assert_close(rg.FuseNorm()(gm)(taller), model(taller))
    gm = rg.trace(Wrap(CHANNELS["plain"][0]), (IMAGE,), dynamic_shapes=({1: height},))
    assert_refused(rg.FuseNorm(), gm, r"the axes \[1\] of 'x', which are normalised, have no fixed size")


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((1, 1, 5, 1), "has not the sizes of the axes [1]"),
        ((5, 1), "has not the sizes"),
        ((2, 1, 1, 1, 1), "has not the sizes"),
    ],
)
def test_over_channels_with_a_weight_of_another_axis_is_refused(shape: tuple[int, ...], word: str) -> None:
    model = Wrap(CHANNELS["rms"][0], w=nn.Parameter(torch.rand(shape) + 0.5))
    check_refused(rg.FuseNorm(), model, (IMAGE,), "trace", word)


@pytest.mark.parametrize("shape", [(), (1, 6), (1, 8, 5, 1)])
def test_over_channels_what_is_no_weight_of_them_is_left_outside(shape: tuple[int, ...]) -> None:
    model = randomise(Wrap(CHANNELS["rms"][0], w=nn.Parameter(torch.empty(shape))))
    gm = rg.FuseNorm()(rg.trace(model, (IMAGE,)))
    (norm,) = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "rms_norm"]
    assert norm.args[2] is None
    torch.testing.assert_close(gm(IMAGE), model(IMAGE))


def test_a_weight_of_one_number_is_none_of_inner_axes() -> None:
    def scaled(m: Any, x: Any) -> Any:
        return x * (x.square().mean((1, 2), keepdim=True) + 1e-5).rsqrt() * m.w

    model = Wrap(scaled, w=nn.Parameter(torch.rand(1) + 0.5))
    check_refused(rg.FuseNorm(), model, (torch.randn(2, 3, 4, 1),), "trace", "has not the sizes of the axes [1, 2]")


def test_read_elsewhere_is_refused() -> None:
    def both(m: Any, x: Any) -> Any:
        scale = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return x * scale, scale

    check_refused(rg.FuseNorm(), model_of(both), X, "trace", "also used")


def test_what_is_written_after_its_mean_is_taken_is_refused() -> None:
    def written(m: Any, x: Any) -> Any:
        h = x * 2
        scale = (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        h.add_(1)
        return h * scale

    gm = traced_with_shapes(model_of(written), X, {})
    assert_refused(rg.FuseNorm(), gm, "node 'add_' changes 'mul' in place")


def test_a_weight_of_another_dtype_is_refused() -> None:
    model = model_of(llama).half()
    model.w = nn.Parameter(model.w.double())
    check_refused(rg.FuseNorm(), model, (X[0].half(),), "trace", "float64")


@pytest.mark.parametrize(("shape", "sites"), [((1,), 0), ((3, 1), 1), ((3, 8), 1), ((), 1)])
def test_a_weight_that_is_none_of_a_norm_is_left_outside(shape: tuple[int, ...], sites: int) -> None:
    def scaled(m: Any, x: Any) -> Any:
        return m.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    model, x = randomise(Wrap(scaled, scale=nn.Parameter(torch.empty(shape)))), torch.randn(2, 3, 8)
    gm = rg.FuseNorm()(rg.trace(model, (x,)))
    assert len(rg.history(gm)[-1].applied) == sites
    torch.testing.assert_close(gm(x), model(x))


def test_an_axis_whose_size_may_vary_is_refused() -> None:
    width = torch.export.Dim("width", min=2)
    model = model_of(FORMS["no weight"][0])
    gm = rg.trace(model, X, dynamic_shapes=({2: width},))
    assert_refused(rg.FuseNorm(), gm, r"the axes \[2\] of 'x', which are normalised, have no fixed size")
    gm = rg.trace(model, X, dynamic_shapes=({1: width},))
    assert rg.FuseNorm().explain(gm).applied == 1


def test_without_shapes_it_is_refused() -> None:
    check_refused(rg.FuseNorm(), model_of(FORMS["no weight"][0]), X, "fx", "not known")


@pytest.mark.parametrize("x", [torch.randint(-9, 9, (3, 8)), torch.randn(3, 8, dtype=torch.complex64)])
def test_numbers_that_the_fused_call_does_not_take_are_refused(x: torch.Tensor) -> None:
    model = model_of(lambda m, x: FORMS["no weight"][0](m, x.float()).to(x.dtype))
    check_refused(rg.FuseNorm(), model, (x,), "trace", "not floating point")
