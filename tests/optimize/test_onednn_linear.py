"""Linear layers that are computed outside of oneDNN Graph's kernels: right, and with nothing fused in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_onednn_fusions import Of, a_program, layer
from test_onednn_graph import W10, built, weight
from test_onednn_pixels import Block
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from regraft.core.errors import NotCovered
from regraft.optimize.engines import onednn_linear
from regraft.optimize.engines.onednn_forms import Forms
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations import _packed_linear
from regraft.transformations._activations import NONE, Activation

A, ROW = weight(2, 6, 10), weight(1, 1, 10)
Function = Callable[[Tensor], Tensor]


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[Activation, bool]]]:
    """Makes a way the fastest here, and says with what following it was asked."""
    if not mkldnn.works(mkldnn.MKL, torch.float32):
        pytest.skip("a build without MKL")

    def fastest(name: str) -> list[tuple[Activation, bool]]:
        asked: list[tuple[Activation, bool]] = []
        monkeypatch.setattr(onednn_linear, "way_in_program", lambda *given: asked.append(given[3:]) or name)
        return asked

    return fastest


def halves(x: Tensor) -> Tensor:
    first, second = F.linear(x, weight(20, 10)).chunk(2, -1)
    return F.silu(first) * second


FUNCTIONS: dict[str, tuple[Function, list[str]]] = {
    "a layer": (layer, []),
    "a module": (nn.Linear(10, 7), []),
    "without a bias": (lambda x: F.linear(x, weight(9, 10)), []),
    "a weight that lies otherwise": (lambda x: F.linear(x, weight(10, 9).t(), weight(9)), []),
    "an activation": (lambda x: F.gelu(layer(x)), []),
    "two": (lambda x: torch.relu(layer(x)).square() * 1.5, []),
    "an activation of a module": (nn.Sequential(nn.Linear(10, 10), nn.Hardswish(), nn.Linear(10, 3)), []),
    "an activation and a factor": (lambda x: torch.sigmoid(layer(x)) * x, []),
    "a sum": (lambda x: layer(x) + x, []),
    "a sum and more": (lambda x: torch.relu(layer(x) + x).square(), ["add+relu+square"]),
    "a gate": (lambda x: layer(x) * F.silu(F.linear(x, weight(10, 10))), []),
    "swish": (lambda x: (y := layer(x)) * y.sigmoid(), []),
    "a gate of halves": (halves, []),
    "written into": (lambda x: layer(x).relu_() + 1, []),
    "written into in part": (lambda x: _doubled_in_part(layer(x)).relu(), []),
    "a norm": (lambda x: F.layer_norm(layer(x) + x, [10], W10, W10), []),
    "read twice": (lambda x: (layer(x).exp() + x).sum(-1) + layer(x).mean(-1), []),
    "of a transposed sequence": (lambda x: layer(x.mT.contiguous().mT), []),
    "of every second feature": (lambda x: F.linear(x[..., ::2], weight(4, 5), weight(4)), []),
    "one after the other": (lambda x: layer(F.gelu(layer(F.layer_norm(x, [10], W10, W10)))) + x, []),
    "of a single row": (lambda x: layer(x[:1, :1]) + x[:1, :1], []),
    "of a vector": (lambda x: F.relu(layer(x[0, 0])), []),
    "of a vector, in heads": (lambda x: layer(x[:1, :1]).view(1, 2, 5).exp() + 1, []),
}
"""Functions, and what their programs fuse."""


def _doubled_in_part(y: Tensor) -> Tensor:
    y[0].mul_(2)
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_by_mkl(name: str, way: Callable[[str], list[tuple[Activation, bool]]]) -> None:
    function, fused = FUNCTIONS[name]
    asked = way("mkl")
    with torch.no_grad():
        gm, run, found = a_program(function, A)
        assert asked
        assert Forms(gm, [A]).packs
        assert not [group for group in found if "linear" in group or "addmm" in group]
        assert not [group for group in found if group not in (*fused, "add", "mul", "layer_norm")]
        for _ in range(3):
            x = torch.randn(A.shape)
            result, expected = run(x), Of(function)(x)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
            assert result.stride() == expected.stride()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_one_row_by_torch(name: str, way: Callable[[str], list[tuple[Activation, bool]]]) -> None:
    function, _ = FUNCTIONS[name]
    asked = way("plain")
    with torch.no_grad():
        run = built(Of(function), ROW)
        for _ in range(3):
            x = torch.randn(ROW.shape)
            result, expected = run([x])[0], Of(function)(x)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
            assert result.stride() == expected.stride()
        assert not Forms(symbolic_trace(Of(function)), [ROW]).known.rows, "which are copied, for a kernel's sake"
    assert asked


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [("mkl", 12, torch.float32), ("mkl", 1, torch.float32), ("plain", 1, torch.float32), ("plain", 1, torch.bfloat16)],
)
def test_the_results_are_as_near_to_float64_as_torchs(
    name: str, rows: int, dtype: torch.dtype, way: Callable[[str], list[tuple[Activation, bool]]]
) -> None:
    asked = way(name)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).eval().requires_grad_(False).to(dtype)
    x = torch.randn(1, rows, 10).to(dtype)
    with torch.no_grad():
        (found,) = built(model, x)([x])
        usual, exact = model(x), model.double()(x.double())
    assert (found.double() - exact).norm() <= 1.5 * (usual.double() - exact).norm()
    assert asked == [(Activation("gelu", (), "none"), False), (NONE, True)] * 4, "what would go into oneDNN's kernel"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, x[0]),  # a weight that is computed
        lambda x: F.linear(x, W10[:10].expand(10, 10), x[0, 0, :10]),
        lambda x: F.linear(x, W10),
        lambda x: F.linear(x[:, :0], weight(9, 10)),
        lambda x: x @ weight(10, 10),
        lambda x: F.linear(x.double(), weight(9, 10).double()),
        lambda x: x + F.linear(A, weight(10, 10)),  # the same in each call
    ],
)
def test_what_stays_as_it_is(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(_packed_linear, "_times", lambda *_: {"plain": 2.0, "mkl": 1.0})
    with torch.no_grad():
        assert not Forms(symbolic_trace(Of(function)), [A.clone()]).known.own
        (found,) = built(Of(function), A.clone())([A.clone()])
    torch.testing.assert_close(found, Of(function)(A.clone()))


def test_what_several_layers_share_is_packed_once(way: Callable[[str], list[tuple[Activation, bool]]]) -> None:
    way("mkl")
    shared = nn.Linear(10, 10)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(10, 10), nn.Flatten(0, 1), shared).requires_grad_(False)
    with torch.no_grad():
        forms = Forms(symbolic_trace(model), [A])
        assert len(forms.packs) == 4
        assert len(forms.beside) == len(set(forms.packs.values())) == 2
        run, x = built(model, A), torch.randn(A.shape)
        torch.testing.assert_close(run([x])[0], model(x))


def test_the_program_is_for_one_size(way: Callable[[str], list[tuple[Activation, bool]]]) -> None:
    way("mkl")
    with torch.no_grad():
        run = built(Of(layer), A)
        with pytest.raises(NotCovered, match="made for inputs of the sizes"):
            run([A[:, :3]])


@pytest.mark.parametrize(
    ("rows", "times", "expected"),
    [
        (4, {"plain": 3, "onednn": 2, "mkl": 1}, "mkl"),
        (4, {"plain": 3, "onednn": 2, "mkl": 1.97}, "onednn"),  # a sum costs nothing in its kernel
        (4, {"plain": 1, "onednn": 2, "mkl": 1.9}, "mkl"),
        (4, {"plain": 1, "onednn": 2, "mkl": 3}, "onednn"),  # which would take torch's product for its own
        (4, {"plain": 1, "onednn": 2, "mkl": 1.9, "pixels": 1.5}, "pixels"),
        (1, {"plain": 1, "onednn": 2, "mkl": 1.5}, "plain"),
        (1, {"plain": 1.5, "onednn": 2, "mkl": 1}, "mkl"),
        (1, {"plain": 1.97, "onednn": 2}, "onednn"),
        (1, {"plain": 1}, "onednn"),
        (4, {"plain": 1}, "onednn"),
    ],
)
def test_the_way_follows_the_clock(
    rows: int, times: dict[str, float], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_packed_linear, "_times", lambda *_: times)
    x, matrix = torch.randn(1, rows, 7), torch.randn(5, 7)
    assert _packed_linear.way_in_program(x, matrix, None, NONE) == expected
    monkeypatch.setattr(_packed_linear, "_time_of_a_sum", lambda *_: 5)
    assert _packed_linear.way_in_program(x, matrix, None, NONE, joined=True) == "onednn"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert _packed_linear.way_in_program(x, matrix, None, NONE) == "onednn"


def test_a_sum_is_timed_once_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Size] = []
    monkeypatch.setattr(_packed_linear, "_SUMS", {})
    monkeypatch.setattr(_packed_linear, "seconds", lambda run: (timed.append(run().shape), [0.25])[1])
    assert [_packed_linear._time_of_a_sum(rows, torch.randn(5, 7)) for rows in (4, 4, 3)] == [0.25] * 3
    assert timed == [(4, 5), (3, 5)]


@pytest.mark.parametrize("axis", [2, -2])
def test_rows_of_heads_are_joined_by_torch(axis: int) -> None:
    cache = weight(1, 3, 8, 10)

    def joined(x: Tensor) -> Tensor:
        keys = torch.cat((cache * x.mean(), F.linear(x, weight(30, 10)).view(1, 2, 3, 10).transpose(1, 2)), axis)
        return x.mean(1).view(1, 1, 1, 10) @ keys.mT

    _, run, found = a_program(joined, weight(1, 2, 10))
    assert not [group for group in found if "cat" in group]
    x = torch.randn(1, 2, 10)
    torch.testing.assert_close(run(x), Of(joined)(x), rtol=1e-5, atol=1e-5)
