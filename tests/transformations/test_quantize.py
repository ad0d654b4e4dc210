"""Quantize: what is quantized, what is refused, and that the weights stay what they are."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
import regraft.testing
from helpers import Wrap, check_refused, copies, randomise, run

pytest.importorskip("torchao")

X = (torch.randn(6, 5, 16),)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))
    return randomise(layers).eval().to(dtype)


def error(model: nn.Module, gm: nn.Module, inputs: tuple[Any, ...]) -> float:
    (expected,), (found,) = run(model, inputs), run(gm, inputs)
    assert found.dtype is expected.dtype
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", ["int8", "int8-weights"])
@pytest.mark.parametrize("form", ["fx", "trace"])
def test_layers_are_quantized_and_taken_back(config: str, dtype: torch.dtype, form: str) -> None:
    model, inputs = net(dtype), (X[0].to(dtype),)
    gm = rg.symbolic_trace(model) if form == "fx" else rg.trace(model, inputs)
    rg.testing.assert_round_trip(rg.Quantize(config), gm, inputs)
    rg.Quantize(config)(gm)
    done = {"int8": "weights and inputs quantized", "int8-weights": "weights quantized"}[config]
    assert [site.sentence for site in rg.history(gm)[-1].applied] == [done] * 2
    assert 1e-4 < error(model, gm, inputs) < 0.05  # it is another computation, and a near one
    assert gm.get_submodule("0").weight is model[0].weight
    assert repr(gm.get_submodule("0")).endswith(f"(in_features=16, out_features=24, bias=True, config={config})")
    assert list(gm.state_dict()) == list(model.state_dict())
    for other in copies(gm).values():
        assert error(gm, other, inputs) == 0
    rg.undo(gm)
    assert error(model, gm, inputs) == 0


def test_a_config_of_torchao() -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    config = Int8WeightOnlyConfig(set_inductor_config=False)
    model = net()
    gm = rg.Quantize(config)(rg.trace(model, X))
    assert error(rg.Quantize("int8-weights")(rg.trace(model, X)), gm, X) == 0
    assert "Int8WeightOnlyConfig" in repr(gm.get_submodule("0"))
    assert rg.Quantize(config).signature == rg.Quantize(copy.deepcopy(config)).signature != rg.Quantize().signature
    rg.testing.assert_round_trip(rg.Quantize(config), model, X)


def test_no_setting_of_the_process_changes() -> None:
    import torch._inductor.config as inductor

    before = inductor.save_config()
    run(rg.Quantize()(rg.trace(net(), X)), X)
    assert inductor.save_config() == before


def test_a_changed_weight_is_quantized_again() -> None:
    model = net()
    gm = rg.Quantize()(rg.trace(model, X))
    run(gm, X)
    with torch.no_grad():
        model[0].weight.mul_(-2)
    assert error(model, gm, X) < 0.05
    gm.load_state_dict(net().state_dict())
    assert error(net(), gm, X) < 0.05


def test_gradients_reach_the_input_and_training_and_autocast_run_the_plain_layer() -> None:
    model = net()
    gm = rg.Quantize("int8-weights")(rg.trace(model, X))
    x = X[0].clone().requires_grad_()
    with torch.inference_mode():
        gm(X[0])  # what is packed here serves there
    gm(x).sum().backward()
    assert x.grad is not None
    assert gm.get_submodule("0").weight.grad is not None, "in eval mode too a weight that wants a gradient gets it"
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(gm(*X), model(*X))
    gm.train()
    assert error(model.train(), gm, X) == 0
    gm(*X).sum().backward()
    assert model[0].weight.grad is not None


def test_it_can_be_captured_and_exported_again() -> None:
    model = net()
    gm = rg.Quantize()(rg.trace(model, X))
    assert error(gm, rg.trace(gm, X), X) == 0
    assert error(model, torch.export.export(gm, X).module(), X) == 0  # in which the layers are plain


def test_layers_that_are_to_be_kept() -> None:
    gm = rg.Quantize(keep=["2"])(rg.trace(net(), X))
    assert type(gm.get_submodule("2")) is nn.Linear
    assert rg.history(gm)[-1].refused[0].reason == "2 stays as it is, by keep='2'"


def test_a_weight_whose_changes_cannot_be_seen_is_not_quantized() -> None:
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(24, 16))
        hidden = rg.Quantize()(rg.symbolic_trace(nn.Sequential(nn.Linear(16, 24)).eval()))
    reason = "0.weight was made in inference mode, where torch does not count what is written to it"
    assert [refusal.reason for refusal in rg.history(hidden)[-1].refused] == [reason]
    gm = rg.Quantize()(rg.symbolic_trace(net()))
    layer = gm.get_submodule("0")
    layer.weight = weight
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(layer(*X), F.linear(*X, weight, layer.bias))
            weight.mul_(2)


def _hooked() -> nn.Linear:
    layer = nn.Linear(16, 4)
    layer.register_forward_hook(lambda module, args, result: result * 2)
    return layer


SHARED = nn.Linear(16, 16)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "hooks": (lambda m, x: m.l(x), {"l": _hooked()}, "hooks"),
    "a function": (lambda m, x: F.linear(x, m.w), {"w": nn.Parameter(torch.rand(4, 16))}, "function call"),
    "called twice": (lambda m, x: m.l(m.l(x)), {"l": SHARED}, "called 2 times"),
    "tied": (lambda m, x: m.l(x), {"l": nn.Linear(16, 16), "e": nn.Linear(16, 16)}, "tied"),
    "another dtype": (lambda m, x: m.l(x.double()), {"l": nn.Linear(16, 4).double()}, "float64"),
    "empty": (lambda m, x: m.l(x), {"l": nn.utils.skip_init(nn.Linear, 16, 0)}, "l has an empty weight"),
    "training": (lambda m, x: m.l(x), {"l": nn.Linear(16, 4)}, "training mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, parts, word = REFUSED[name]
    model = Wrap(function, **parts).train(name == "training")
    if name == "tied":
        model.e.weight = model.l.weight
    check_refused(
        rg.Quantize(), model, X, "trace" if name == "tied" else "fx", word, sites=2 if name == "called twice" else 1
    )


def test_arguments_that_are_wrong() -> None:
    with pytest.raises(ValueError, match=r"use 'int8' or 'int8-weights', as in Quantize\('int8'\)"):
        rg.Quantize("int4")
    with pytest.raises(TypeError, match=r"Quantize\(keep=\['2'\]\)"):
        rg.Quantize(keep="2")
    for keep in (2, [2], None):
        with pytest.raises(TypeError, match=r"takes names of modules: Quantize\(keep="):
            rg.Quantize(keep=keep)
    assert rg.Quantize(keep=(str(i) for i in range(2))).keep == ("0", "1")
    for config in (3, None, torch.int8, nn.Linear):
        with pytest.raises(TypeError, match=r"neither a name nor a configuration of torchao: Quantize\('int8'\)"):
            rg.Quantize(config)


def test_without_torchao_the_error_says_how_to_get_it(monkeypatch) -> None:
    gm = rg.trace(net(), X)
    code = gm.code
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    with pytest.raises(ImportError, match=r"pip install 'regraft\[torchao\]'"):
        rg.Quantize()(gm)
    assert gm.code == code
    assert rg.history(gm) == ()
