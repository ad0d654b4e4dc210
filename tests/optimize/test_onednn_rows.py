"""Convolutions over one axis as images of one row: right, and with what follows in the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_fusions import Of, a_program
from test_onednn_graph import built, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor], Tensor]


def conv(x: Tensor, size: int = 3, **settings: Any) -> Tensor:
    settings = {"padding": size // 2, **settings}
    kernel = weight(6, 6 // settings.get("groups", 1), size) / 4
    return F.conv1d(x, kernel, weight(6), **settings)


def blocks(x: Tensor) -> Tensor:
    for size in (1, 3, 5):
        x = x + conv(conv(x, size).relu(), 1)
    return x


def by_tokens(x: Tensor) -> Tensor:
    return F.linear(conv(x).relu().mT, weight(9, 6)).relu()


def of_tokens(x: Tensor) -> Tensor:
    return conv(F.linear(x.mT, weight(6, 6)).mT).relu().mT


ROWS: dict[str, tuple[Function, list[str]]] = {
    "a convolution": (conv, ["_convolution"]),
    "a module": (nn.Conv1d(6, 9, 4, stride=2, padding=1, dilation=2), ["_convolution"]),
    "an activation": (lambda x: F.gelu(conv(x)), ["_convolution+gelu"]),
    "by channel": (lambda x: conv(x, groups=6).relu(), ["_convolution+relu"]),
    "in groups": (lambda x: conv(x, groups=2, stride=2).relu(), ["_convolution+relu"]),
    "padded to the same": (lambda x: conv(x, 4, padding="same").tanh(), ["_convolution+tanh"]),
    "padded before": (lambda x: conv(x, dilation=9, padding=9, groups=6).relu(), ["_convolution+relu"]),
    "a block": (lambda x: x + conv(conv(x).relu(), 1), ["_convolution+relu", "_convolution+add"]),
    "blocks": (blocks, ["_convolution+relu", "_convolution+add"] * 3),
    "a number": (lambda x: torch.relu(conv(x) + 1.5), ["_convolution+relu"]),
    "a channel's": (lambda x: conv(x) + weight(6, 1), ["_convolution+add"]),
    "swish": (lambda x: (y := conv(x)) * y.sigmoid(), ["_convolution+sigmoid+mul"]),
    "two": (lambda x: conv(x) + conv(x, 5), ["_convolution", "_convolution+add"]),
    "a gate": (lambda x: conv(x) * F.silu(conv(x, 5)), ["_convolution+mul", "_convolution+sigmoid+mul"]),
    "tokens": (by_tokens, ["_convolution+relu", "linear+relu"]),
    "of tokens": (of_tokens, ["_convolution+relu", "linear"]),
    "read twice": (lambda x: (y := conv(x).relu()).sum(-1) + y.mean(-1), ["_convolution+relu"]),
    "another batch": (lambda x: conv(x) + conv(x[:1]), ["_convolution", "_convolution+add"]),
    "a weight that is computed": (lambda x: F.conv1d(x, x[:, :, :3].relu(), None, 1, 1).relu(), ["_convolution+relu"]),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_what_follows_goes_into_the_kernel(name: str, batch: int, last: bool) -> None:
    function, groups = ROWS[name]
    torch.manual_seed(0)

    def draw() -> Tensor:
        x = torch.randn(6 if "weight" in name else batch, 6, 12)
        return x.mT.contiguous().mT if last else x

    with torch.no_grad():
        _, run, found = a_program(function, draw())
        assert sorted(group for group in found if "conv" in group or "linear" in group) == sorted(groups)
        for x in (draw(), draw()):
            result, expected = run(x), Of(function)(x)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


def test_in_bfloat16() -> None:
    model = nn.Sequential(nn.Conv1d(6, 9, 3), nn.GELU(), nn.Conv1d(9, 9, 3, groups=9), nn.ReLU(), nn.Conv1d(9, 6, 1))
    model, x = model.eval().requires_grad_(False), torch.randn(2, 6, 30).bfloat16()
    exact = model.double()(x.double())
    model.bfloat16()
    (found,) = built(model, x)([x])
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() <= 1.5 * (model(x) - exact).norm()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.apart = nn.Conv1d(8, 24, 1), nn.Conv1d(24, 24, 5, padding=4, dilation=2, groups=24)
        self.norm, self.back = nn.BatchNorm1d(24), nn.Conv1d(24, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.silu(self.norm(self.apart(F.relu(self.wide(x))))))


@pytest.mark.parametrize("images", [True, False])
def test_the_results_are_as_near_to_float64_as_torchs(images: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).eval().requires_grad_(False)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
                tensor.copy_(torch.rand(24) + 0.5)
    x = torch.randn(2, 8, 40)
    forms = Forms(symbolic_trace(model), [x], images=images)
    found = forms.complete(forms(x, *forms.beside))[0]
    usual, exact = model(x), model.double()(x.double())
    assert (found - exact).norm() <= 1.5 * (usual - exact).norm()
    assert len(forms.known.by_pixels) == (12 if images else 0)
    assert forms.images == (12 if images else 0)


def read_by_two(x: Tensor) -> Tensor:
    stream = conv(x).relu()
    return (conv(x.exp()) + stream).relu() * (conv(x.tanh()) + stream).relu()


def read_by_sums(x: Tensor) -> Tensor:
    stream = conv(x) + x
    first = conv(x, 5) + stream
    return (conv(first) + stream).softmax(-1)


@pytest.mark.parametrize("function", [read_by_two, read_by_sums])
def test_what_several_kernels_read_is_written_by_none(function: Function) -> None:
    x = torch.randn(2, 6, 12)
    with torch.no_grad():
        run = built(Of(function), x)
        for given in (x, torch.randn(x.shape), torch.randn(x.shape)):
            torch.testing.assert_close(run([given])[0], Of(function)(given), rtol=1e-4, atol=1e-4)


def reads_strides(x: Tensor) -> Tensor:
    return conv(x).as_strided((2, 3), (1, 2))


def writes(x: Tensor) -> Tensor:
    y = conv(x)
    y[0].mul_(2)
    return y.relu()


@pytest.mark.parametrize(
    "function",
    [
        reads_strides,
        writes,
        lambda x: conv(x[0]).relu(),  # no batch
        nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"), nn.ReLU()),
        lambda x: F.conv_transpose1d(x, weight(6, 4, 3)).relu(),
        lambda x: F.conv2d(x[:, :, None], weight(6, 6, 1, 3)).relu(),
    ],
)
def test_others_stay_as_they_are(function: Function) -> None:
    x = torch.randn(2, 6, 12)
    with torch.no_grad():
        gm = symbolic_trace(Of(function))
        assert not Forms(gm, [x]).known.by_pixels
        torch.testing.assert_close(built(Of(function), x)([x])[0], Of(function)(x), rtol=1e-4, atol=1e-4)


def test_what_is_over_no_row_is_not_taken_to_lie_so() -> None:
    model = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"), nn.Tanh()).eval()
    x = torch.randn(2, 6, 12)
    with torch.no_grad():
        forms = Forms(symbolic_trace(model), [x])
        assert {axes for _, axes in forms.known.forms.values()} == {(0, 1, 2)}
        assert forms(x)[0].is_contiguous()
    assert forms.images == 0
