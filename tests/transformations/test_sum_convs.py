"""SumConvs: convolutions of one input whose results are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
import regraft.testing
from helpers import Wrap, check_applied, check_refused, randomise

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
X = {n: (torch.randn(2, 4, *range(8, 8 + n)),) for n in KINDS}
SUM = rg.SumConvs()


def net(function: Any = None, **parts: Any) -> nn.Module:
    return randomise(Wrap(function or (lambda m, x: m.a(x) + m.b(x)), **parts)).eval()


def convolutions(gm: torch.fx.GraphModule) -> int:
    return sum(isinstance(module, tuple(KINDS.values())) for module in gm.modules())


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("axes", KINDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((3, {"padding": 1}), (1, {})),
        ((1, {}), (3, {"padding": 1})),
        ((3, {"padding": 1, "stride": 2}), (1, {"stride": 2})),
        ((5, {"padding": 2, "groups": 2}), (3, {"padding": 1, "groups": 2})),
        ((5, {"padding": 4, "dilation": 2}), (3, {"padding": 2, "dilation": 2})),
        ((5, {"padding": 2}), (3, {"padding": 2, "dilation": 2})),
        ((5, {"padding": 2}), (2, {"padding": 2, "dilation": 4})),
        ((3, {"padding": "same", "bias": False}), (1, {})),
        ((4, {"padding": "same"}), (2, {"padding": "same"})),
        ((3, {"padding": 1, "groups": 4}), (1, {"groups": 4, "bias": False})),
        ((3, {"bias": False}), (3, {"bias": False})),
    ],
    ids=str,
)
def test_applied(form: str, axes: int, one: Any, other: Any) -> None:
    make = KINDS[axes]
    model = net(a=make(4, 4, one[0], **one[1]), b=make(4, 4, other[0], **other[1]))
    gm = check_applied(SUM, model, X[axes], form)
    assert convolutions(gm) == 1


@pytest.mark.parametrize("axes", KINDS)
@pytest.mark.parametrize("settings", [{}, {"groups": 2}, {"groups": 4, "bias": False}, {"dilation": 2}], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("turned", [False, True])
def test_a_batch_norm(axes: int, settings: dict[str, Any], affine: bool, turned: bool) -> None:
    conv = KINDS[axes](4, 4, 3, padding=settings.get("dilation", 1), **settings)
    function = (lambda m, x: m.b(x) + m.a(x)) if turned else None
    gm = check_applied(SUM, net(function, a=conv, b=NORMS[axes](4, affine=affine, eps=0.1)), X[axes], "trace")
    assert not any(isinstance(module, tuple(NORMS.values())) for module in gm.modules())


@pytest.mark.parametrize("form", ["fx", "trace"])
def test_branches_one_after_the_other(form: str) -> None:
    parts = {name: nn.Conv2d(4, 4, 3, padding=1) for name in "abc"} | {"d": nn.Conv2d(4, 4, 1), "e": nn.BatchNorm2d(4)}

    def forward(m: Any, x: Any) -> Any:
        y = m.d(x) + m.a(x)
        y += m.b(x)
        return torch.relu(torch.add(m.e(x), y.add(m.c(x))))

    gm = check_applied(SUM, net(forward, **parts), X[2], form, sites=4)
    assert convolutions(gm) == 1
    rg.testing.assert_round_trip(SUM, net(forward, **parts), X[2])


def test_asymmetric_kernels() -> None:
    parts = {"a": nn.Conv2d(4, 5, 3, padding=1), "b": nn.Conv2d(4, 5, (1, 3), padding=(0, 1))}
    model = net(lambda m, x: m.a(x) + m.b(x) + m.c(x), c=nn.Conv2d(4, 5, (3, 1), padding=(1, 0)), **parts)
    assert convolutions(check_applied(SUM, model, X[2], "fx", sites=2)) == 1


@pytest.mark.parametrize("form", ["fx", "trace"])
def test_functions(form: str) -> None:
    def forward(m: Any, x: Any) -> Any:
        y = F.conv2d(x, m.v, None, 2, 1) + F.conv2d(x, m.w, m.b, stride=2)
        return y + m.a(x)

    weights = {"v": nn.Parameter(torch.empty(4, 4, 3, 3)), "w": nn.Parameter(torch.empty(4, 4, 1, 1))}
    model = net(forward, a=nn.Conv2d(4, 4, 3, 2, 1), b=nn.Parameter(torch.empty(4)), **weights)
    gm = check_applied(SUM, model, X[2], form, sites=2)
    assert convolutions(gm) == 1
    rg.testing.assert_round_trip(SUM, model, X[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    model = net(lambda m, x: m.a(x) + m.b(x) + m.c(x), a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 1))
    model.c = randomise(nn.BatchNorm2d(4)).eval()
    model, x = model.to(dtype), X[2][0].to(dtype)
    gm = SUM(rg.trace(model, (x,)))
    assert convolutions(gm) == 1
    found, expected = gm(x).double(), model.double()(x.double())
    assert (found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_a_repvgg_block_after_its_norms_are_folded() -> None:
    block = {"a": nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))}
    block |= {"b": nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)), "c": nn.BatchNorm2d(4)}
    model = net(lambda m, x: torch.relu(m.a(x) + m.b(x) + m.c(x)), **block)
    gm = SUM(rg.FoldBatchNorm()(rg.trace(model, X[2])))
    assert [node.target for node in gm.graph.nodes if node.op == "call_module"] == ["a.0"]
    torch.testing.assert_close(gm(*X[2]), model(*X[2]), rtol=1e-5, atol=1e-5)


C3, C1 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)


def hooked() -> nn.Module:
    conv = nn.Conv2d(4, 4, 1)
    conv.register_forward_hook(lambda module, args, result: result * 2)
    return conv


def frozen() -> nn.Module:
    return nn.Conv2d(4, 4, 1).requires_grad_(False)


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "half a pixel": (
        net(a=nn.Conv2d(4, 4, 4, padding="same"), b=nn.Conv2d(4, 4, 3, padding="same")),
        "other pixels",
    ),
    "between what it meets": (
        net(a=nn.Conv2d(4, 4, 5, padding=4, dilation=2), b=nn.Conv2d(4, 4, 5, padding=2)),
        "other pixels",
    ),
    "neither within the other": (
        net(a=nn.Conv2d(4, 4, (3, 1), padding=(1, 0)), b=nn.Conv2d(4, 4, (1, 3), padding=(0, 1))),
        "other pixels",
    ),
    "as many only here": (
        net(lambda m, x: m.a(y := x[..., :8]) + m.b(y), a=nn.Conv2d(4, 4, 3, 2, 1), b=nn.Conv2d(4, 4, 2, 2)),
        "other pixels",
    ),
    "other steps": (net(a=nn.Conv2d(4, 4, 3, 8, 1), b=nn.Conv2d(4, 4, 1, 9, 0)), "in other steps"),
    "groups": (net(a=C3, b=nn.Conv2d(4, 4, 1, groups=2)), "other pixels"),
    "channels": (net(a=C3, b=nn.Conv2d(4, 1, 1)), "other pixels"),
    "between the elements": (net(a=nn.Conv2d(4, 4, 3, padding=2, dilation=2), b=C3), "other pixels"),
    "alpha": (net(lambda m, x: torch.add(m.a(x), m.b(x), alpha=2), a=C3, b=C1), "by 2"),
    "circular": (net(a=nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), b=C1), "pad with zeros"),
    "hooks": (net(a=C3, b=hooked()), "hooks"),
    "frozen": (net(a=C3, b=frozen()), "frozen"),
    "read twice": (net(lambda m, x: (y := m.a(x)) + m.b(x) * y + (y + m.b(x)), a=C3, b=C1), "called 2 times"),
    "also used": (net(lambda m, x: (y := m.a(x)) + m.c(x) + y, a=C3, c=nn.Conv2d(4, 4, 1)), "also used"),
    "batch statistics": (net(a=C3, b=nn.BatchNorm2d(4, track_running_stats=False)), "statistics"),
    "other channels": (
        net(lambda m, x: m.a(x) + m.b(x), a=nn.Conv2d(4, 1, 3, padding=1), b=nn.BatchNorm2d(4)),
        "other pixels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, reason = REFUSED[name]
    check_refused(SUM, model, X[2], "trace", reason)


def test_the_sum_of_those_without_a_bias_has_none() -> None:
    model = net(a=nn.Conv2d(4, 4, 3, padding=1, bias=False), b=nn.Conv2d(4, 4, 1, bias=False))
    assert SUM(rg.trace(model, X[2])).a.bias is None


def test_one_in_training_mode() -> None:
    model = net(a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 1))
    model.a.train()
    check_refused(SUM, model, X[2], "fx", "training mode")


@pytest.mark.parametrize(("form", "taken"), [("fx", 0), ("trace", 1)])
@pytest.mark.parametrize("axes", KINDS)
def test_a_norm_of_the_second_axis_and_a_convolution_over_it(form: str, taken: int, axes: int) -> None:
    x, names = torch.randn(4, *[4] * axes), ["weight", "bias", "running_mean", "running_var"]
    parts = dict(zip(names, torch.rand(4, 4), strict=True))
    forward = lambda m, x: m.a(x) + F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias)
    model = net(forward, a=KINDS[axes](4, 4, 3, padding=1))
    for name in names:
        model.register_buffer(name, parts[name])
    check_refused(
        SUM, model.requires_grad_(False), (x,), form, "another axis"
    )  # one image, of as many rows as channels
    gm = SUM(rg.symbolic_trace(model) if form == "fx" else rg.trace(model, (x[None],)))
    assert len(rg.history(gm)[-1].applied) == taken
    torch.testing.assert_close(gm(x[None]), model(x[None]), rtol=1e-5, atol=1e-5)


def test_a_scale_that_is_not_finite() -> None:
    model = net(a=nn.Conv2d(4, 4, 3, padding=1), b=nn.BatchNorm2d(4, eps=1e-12)).half()
    model.b.running_var.zero_()
    gm = SUM(rg.symbolic_trace(model))
    assert "not finite" in str(rg.history(gm)[-1].refused[0])


def test_training() -> None:
    model = net(a=nn.Conv2d(4, 4, 3, padding=1), b=nn.BatchNorm2d(4)).train()
    check_refused(SUM, model, X[2], "fx", "training mode")


@pytest.mark.parametrize(
    "function", [lambda m, x: m.a(x) + x, lambda m, x: m.a(x) + m.b(x * 2), lambda m, x: m.a(x) + m.a(x)]
)
def test_other_sums_are_no_candidates(function: Any) -> None:
    gm = SUM(rg.trace(net(function, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1)), X[2]))
    assert not rg.history(gm)[-1].applied


def test_an_input_that_is_written_between() -> None:
    def forward(m: Any, x: Any) -> Any:
        x = x * 1
        y = m.a(x)
        x.mul_(2)
        return y + m.b(x)

    check_refused(SUM, net(forward, a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 1)), X[2], "fx", "in place")


def test_a_long_sum_is_one_pass() -> None:
    names = [f"c{i}" for i in range(12)]
    parts = {name: nn.Conv2d(4, 4, 1) for name in names}
    gm = rg.symbolic_trace(net(lambda m, x: sum((getattr(m, name)(x) for name in names[1:]), m.c0(x)), **parts))
    passes: list[object] = []
    pattern = type(SUM).pattern
    found = pattern.candidates
    try:
        pattern.candidates = lambda owner: passes.append(owner) or found(owner)  # type: ignore[method-assign]
        SUM(gm)
    finally:
        del pattern.candidates
    assert len(rg.history(gm)[-1].applied) == 11
    assert len(passes) == 1
