"""Linear layers as convolutions in programs of oneDNN Graph: right, and with what follows in the same kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_onednn_fusions import Of, a_program, layer
from test_onednn_graph import W10, built, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from regraft.optimize.engines import onednn_pixels, onednn_values
from regraft.optimize.engines.onednn_forms import Forms

A = weight(2, 6, 10)
Function = Callable[[Tensor], Tensor]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Convolutions are faster here; and what this was asked for."""
    sizes: list[torch.Size] = []
    monkeypatch.setattr(onednn_pixels, "as_good_by_pixels", lambda x, *_: sizes.append(x.shape) or True)
    return sizes


def halves(x: Tensor) -> Tensor:
    first, second = F.linear(x, weight(20, 10)).chunk(2, -1)
    return F.silu(first) * second


def read_after(x: Tensor) -> Tensor:
    stream = layer(x) + x
    return layer(F.relu(layer(stream))) + stream


FUSED: dict[str, tuple[Function, list[str]]] = {
    "a layer": (layer, ["_convolution"]),
    "a module": (nn.Linear(10, 7), ["_convolution"]),
    "without a bias": (lambda x: F.linear(x, weight(9, 10)), ["_convolution"]),
    "an activation": (lambda x: F.gelu(layer(x)), ["_convolution+gelu"]),
    "a module's": (lambda x: nn.functional.hardtanh(layer(x), -0.5, 0.7), ["_convolution+hardtanh"]),
    "a number": (lambda x: layer(x) * 1.5, ["_convolution"]),  # TorchScript multiplies the weight
    "a vector": (lambda x: layer(x) + W10, ["_convolution+add"]),
    "a sum": (lambda x: x + layer(x.sigmoid()), ["_convolution+add"]),
    "a sum and more": (lambda x: torch.relu(layer(x) + x).square(), ["_convolution+add+relu+square"]),
    "a multiple": (lambda x: torch.add(x, layer(x), alpha=2.5), ["_convolution+mul+add"]),
    "two layers": (lambda x: layer(x) + F.linear(x, weight(10, 10)), ["_convolution", "_convolution+add"]),
    "of another batch": (lambda x: layer(x.exp()) + layer(x[:1]), ["_convolution", "_convolution+add"]),
    "a gate": (
        lambda x: layer(x) * F.silu(F.linear(x, weight(10, 10))),
        ["_convolution+sigmoid+mul", "_convolution+mul"],
    ),
    "swish": (lambda x: layer(x) * layer(x).sigmoid(), ["_convolution+sigmoid+mul"]),
    "swish of one": (lambda x: (y := layer(x)) * y.sigmoid(), ["_convolution+sigmoid+mul"]),
    "one after the other": (lambda x: layer(F.relu(layer(x))), ["_convolution+relu", "_convolution"]),
    "halves": (halves, ["_convolution", "silu+mul"]),
    "a stream": (read_after, ["_convolution+add", "_convolution+relu", "_convolution+add"]),
    "written": (lambda x: layer(x).relu_() + 1, ["_convolution+relu+add"]),
    "a transposed sequence": (lambda x: layer(x.mT.contiguous().mT) + x, ["_convolution+add"]),
    "one that stays so": (lambda x: (layer(x.mT.contiguous().mT + 1) + x).mT, ["_convolution+add"]),
    "a product that lies otherwise": (lambda x: x.mT.contiguous().mT * layer(x), ["_convolution"]),
    "every second row": (lambda x: layer(x[:, ::2]).relu(), ["_convolution+relu"]),
    "a matrix": (lambda x: layer(x[0]).tanh(), ["_convolution+tanh"]),
    "rows of one each": (lambda x: F.relu(layer(x.reshape(12, 1, 10))), ["_convolution+relu"]),
    "read twice": (lambda x: (layer(x).exp() + x).sum(-1) + layer(x).mean(-1), ["_convolution"]),
    "after a norm": (lambda x: layer(F.layer_norm(x, [10], W10, W10)).relu(), ["layer_norm", "_convolution+relu"]),
    "with a convolution over one axis": (
        lambda x: F.conv1d(x, weight(1, 6, 3), None, 1, 1) + F.linear(x[:, :1], weight(10, 10)),
        ["_convolution", "_convolution+add"],
    ),
    "another size": (lambda x: layer(x)[None] + x.expand(3, 2, 6, 10), ["_convolution"]),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_follows_goes_into_the_kernel(name: str, asked: list[torch.Size]) -> None:
    function, groups = FUSED[name]
    torch.manual_seed(0)
    with torch.no_grad():
        _, run, found = a_program(function, A)
        assert asked
        assert [group for group in found if "_convolution" in group] == [g for g in groups if "_convolution" in g]
        for _ in range(3):
            x = torch.randn(A.shape)
            result, expected = run(x), Of(function)(x)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
            assert result.stride() == expected.stride()


def read_by_two(x: Tensor) -> Tensor:
    stream = F.gelu(layer(x))
    return (layer(x.exp()) + stream).relu() * (layer(x.tanh()) + stream).relu()


def read_by_sums(x: Tensor) -> Tensor:
    stream = layer(x) + x
    first = layer(x) + stream
    return (layer(first) + stream).softmax(-1)


def read_by_products(x: Tensor) -> Tensor:
    stream = layer(x).relu()
    return (layer(x.exp()) + stream) @ x.mT + (layer(x.tanh()) + stream) @ x.mT


@pytest.mark.parametrize("function", [read_by_two, read_by_sums, read_by_products])
def test_what_several_kernels_read_is_written_by_none(function: Function, asked: list[torch.Size]) -> None:
    with torch.no_grad():
        run = built(Of(function), A)
        for x in (A, torch.randn(A.shape), torch.randn(A.shape)):
            torch.testing.assert_close(run([x])[0], Of(function)(x), rtol=1e-4, atol=1e-5)
    assert asked


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(10, 24), nn.Linear(24, 10, bias=False), nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


def test_the_results_are_as_near_to_float64_as_torchs(asked: list[torch.Size]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).eval().requires_grad_(False)
    x = torch.randn(2, 6, 10)
    with torch.no_grad():
        (found,) = built(model, x)([x])
        usual, exact = model(x), model.double()(x.double())
    assert (found - exact).norm() <= 1.5 * (usual - exact).norm()
    assert len(asked) == 8


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, x[0]),  # a weight that is computed
        lambda x: F.linear(x, W10[:10].expand(10, 10), x[0, 0, :10]),
        lambda x: F.linear(x, weight(1, 10)),  # an image of one channel
        lambda x: F.linear(x[..., :1], weight(10, 1)),
        lambda x: F.linear(x, W10),
        lambda x: F.linear(x[:, :0], weight(9, 10)),
        lambda x: x @ weight(10, 10),
        lambda x: F.linear(x, weight(10, 10), weight(10, 10).mean(0) * x[0, 0, 0]),  # a bias that is computed
    ],
)
def test_what_stays_a_product(function: Function, asked: list[torch.Size]) -> None:
    with torch.no_grad():
        forms = Forms(symbolic_trace(Of(function)), [A.clone()])
        assert not forms.known.by_pixels
        (found,) = built(Of(function), A.clone())([A.clone()])
    torch.testing.assert_close(found, Of(function)(A.clone()))


def test_what_is_the_same_in_each_call_is_not_computed(asked: list[torch.Size]) -> None:
    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given, self.weight = nn.Parameter(weight(2, 6, 10)), nn.Parameter(weight(10, 10))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(self.given, self.weight).relu()

    with torch.no_grad():
        known = Forms(symbolic_trace(Known()), [A]).known
        assert not known.by_pixels
        assert not known.inside
        torch.testing.assert_close(built(Known(), A)([A])[0], Known()(A))
    assert not asked


def test_a_graph_that_writes_into_what_others_see_keeps_its_products(asked: list[torch.Size]) -> None:
    def writes(x: Tensor) -> Tensor:
        y = layer(x)
        y[0].mul_(2)
        return y.relu()

    with torch.no_grad():
        assert not Forms(symbolic_trace(Of(writes)), [A]).known.by_pixels
    assert not asked


def turned_into(x: Tensor) -> Tensor:
    halves = torch.cat((-x[..., 5:], x[..., :5]), -1)
    return F.linear(x, weight(10, 10)) + halves * W10


def turned(x: Tensor) -> Tensor:
    halves = torch.cat((-x[..., 5:], x[..., :5]), -1)
    return F.linear(x, weight(10, 10)) * x.exp() + halves * W10


@pytest.mark.parametrize("function", [turned_into, turned])
def test_what_turns_rows_stays_as_it_is_spelled(function: Function, asked: list[torch.Size]) -> None:
    with torch.no_grad():
        known = Forms(symbolic_trace(Of(function)), [A]).known
        assert known.respelled
        assert len(known.by_pixels) == 1
        assert not known.inside
        for x in (A, torch.randn(A.shape)):
            torch.testing.assert_close(built(Of(function), A)([x])[0], Of(function)(x), rtol=1e-5, atol=1e-5)


def test_a_slower_convolution_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_pixels, "as_good_by_pixels", lambda *_: False)
    with torch.no_grad():
        _, _, groups = a_program(lambda x: layer(x).relu(), A)
    assert groups == ["linear+relu"]


def test_the_weight_is_not_copied(asked: list[torch.Size]) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
    with torch.no_grad():
        known = onednn_values.Values(symbolic_trace(model), images=True)
        known.run(A)
    (found,) = known.by_pixels.values()
    assert found.kernel.data_ptr() == model[0].weight.data_ptr()
    assert found.bias is not None
    assert found.bias.data_ptr() == model[0].bias.data_ptr()


IN_A_PROCESS = """
import torch
from regraft.optimize.engines import onednn_pixels
onednn_pixels.as_good_by_pixels = lambda *_: True
from test_onednn_fusions import GATES, A, a_program
for function, _ in GATES.values():
    a_program(function, A)
print("right")
"""


def test_what_would_end_the_process_does_not() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.stdout.strip() == "right", (done.returncode, done.stderr[-2000:])
