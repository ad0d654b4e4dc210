"""Images of one pixel: what becomes of them in a program of oneDNN Graph, and what does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import W8, Of, built, result_of, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.profiler import profile

from helpers import randomise
from regraft.optimize.engines import onednn_graph
from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor], Tensor]
PIXEL = weight(1, 6, 1, 1)
KERNEL = weight(8, 6, 1, 1)
IMAGE = weight(2, 6, 12, 10)


class Excited(nn.Module):
    """A convolution, squeeze and excitation, and a convolution."""

    def __init__(self, act: nn.Module, bias: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(6, 32, 3, padding=1), nn.Conv2d(32, 6, 1)
        self.pool, self.act = nn.AdaptiveAvgPool2d(1), act
        self.reduce = nn.Conv2d(32, 8, 1, padding="same", bias=bias)
        self.expand = nn.Conv2d(8, 32, 1, padding="same", bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        return self.last(x * self.expand(self.act(self.reduce(self.pool(x)))).sigmoid())


@pytest.fixture(params=["channels last", "channels first"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How images lie in the program, which is else what is faster."""
    monkeypatch.setattr(onednn_graph, "_is_faster", lambda *_: request.param == "channels first")


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float32), (2, torch.float32), (1, torch.bfloat16)])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.ReLU(), nn.Hardswish()])
def test_squeeze_and_excitation(act: nn.Module, batch: int, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    module = Excited(act, bias)
    randomise(module)
    exact = copy.deepcopy(module).double()
    x = torch.randn(batch, 6, 12, 10).to(dtype)
    with torch.no_grad():
        run = built(module.to(dtype), x)
        for given in (x, 3 * x + 1, -x):
            (found,), usual, right = run([given]), module(given), exact(given.double())
            errors = [(y.double() - right).norm() for y in (found, usual)]
            assert found.dtype is dtype
            assert errors[0] <= 1.5 * errors[1]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("batch", "dtype"), [(2, torch.float32), (1, torch.bfloat16)])
def test_its_convolutions_are_run_by_the_kernels_that_were_made_for_them(batch: int, dtype: torch.dtype) -> None:
    module, x = Excited(nn.SiLU(), True).to(dtype), torch.randn(batch, 6, 12, 10).to(dtype)
    with torch.no_grad():
        run = built(module, x)
        with profile() as seen:
            run([x])
    names = {event.key for event in seen.key_averages()}
    assert any(name.startswith("Llga") for name in names)
    assert "fallback_function" not in names


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.conv2d(x, KERNEL, W8),
        lambda x: F.conv2d(x, KERNEL, None, 2),
        lambda x: F.conv2d(x, KERNEL, W8, padding="same"),
        lambda x: F.hardtanh(F.conv2d(x, KERNEL, W8, (3, 1), (0, 0), (2, 2))),
        lambda x: F.relu(F.conv2d(x, KERNEL)) + 1,
    ],
)
def test_a_convolution_of_one_pixel_is_a_product_with_a_vector(function: Function) -> None:
    forms = Forms(symbolic_trace(Of(function)), [PIXEL])
    program: Any = torch.jit.trace(forms, (PIXEL, *forms.beside), check_trace=False).graph
    assert len(program.findAllNodes("aten::mv") + program.findAllNodes("aten::addmv")) == 1
    run = built(Of(function), PIXEL)
    for x in (PIXEL, -PIXEL, PIXEL + 1):
        (found,), expected = run([x]), function(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.conv2d(x, weight(8, 3, 1, 1), W8, groups=2),
        lambda x: F.conv2d(x, KERNEL, W8, stride=3, padding=1),  # the pixel that is left is one of zeros
        lambda x: F.conv2d(x, weight(8, 6, 3, 3), W8, padding=1),
        lambda x: F.conv2d(x, weight(8, 6, 3, 3), W8, padding="same"),
        lambda x: F.conv2d(x.expand(2, -1, -1, -1), KERNEL, W8),
        lambda x: F.conv2d(x.expand(-1, -1, 2, -1), KERNEL, W8),
        lambda x: F.conv2d(x.bfloat16(), KERNEL.bfloat16(), W8.bfloat16()).float(),
        lambda x: F.conv1d(x[..., 0], KERNEL[..., 0], W8),
        lambda x: F.conv_transpose2d(x, weight(6, 8, 1, 1), W8),
    ],
)
def test_other_convolutions_stay_as_they_are(function: Function) -> None:
    forms = Forms(symbolic_trace(Of(function)), [PIXEL])
    program: Any = torch.jit.trace(forms, (PIXEL, *forms.beside), check_trace=False).graph
    assert not program.findAllNodes("aten::mv") + program.findAllNodes("aten::addmv")
    (found,), expected = built(Of(function), PIXEL)([PIXEL]), function(PIXEL)
    in_halves = torch.equal(expected, expected.bfloat16().float())
    # where the processor has no instructions for halves, the last rounding may be another
    rounding = {"rtol": torch.finfo(torch.bfloat16).eps, "atol": 1e-5} if in_halves else {}
    torch.testing.assert_close(found, expected, **rounding)


@pytest.mark.parametrize(
    ("function", "respelled"),
    [
        (lambda x: F.adaptive_avg_pool2d(x, 1), True),
        (nn.AdaptiveAvgPool2d((1, 1)), True),
        (lambda x: x.mean((2, 3), keepdim=True), True),
        (lambda x: torch.mean(x, dim=[-1, -2], keepdim=True) * 2, True),
        (lambda x: F.adaptive_avg_pool2d(x, (1, 2)), False),
        (lambda x: x.mean((2, 3)), False),
        (lambda x: x.mean((0, 1), keepdim=True), False),
        (lambda x: x.mean(1), False),
        (lambda x: x[0].mean((1, 2), keepdim=True), False),
        (lambda x: x.mean((2, 3), keepdim=True, dtype=torch.float32), False),
        (lambda x: x.sum((2, 3), keepdim=True), False),
        (lambda x: x.float().mean((2, 3), keepdim=True), False),
    ],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_mean_of_halves(function: Function, respelled: bool, memory_format: torch.memory_format) -> None:
    x = IMAGE.bfloat16().contiguous(memory_format=memory_format)
    forms = Forms(symbolic_trace(Of(function)), [x])
    assert bool(forms.known.respelled) == respelled
    found, usual, right = result_of(forms, x), function(x), function(x.double())
    assert (found.dtype, found.shape) == (usual.dtype, usual.shape)
    assert (found.double() - right).norm() <= 1.01 * (usual.double() - right).norm() + 1e-6


def test_the_mean_of_float32_stays_as_it_is() -> None:
    """The kernel for the means of parts adds one number after the other."""
    assert not Forms(symbolic_trace(Of(nn.AdaptiveAvgPool2d(1))), [IMAGE]).known.respelled
