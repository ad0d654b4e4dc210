"""Regions that export keeps as graphs of their own are run by engines as part of the graph around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg
from helpers import randomise
from regraft.core.modules import graph_modules
from regraft.optimize.engines import onednn_graph, wanted
from regraft.optimize.engines.flat import Flat

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Regions(nn.Module):
    """A layer, a view and two results inside of regions, one of which is in another."""

    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.autocast = autocast

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            y = F.relu(self.inner(x.float())) * self.scale
            with torch.autocast("cpu", enabled=False):
                z = x.float().flatten(2).softmax(-1) + y.float().flatten(2)
        return self.last(y.float()), z.mean(1)


def captured(model: nn.Module) -> tuple[Flat, torch.fx.GraphModule]:
    gm = rg.trace(model, (X,))
    return Flat(gm, {"x": X}), gm


@torch.no_grad()
def test_regions_become_part_of_the_graph() -> None:
    model = randomise(Regions().eval())
    flat, gm = captured(model)
    inner = [node.target for node in gm.graph.nodes]
    assert any(name is torch.ops.higher_order.wrap_with_autocast for name in inner)
    flat.module.graph.lint()
    assert not [node for node in flat.module.graph.nodes if "wrap_with" in str(node.target)]
    assert [node.target for node in gm.graph.nodes] == inner  # what was captured is as it was
    for found, expected in zip(onednn_graph.build(flat)([X]), model(X), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_region_with_autocast_stays() -> None:
    flat, gm = captured(randomise(Regions(autocast=True).eval()))
    assert [node for node in flat.module.graph.nodes if "wrap_with_autocast" in str(node.target)]
    with pytest.raises(ValueError, match="graphs inside"):
        onednn_graph.build(flat)
    assert len(graph_modules(gm)) > 1


def test_regions_without_gradients() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = torch.sigmoid(self.first(x))
            return self.last(y * x)

    model = randomise(Frozen().eval())
    flat, _ = captured(model)
    assert not [node for node in flat.module.graph.nodes if "wrap_with" in str(node.target)]
    with torch.no_grad():
        torch.testing.assert_close(onednn_graph.build(flat)([X])[0], model(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["onednn", "onnxruntime", "openvino"])
def test_an_engine_runs_them_and_leaves_them_under_autocast(name: str) -> None:
    if wanted.missing_packages(name):
        pytest.skip(f"{name} is not installed")
    model = randomise(Regions().eval())
    result = rg.optimize(model, kwargs={"x": X}, engine=name, keep="all", seconds=0.01)
    assert result.graphs[0].engine.engine == name, result
    other = torch.randn_like(X)
    with torch.no_grad():
        for found, expected in zip(result.model(x=other), model(other), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            for found, expected in zip(result.model(x=other), model(other), strict=True):
                assert found.dtype is expected.dtype
                torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
