"""A graph in half precision runs in float32 where the processor has no instructions for halves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap, assert_matches_float64, randomise
from regraft.core.graph_module import adopt
from regraft.optimize.engines import in_float32 as wider
from regraft.optimize.engines import onednn_graph
from regraft.optimize.engines.flat import Flat
from regraft.verify.precise import InPrecision, in_precision

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A half precision, on a processor without instructions for it."""
    lacking = SimpleNamespace(LINEAR=wider.mkldnn.LINEAR, computed_in=lambda kind, dtype: torch.float32)
    monkeypatch.setattr(wider, "mkldnn", lacking)
    return request.param


def network(half: torch.dtype) -> nn.Module:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, int]:
        y = self.norm(F.gelu(self.a(x)).float()).to(half)
        y = (y + self.b(y).to(dtype=half, copy=True) * self.scale + torch.ones(9, dtype=half) + self.wide).to(half)
        return self.c(y).softmax(-1), y.bfloat16().half().float().sum(), 7

    layers = {"a": nn.Linear(6, 9), "b": nn.Linear(9, 9, bias=False), "c": nn.Linear(9, 5)}
    model = randomise(Wrap(forward, **layers)).to(half)
    model.norm = randomise(nn.LayerNorm(9))
    model.register_buffer("scale", torch.randn(9).to(half))
    model.register_buffer("wide", torch.randn(9))
    return model


class Types(torch.fx.Interpreter):
    """Runs a graph and notes the types of its tensors."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: set[torch.dtype] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        self.found.update({result.dtype} if isinstance(result, Tensor) else ())
        return result


def test_the_copy_computes_in_float32_and_the_graph_stays(half: torch.dtype) -> None:
    model, x = network(half), torch.randn(4, 6)
    gm = symbolic_trace(model)
    before = {name: (tensor, tensor.clone()) for name, tensor in gm.state_dict(keep_vars=True).items()}
    code = gm.code
    copied = wider.in_float32(gm)
    types = Types(copied)
    found = types.run(x)
    assert types.found == {torch.float32}

    a, b, c = (model.get_submodule(name).weight.float() for name in "abc")
    y = model.norm(F.gelu(F.linear(x, a, model.a.bias.float())))
    y = y + F.linear(y, b) * model.scale.float() + 1 + model.wide
    torch.testing.assert_close(found[0], F.linear(y, c, model.c.bias.float()).softmax(-1))
    torch.testing.assert_close(found[1:], (y.sum(), 7))

    assert gm.code == code
    for name, tensor in gm.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert tensor.dtype is (torch.float32 if name.startswith(("norm", "wide")) else half)
    shared = copied.state_dict(keep_vars=True)
    assert shared["wide"] is gm.wide, "what is in float32 is not copied"
    assert shared["norm.weight"] is gm.norm.weight
    assert shared["a.weight"].requires_grad


def test_a_constant_that_is_neither_a_parameter_nor_a_buffer(half: torch.dtype) -> None:
    root = nn.Module()
    root.constant = torch.randn(3).to(half)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.mul, (x, graph.get_attr("constant"))))
    gm = torch.fx.GraphModule(root, graph)
    del gm.constant  # torch.fx has made a buffer of it
    gm.constant = root.constant
    copied = wider.in_float32(adopt(gm))
    assert copied.constant.dtype is torch.float32
    torch.testing.assert_close(copied(torch.ones(3)), root.constant.float(), rtol=0, atol=0)
    assert gm.constant.dtype is half


def test_a_program_in_float32_gives_what_the_model_gives(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given_forms = network(half), []

    class Seen(onednn_graph.Forms):
        def __init__(self, gm: torch.fx.GraphModule, sample: Any, images: bool = True) -> None:
            super().__init__(gm, sample, images)
            given_forms.extend([*gm.parameters(), *gm.buffers(), *sample])

    monkeypatch.setattr(onednn_graph, "Forms", Seen)
    x = torch.randn(4, 6).to(half)
    flat = Flat(rg.trace(model, (x,)), {"x": x})
    run = onednn_graph.build(flat)
    assert {tensor.dtype for tensor in given_forms} == {torch.float32}
    for given in (x, -3 * x, x.t().contiguous().t()):
        with InPrecision(torch.float64):
            exact = in_precision(model, torch.float64)(given.double())
        expected, found = model(given), flat.give(run([given]))
        assert [getattr(one, "dtype", one) for one in found] == [half, torch.float32, 7]
        for ours, theirs, true in zip(found[:2], expected[:2], exact[:2], strict=True):
            rounding = torch.finfo(half).eps / 2 * true.norm()
            assert (ours.double() - true).norm() <= max((theirs.double() - true).norm(), rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_in_no_half_precision_stays(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 3).to(dtype)
    assert not wider.pays_in_float32(model, [torch.ones(3, dtype=dtype), torch.ones(3, dtype=torch.int64)])


@pytest.mark.parametrize("dtype", HALVES)
def test_where_a_half_is_known_it_stays(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    able = SimpleNamespace(LINEAR=wider.mkldnn.LINEAR, computed_in=lambda kind, dtype: dtype)
    monkeypatch.setattr(wider, "mkldnn", able)
    assert not wider.pays_in_float32(nn.Linear(3, 3).to(dtype), [torch.ones(3, dtype=dtype)])


def test_another_device_has_instructions_of_its_own(half: torch.dtype) -> None:
    elsewhere = nn.Linear(3, 3, device="meta").to(half)
    assert not wider.pays_in_float32(elsewhere, [torch.ones(3, dtype=half, device="meta")])


def test_one_tensor_in_half_precision_is_enough(half: torch.dtype) -> None:
    plain, x = nn.Linear(3, 3), torch.ones(3)
    assert wider.pays_in_float32(plain, [x, x.to(half)])
    assert wider.pays_in_float32(plain.to(half), [])
    buffered = nn.BatchNorm1d(3, affine=False).to(half)
    assert wider.pays_in_float32(buffered, [])


def test_a_model_in_half_precision_runs_in_float32(half: torch.dtype) -> None:
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))).to(half).eval()
    x = torch.randn(2, 3, 9, 8).to(half)
    result = rg.optimize(model, (x,), keep="all", engine="onednn", seconds=0.01)
    assert result.graphs[0].engine.engine == "onednn"
    for size in [(2, 3, 9, 8), (1, 3, 12, 7)]:
        assert_matches_float64(model, result.model, (torch.randn(size).to(half),), slack=6)
