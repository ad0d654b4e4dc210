"""MergeConvs: convolutions of one input and one geometry."""

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
X = {n: (torch.randn(2, 4, *[7] * n),) for n in KINDS}


def two(function: Any = None, **parts: Any) -> nn.Module:
    return randomise(Wrap(function or (lambda m, x: (m.a(x), m.b(x))), **parts)).eval()


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("axes", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": False},
        {"stride": 2, "padding": 1},
        {"dilation": 2},
        {"padding": "same"},
        {"padding": 1, "padding_mode": "circular"},
    ],
    ids=str,
)
def test_applied(form: str, axes: int, settings: dict[str, Any]) -> None:
    make = KINDS[axes]
    gm = check_applied(rg.MergeConvs(), two(a=make(4, 3, 3, **settings), b=make(4, 5, 3, **settings)), X[axes], form)
    assert gm.get_submodule("a_b").weight.shape[0] == 8


@pytest.mark.parametrize("x", [X[2][0], X[2][0][0]])
def test_the_merged_value_has_its_shape(x: torch.Tensor) -> None:
    gm = rg.MergeConvs()(rg.trace(two(a=nn.Conv2d(4, 3, 3), b=nn.Conv2d(4, 5, 3)), (x,)))
    (merged,) = (node for node in gm.graph.nodes if node.op == "call_module")
    assert merged.meta["val"].shape == gm.get_submodule("a_b")(x).shape


def test_some_with_bias_and_without_a_batch() -> None:
    model = two(a=nn.Conv2d(4, 3, 1), b=nn.Conv2d(4, 5, 1, bias=False))
    check_applied(rg.MergeConvs(), model, (X[2][0][0],), "fx")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_the_caller_gets_is_laid_out_as_it_was(layout: torch.memory_format) -> None:
    model, x = two(a=nn.Conv2d(4, 3, 3), b=nn.Conv2d(4, 5, 3)), X[2][0].to(memory_format=layout)
    gm = rg.MergeConvs()(rg.trace(model, (x,)))
    for found, expected in zip(gm(x), model(x), strict=True):
        assert found.stride() == expected.stride()


def test_those_of_one_geometry_are_merged_and_others_left() -> None:
    model = two(lambda m, x: (m.a(x), m.b(x), m.c(x)), a=nn.Conv2d(4, 3, 1), b=nn.Conv2d(4, 2, 3), c=nn.Conv2d(4, 5, 1))
    gm = check_applied(rg.MergeConvs(), model, X[2], "fx")
    assert {"a_c", "b"} <= set(dict(gm.named_modules()))


FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("axes", KINDS)
@pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1}, {"padding": "same"}, {"dilation": 2}], ids=str)
def test_functions(form: str, axes: int, settings: dict[str, Any]) -> None:
    conv = FUNCTIONS[axes]
    weights = {"v": nn.Parameter(torch.empty(3, 4, *[3] * axes)), "w": nn.Parameter(torch.empty(5, 4, *[3] * axes))}
    model = two(
        lambda m, x: (conv(x, m.v, m.b, **settings), conv(x, m.w, **settings)),
        b=nn.Parameter(torch.empty(3)),
        **weights,
    )
    gm = check_applied(rg.MergeConvs(), model, X[axes], form)
    rg.testing.assert_round_trip(rg.MergeConvs(), model, X[axes])
    assert [n.op for n in gm.graph.nodes].count("call_module") == 1


@pytest.mark.parametrize("first", ["module", "function"])
def test_a_function_beside_a_module(first: str) -> None:
    def forward(m: Any, x: Any) -> Any:
        function = lambda: F.conv2d(x, m.w, None, 1, 1)
        return (m.a(x), function()) if first == "module" else (function(), m.a(x))

    model = two(forward, a=nn.Conv2d(4, 3, 3, padding=1), w=nn.Parameter(torch.empty(5, 4, 3, 3)))
    check_applied(rg.MergeConvs(), model, X[2], "trace")


@pytest.mark.parametrize("other", [{"padding": 1, "padding_mode": "circular"}, {"padding": 1, "stride": 2}, {}])
def test_other_geometries_are_no_candidates(other: dict[str, Any]) -> None:
    model = two(a=nn.Conv2d(4, 3, 3, padding=1), b=nn.Conv2d(4, 3, 3, **other))
    gm = rg.MergeConvs()(rg.trace(model, X[2]))
    assert not rg.history(gm)[-1].applied
    assert not rg.history(gm)[-1].refused


def _hooked() -> nn.Module:
    conv = nn.Conv2d(4, 3, 3)
    conv.register_forward_hook(lambda module, args, result: result * 2)
    return conv


SAME = nn.Conv2d(4, 3, 3)
REFUSED: dict[str, tuple[nn.Module, str]] = {
    "groups": (two(a=nn.Conv2d(4, 4, 3, groups=2), b=nn.Conv2d(4, 6, 3, groups=2)), "groups"),
    "hooks": (two(a=_hooked(), b=nn.Conv2d(4, 3, 3)), "hooks"),
    "called twice": (
        two(lambda m, x: m.a(x) + m.a(x) * m.b(x), a=nn.Conv2d(4, 3, 3), b=nn.Conv2d(4, 3, 3)),
        "called 2 times",
    ),
    "frozen": (two(a=nn.Conv2d(4, 3, 3).requires_grad_(False), b=nn.Conv2d(4, 3, 3)), "frozen"),
    "modes": (two(a=nn.Conv2d(4, 3, 3), b=nn.Conv2d(4, 3, 3)), "training mode"),
    "a computed weight": (
        two(
            lambda m, x: (F.conv2d(x, m.w * 2), F.conv2d(x, m.v * 2)),
            w=nn.Parameter(torch.empty(3, 4, 3, 3)),
            v=nn.Parameter(torch.empty(3, 4, 3, 3)),
        ),
        "computed by the graph",
    ),
    "one weight": (
        two(lambda m, x: (F.conv2d(x, m.w), F.conv2d(x, m.w)), w=nn.Parameter(torch.empty(3, 4, 3, 3))),
        "read by",
    ),
    "view": (two(lambda m, x: (m.a(x).view(2, -1), m.b(x)), a=nn.Conv2d(4, 3, 3), b=nn.Conv2d(4, 3, 3)), "contiguous"),
    "written": (two(lambda m, x: (m.a(x), x.add_(1), m.b(x)), a=nn.Conv2d(4, 3, 3), b=nn.Conv2d(4, 3, 3)), "in place"),
}
REFUSED["modes"][0].a.train()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, word = REFUSED[name]
    check_refused(rg.MergeConvs(), model, X[2], "fx", word)
