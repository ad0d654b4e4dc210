"""Norms in another spelling are the same norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import Of, built
from torch import Tensor, nn
from torch.fx import Proxy, symbolic_trace
from torch.nn import functional as F

from regraft.optimize.engines import onednn_norms
from regraft.optimize.engines.onednn_forms import Forms
from regraft.transformations._mkldnn import LINEAR, works

WEIGHT, BIAS = torch.randn(6).abs() + 0.5, torch.randn(6)


def randomised(layer: nn.Module) -> nn.Module:
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand_like(tensor) + 0.5
    return layer.eval()


def norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's function as one node, as `torch.compile` finds it."""
    if isinstance(x, Proxy):
        return x.tracer.create_proxy("call_function", F.instance_norm, (x, *args), kwargs)
    return F.instance_norm(x, *args, **kwargs)


class Asks(nn.Module):
    """A layer whose weights are in the graph."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.weight, self.bias = function, nn.Parameter(WEIGHT), nn.Parameter(BIAS)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


NORMS: dict[str, nn.Module] = {
    "of a class": nn.InstanceNorm2d(6),
    "with weights": randomised(nn.InstanceNorm2d(6, eps=0.1, affine=True)),
    "a function": Asks(lambda x, weight, bias: norm(x)),
    "a function with weights": Asks(lambda x, weight, bias: norm(x, None, None, weight, bias, eps=0.2)),
    "with a bias": Asks(lambda x, weight, bias: norm(x, bias=bias)),
    "with a weight": Asks(lambda x, weight, bias: norm(x, weight=weight)),
    "torch's": Asks(lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 0.3, False)),
    "ATen's": Asks(lambda x, w, b: torch.ops.aten.instance_norm.default(x, w, b, None, None, True, 0.1, 0.3, False)),
}


def exact(module: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(module).double()(x.double())


def calls(module: nn.Module, x: Tensor) -> set[str]:
    """What the program of a module calls."""
    forms = Forms(symbolic_trace(module), [x])
    return {node.kind() for node in torch.jit.trace(forms, (x, *forms.beside), check_trace=False).inlined_graph.nodes()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NORMS)
def test_an_instance_norm_is_the_same(name: str, batch: int, layout: torch.memory_format, dtype: torch.dtype) -> None:
    module = nn.Sequential(copy.deepcopy(NORMS[name])).to(dtype)
    program = built(module, torch.randn(batch, 6, 9, 7).to(dtype, memory_format=layout))
    for mean in (0, 100):  # of which the mean of the squares would be wrong
        errors = []
        # of many: how well the mean of one channel is rounded is luck, torch's and ours
        for x in (torch.randn(20, batch, 6, 9, 7) + mean).to(dtype):
            x = x.to(memory_format=layout)
            (result,) = program([x])
            assert result.dtype == dtype
            expected = exact(module, x)
            errors.append([(given.double() - expected).square().mean() for given in (result, module(x))])
        error, own = torch.tensor(errors).mean(0).sqrt()
        assert error <= 3 * own
        assert own < 1e-3 or dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.InstanceNorm1d(6), torch.randn(2, 6, 9)),
        (nn.InstanceNorm3d(6), torch.randn(2, 6, 4, 5, 3)),
        (Of(norm), torch.randn(2, 6, 9)),
        (Of(norm), torch.randn(2, 6, 4, 5, 3)),
    ],
)
def test_of_other_axes(module: nn.Module, x: Tensor) -> None:
    module = nn.Sequential(module)
    assert "aten::instance_norm" not in calls(module, x)
    torch.testing.assert_close(built(module, x)([x])[0].double(), exact(module, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.InstanceNorm1d(6), torch.randn(6, 9)),
        (nn.InstanceNorm2d(6), torch.randn(6, 9, 7)),  # which is no batch
        (Asks(lambda x, *_: torch.instance_norm(x, None, None, None, None, True, 0.1, 0.1, False)), torch.randn(3, 6)),
        (randomised(nn.InstanceNorm2d(6, track_running_stats=True)), torch.randn(2, 6, 9, 7)),
        (nn.InstanceNorm2d(6), torch.randn(2, 6, 9, 7, dtype=torch.float64)),
        (nn.InstanceNorm2d(6).bfloat16(), torch.randn(2, 6, 9, 7).bfloat16()),
    ],
)
def test_others_are_left_to_torch(module: nn.Module, x: Tensor) -> None:
    module = nn.Sequential(module)
    assert "aten::instance_norm" in calls(module, x)
    (result,) = Forms(symbolic_trace(module), [x])(x)
    assert torch.equal(result, module(x))


def test_of_a_single_image_of_halves_it_is_a_batch_norm() -> None:
    x = torch.randn(1, 6, 9, 7).bfloat16()
    found = calls(nn.Sequential(nn.InstanceNorm2d(6)).bfloat16(), x)
    assert "aten::batch_norm" in found
    assert "aten::instance_norm" not in found


RECTIFIED: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer": nn.ReLU(),
    "a layer that writes": nn.ReLU(inplace=True),
    "a function": F.relu,
    "a method": lambda x: x.relu(),
    "a function that writes": torch.relu_,
}


class Rectified(nn.Module):
    """A batch norm and a ReLU before a convolution, as in a DenseNet."""

    def __init__(self, relu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.relu, self.conv = randomised(nn.BatchNorm2d(6)), relu, randomised(nn.Conv2d(6, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(self.norm(x - 1)))


@pytest.mark.parametrize("name", RECTIFIED)
def test_the_relu_of_a_batch_norm_takes_its_memory(name: str) -> None:
    model, x = Rectified(RECTIFIED[name]), torch.randn(2, 6, 9, 7)
    assert {"aten::addcmul", "aten::clamp_min_"} <= calls(model, x)
    run, given = built(model, x), 3 * torch.randn_like(x)
    given[1, 2, 3, 4] = torch.nan
    before, expected = given.clone(), model(given)
    for _ in range(4):  # of which the last are those of the compiled program
        (found,) = run([given])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found.isnan().any()
    assert torch.equal(given.nan_to_num(), before.nan_to_num())


class ReadTwice(Rectified):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x - 1)
        return self.conv(F.relu(normed)) + normed[:, :4, 1:-1, 1:-1]


class ByItsBatch(Rectified):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(F.batch_norm(x - 1, None, None, self.norm.weight, training=True)))


class ByEachImage(Rectified):
    """With an instance norm, which looks much like a batch norm."""

    def __init__(self, relu: Callable[[Tensor], Tensor]) -> None:
        super().__init__(relu)
        self.norm = randomised(nn.InstanceNorm2d(6, track_running_stats=True))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (ReadTwice, torch.float32),
        (ByItsBatch, torch.float32),
        (ByEachImage, torch.float32),
        (Rectified, torch.bfloat16),
    ],
)
def test_another_relu_is_written_into_nothing(kind: type[Rectified], dtype: torch.dtype) -> None:
    model, x = kind(F.relu).to(dtype), torch.randn(2, 6, 9, 7).to(dtype)
    assert "aten::clamp_min_" not in calls(model, x)
    (found,) = built(model, x)([-x])
    expected = exact(model, -x)
    error, own = ((given.double() - expected).abs().max() for given in (found, model(-x)))
    assert error <= 2 * own + torch.finfo(dtype).eps


LAYER_NORMS: dict[str, nn.Module] = {
    "with weights": randomised(nn.LayerNorm(6, eps=0.01)),
    "with a weight": randomised(nn.LayerNorm(6, bias=False)),
    "bare": nn.LayerNorm(6, elementwise_affine=False),
    "a function": Asks(lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias)),
    "a function with a bias": Asks(lambda x, weight, bias: F.layer_norm(x, (6,), bias=bias)),
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_a_layer_norm_of_halves_has_weights_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With which oneDNN Graph compiles it; with weights in halves it does not."""
    monkeypatch.setattr(onednn_norms, "_FEW", {})
    module, x = copy.deepcopy(LAYER_NORMS[name]).bfloat16(), (5 * torch.randn(3, 4, 6) + 2).bfloat16()
    forms = Forms(symbolic_trace(module), [x])
    program = torch.jit.freeze(torch.jit.trace(forms.eval(), (x, *forms.beside), check_trace=False))
    (node,) = program.graph.findAllNodes("aten::layer_norm")
    weight, bias = list(node.inputs())[2:4]
    assert (weight.toIValue().dtype, bias.toIValue().dtype) == (torch.float32,) * 2
    (result,) = built(module, x)([-x])
    expected = exact(module, -x)
    error, own = ((given.double() - expected).abs().max() for given in (result, module(-x)))
    assert result.dtype is torch.bfloat16
    assert error <= 1.5 * own


@pytest.mark.parametrize(
    ("rows", "dtype", "by_torch"),
    [
        (4, torch.float32, True),
        (1 << 14, torch.float32, True),
        (1 << 15, torch.float32, False),
        (4, torch.bfloat16, True),
        (1 << 12, torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("name", LAYER_NORMS)
def test_a_layer_norm_of_few_elements_is_torchs(name: str, rows: int, dtype: torch.dtype, by_torch: bool) -> None:
    module, x = copy.deepcopy(LAYER_NORMS[name]).to(dtype), (5 * torch.randn(rows, 6) + 2).to(dtype)
    with torch.no_grad():
        (result,) = built(module, x)([-x])
        groups = str(torch.jit.last_executed_optimized_graph()).count("with prim::oneDNNFusionGroup")
    by_onednn = not by_torch and works(LINEAR, dtype)  # which has none of it where the processor has no halves
    assert groups == by_onednn
    expected = exact(module, -x)
    error, own = ((given.double() - expected).abs().max() for given in (result, module(-x)))
    assert result.dtype is dtype
    assert error <= 1.5 * own
