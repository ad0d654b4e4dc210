"""ReplaceActivation: modules, functions, and the settings that tell them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap, assert_same, capture, check_refused, picture, randomise

X = (torch.randn(4, 6) * 3,)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.slope


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "gelu module": (lambda m, x: m.gelu(x), nn.GELU, nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "gelu function": (lambda m, x: F.gelu(x), nn.GELU, nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "named by its function": (lambda m, x: m.gelu(x), F.gelu, F.relu, F.relu),
    "silu": (lambda m, x: F.silu(x), nn.SiLU, nn.Hardswish, F.hardswish),
    "sigmoid method": (lambda m, x: x.sigmoid(), torch.sigmoid, F.hardsigmoid, F.hardsigmoid),
    "by a function of one's own": (lambda m, x: m.gelu(x), nn.GELU, halve, halve),
    "by a module of one's own": (lambda m, x: m.gelu(x), nn.GELU, Mine, lambda x: x * 0.3),
    "with its settings": (lambda m, x: m.leaky(x), nn.LeakyReLU(0.2), nn.ReLU, F.relu),
}


@pytest.mark.parametrize("mapping", ["gelu", 3, {nn.GELU: "relu"}, {"gelu": nn.ReLU}, {nn.GELU: None}])
def test_a_mapping_of_something_else_is_refused(mapping: Any) -> None:
    with pytest.raises(TypeError, match=r"ReplaceActivation\(\{torch.nn.GELU: torch.nn.ReLU\}\)"):
        rg.ReplaceActivation(mapping)


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", CASES)
def test_applied(name: str, form: str) -> None:
    function, old, new, expected = CASES[name]
    model = Wrap(lambda m, x: function(m, x) + 1, gelu=nn.GELU(), leaky=nn.LeakyReLU(0.2)).eval()
    caller, gm = picture(model), capture(model, X, form)
    rule, before = rg.ReplaceActivation({old: new}), picture(gm)
    assert rule.explain(gm).applied == 1
    rule(gm)
    torch.testing.assert_close(gm(*X), expected(X[0]) + 1)
    assert rule.get_transformed_nodes(gm)
    rule(gm)
    assert not rg.history(gm)[-1].applied
    assert_same(caller, picture(model))
    rule(gm, reverse=True)
    assert_same(before, picture(gm))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (nn.LeakyReLU(0.2), nn.ReLU, "LeakyReLU became ReLU"),
        (nn.LeakyReLU(0.2), nn.ELU(0.5), "LeakyReLU became ELU"),
        (F.gelu, F.relu, "gelu became relu"),
        (nn.GELU, halve, "GELU became halve"),
    ],
)
def test_the_report_names_both_activations(old: Any, new: Any, sentence: str) -> None:
    gm = capture(Wrap(lambda m, x: m.gelu(m.leaky(x)), gelu=nn.GELU(), leaky=nn.LeakyReLU(0.2)), X, "fx")
    rg.ReplaceActivation({old: new})(gm)
    assert [site.sentence for site in rg.history(gm)[-1].applied] == [sentence]


def test_a_module_whose_place_a_function_takes_is_gone() -> None:
    gm = capture(Wrap(lambda m, x: m.gelu(x), gelu=nn.GELU()), X, "fx")
    assert not list(rg.ReplaceActivation({nn.GELU: F.relu})(gm).children())


def test_a_function_without_a_module_stands_for_itself_alone() -> None:
    gm = rg.ReplaceActivation({torch.sin: torch.cos})(capture(Wrap(lambda m, x: torch.sin(x) + torch.tan(x)), X, "fx"))
    torch.testing.assert_close(gm(*X), X[0].cos() + X[0].tan())


def test_a_class_that_has_no_other_spelling_stands_for_itself_alone() -> None:
    net = nn.Sequential(nn.Mish(), nn.Softsign(), nn.Linear(6, 6))
    gm = rg.ReplaceActivation({nn.Mish: nn.ReLU})(capture(net, X, "fx"))
    assert [type(module) for module in gm.children()] == [nn.ReLU, nn.Softsign, nn.Linear]


def test_each_call_of_a_shared_module() -> None:
    gm = capture(Wrap(lambda m, x: m.act(x) + m.act(x + 1), act=nn.SiLU()).eval(), X, "fx")
    rg.ReplaceActivation()(gm)
    assert len(rg.history(gm)[-1].applied) == 2
    torch.testing.assert_close(gm(*X), F.hardswish(X[0]) + F.hardswish(X[0] + 1))
    rg.undo(gm)
    torch.testing.assert_close(gm(*X), F.silu(X[0]) + F.silu(X[0] + 1))


def test_each_site_gets_parameters_of_its_own() -> None:
    gm = capture(Wrap(lambda m, x: m.b(m.a(x)), a=nn.SiLU(), b=nn.SiLU()).eval(), X, "fx")
    rg.ReplaceActivation({nn.SiLU: nn.PReLU()})(gm)
    assert gm.get_submodule("a").weight is not gm.get_submodule("b").weight


@pytest.mark.parametrize("module", [nn.GELU("tanh"), nn.LeakyReLU(0.1), nn.ReLU()])
def test_other_settings_and_other_activations_stay(module: nn.Module) -> None:
    gm = capture(Wrap(lambda m, x: m.act(x), act=module).eval(), X, "fx")
    rg.ReplaceActivation({nn.GELU: nn.ReLU, nn.LeakyReLU: nn.ReLU})(gm)
    assert not rg.history(gm)[-1].applied


def test_hooks_are_refused() -> None:
    act = nn.SiLU()
    act.register_forward_hook(lambda module, args, result: result * 2)
    check_refused(rg.ReplaceActivation(), Wrap(lambda m, x: m.act(x), act=act), X, "fx", "hooks")


@pytest.mark.parametrize("function", [lambda m, x: F.silu(x, inplace=True) + x, lambda m, x: m.act(x) + x])
def test_in_place_is_refused(function: Any) -> None:
    check_refused(rg.ReplaceActivation(), Wrap(function, act=nn.SiLU(inplace=True)), X, "fx", "in place")


def test_a_function_of_a_number_is_refused() -> None:
    model = Wrap(lambda m, x: torch.float_power(2, x))
    check_refused(rg.ReplaceActivation({torch.float_power: F.relu}), model, X, "fx", "is not called on a tensor")


def test_in_a_model() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.SiLU())
    model = randomise(net).eval()
    gm = rg.ReplaceActivation()(rg.trace(model, X))
    assert len(rg.history(gm)[-1].applied) == 2
    assert not rg.ReplaceActivation().preserves_computation
    assert float((gm(*X) - model(*X)).abs().max()) < 0.3


@pytest.mark.parametrize(
    ("old", "new", "x"),
    [(nn.ReLU, nn.GELU, torch.arange(-3, 4)), (nn.Tanh, nn.Hardtanh, torch.randn(7, dtype=torch.complex64))],
)
def test_numbers_that_not_every_activation_takes_are_refused(old: Any, new: Any, x: torch.Tensor) -> None:
    model = Wrap(lambda m, x: m.act(x), act=old())
    check_refused(rg.ReplaceActivation({old: new}), model, (x,), "trace", "not floating point")


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ("relu", "mapping='relu', but takes a dictionary"),
        ([(nn.GELU, nn.ReLU)], "takes a dictionary"),
        ({"relu": "gelu"}, "mapping has 'relu'"),
        ({nn.ReLU: "gelu"}, "mapping has 'gelu'"),
        ({nn.ReLU: 3}, "mapping has 3"),
        ({nn.ReLU: int}, "mapping has <class 'int'>"),
        ({nn.ReLU: nn.Linear}, "the class Linear, which needs arguments"),
    ],
    ids=str,
)
def test_wrong_mappings(mapping: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        rg.ReplaceActivation(mapping)
