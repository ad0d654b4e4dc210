"""Convolutions that are padded before, over rows, or without what their kernel never sees, give what they gave."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from regraft.optimize.engines import onednn_convolutions, onednn_spelling
from regraft.optimize.engines.onednn_convolutions import convolution
from regraft.optimize.engines.onednn_forms import Forms
from regraft.transformations import _mkldnn as mkldnn

Function = Callable[[Tensor], Tensor]


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each convolution whether it has another spelling."""
    seen: list[bool] = []

    def look(*given: Any) -> Any:
        found = convolution(*given)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(onednn_spelling, "convolution", look)
    return seen


def run(function: Function, x: Tensor) -> Tensor:
    (found,) = Forms(symbolic_trace(Of(function)), [x])(x)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_any_geometry(seed: int, spelled: list[bool]) -> None:
    chosen = random.Random(seed)
    others = 0
    while others < 5:
        axes = chosen.choice([1, 2, 2, 3])
        sizes, steps, strides, ends, pixels = (
            [chosen.randint(low, high) for _ in range(axes)] for low, high in ((1, 5), (1, 9), (1, 3), (0, 14), (1, 9))
        )
        word, groups = chosen.random() < 0.2, chosen.choice([1, 3])
        padding: Any = "same" if word else ends
        weight = torch.randn(3, 3 // groups, *sizes, dtype=torch.float64)
        bias = torch.randn(3, dtype=torch.float64)
        stride = 1 if word else strides

        def conv(x: Tensor) -> Tensor:
            return getattr(F, f"conv{axes}d")(x, weight, bias, stride, padding, steps, groups)  # noqa: B023

        x = torch.randn(2, 3, *pixels, dtype=torch.float64)
        if any(n + 2 * p <= d * (k - 1) for n, p, d, k in zip(pixels, ends, steps, sizes)) and not word:
            continue  # the kernel is larger than the image
        torch.testing.assert_close(run(conv, x), conv(x))
        others += spelled[-1]


def flops(function: Function, x: Tensor) -> int:
    forms = Forms(symbolic_trace(Of(function)), [x])
    with FlopCounterMode(display=False) as counter:
        forms(x)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"padding": 12, "dilation": 12}, 1),  # as wide as the image: the middle sees it, and nothing else does
        ({"padding": (12, 6), "dilation": (12, 6)}, 3),
        ({"padding": 11, "dilation": 11}, 9),
        ({"padding": 24, "dilation": 12, "size": 5}, 1),
        ({"padding": 16, "dilation": 8, "size": 5}, 9),
        ({"padding": "same", "dilation": 12}, 1),
        ({"padding": 12, "dilation": 12, "stride": 4}, 1),
        ({"padding": (0, 12), "dilation": (1, 12)}, 3),
        ({"padding": 1}, 9),
    ],
    ids=str,
)
def test_what_never_sees_the_image_is_left_out(settings: dict[str, Any], seen: int) -> None:
    size, x = settings.get("size", 3), torch.randn(1, 4, 12, 12)
    weight = torch.randn(4, 4, size, size)
    settings = {name: value for name, value in settings.items() if name != "size"}

    def conv(x: Tensor) -> Tensor:
        return F.conv2d(x, weight, **settings)

    assert flops(conv, x) == 2 * conv(x).numel() * 4 * seen
    torch.testing.assert_close(run(conv, x), conv(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("avx512", [True, False])
@pytest.mark.parametrize("padding", range(3, 9))
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2])
def test_rows_are_padded_before_where_the_kernel_by_channel_cannot(
    dilation: int, groups: int, padding: int, avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkldnn, "_without_avx512", lambda: not avx512)
    padded = []
    monkeypatch.setattr(
        onednn_convolutions.F, "pad", lambda x, around, pad=F.pad: padded.append(around) or pad(x, around)
    )
    x, weight, bias = torch.randn(1, 4, 20, 20), torch.randn(4, 4 // groups, 3, 3), torch.randn(4)

    def conv(x: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, 1, (5, padding), dilation, groups)

    torch.testing.assert_close(run(conv, x), conv(x), rtol=1e-4, atol=1e-4)
    before = groups == 4 and dilation == 2 and padding > (6 if avx512 else 4)
    assert [tuple(around) for around in padded[-1:]] == ([(padding, padding, 0, 0)] if before else [])


def test_a_convolution_that_it_knows_stays_as_it_is(spelled: list[bool]) -> None:
    x = torch.randn(1, 4, 9, 9)
    for settings in ({}, {"padding": 1}, {"padding": 2, "dilation": 2, "groups": 4}, {"stride": 2, "padding": (1, 0)}):
        run(lambda x: F.conv2d(x, torch.ones(4, 4 // settings.get("groups", 1), 3, 3), **settings), x)  # noqa: B023
    run(lambda x: F.conv2d(x, torch.ones(4, 2, 3, 3), None, 1, 9, 3, 4), torch.randn(1, 8, 30, 30))  # of two channels
    run(lambda x: F.conv3d(x, torch.ones(4, 1, 3, 3, 3), None, 1, 9, 3, 4), torch.randn(1, 4, 9, 10, 11))
    run(lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3), None, 2, 1), x[..., :2, :2])  # one end would be padded, one not
    run(lambda x: F.conv2d(x, torch.ones(4, 1, 3, 3), None, 1, 8, 8, 4), x[0])  # no batch
    assert spelled == [False] * 8


@pytest.mark.parametrize(
    "conv",
    [
        lambda x: F.conv1d(x, torch.ones(8, 1, 5), torch.ones(8), 1, 2, 1, 8),
        lambda x: F.conv1d(x, torch.ones(8, 1, 4), None, 3, "valid", 2, 8),
        lambda x: F.conv1d(x, torch.ones(8, 1, 3), torch.ones(8), 1, 16, 16, 8),
        lambda x: F.conv1d(x, torch.ones(8, 1, 4), None, 1, "same", 2, 8),
    ],
)
def test_one_by_channel_over_a_single_axis_is_over_the_pixels_of_a_row(
    conv: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    conv2d = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *given: seen.append(x) or conv2d(x, *given))
    for x in (torch.randn(2, 8, 40), torch.randn(2, 40, 8).transpose(1, 2)):
        torch.testing.assert_close(run(conv, x), conv(x), rtol=1e-4, atol=1e-4)
        assert seen[-1].shape[2] == 1
        assert seen[-1].is_contiguous(memory_format=torch.channels_last)


def test_others_over_a_single_axis_have_no_other_spelling(spelled: list[bool]) -> None:
    x = torch.randn(2, 8, 40)
    run(lambda x: F.conv1d(x, torch.ones(8, 8, 3), padding=1), x)
    run(lambda x: F.conv1d(x, torch.ones(8, 4, 3), padding=1, groups=2), x)
    run(lambda x: F.conv1d(x, torch.ones(1, 1, 3), padding=1), x[:, :1])
    run(lambda x: F.conv1d(x, torch.ones(16, 1, 3), padding=1, groups=8), x)
    assert spelled == [False] * 4
