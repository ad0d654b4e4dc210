"""What an author of a rewrite gets wrong is said at once, with what would have worked, and nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, assert_same, capture, picture, randomise
from regraft.core.vocabulary import BATCH_NORM, LINEAR, MULTIPLY, read

X = torch.randn(2, 4)


def net() -> nn.Module:
    return randomise(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((nn.ReLU,), r"and got <class .*ReLU'>; as in Calls\(RELU\)"),
        ((torch.relu,), r"Calls\(RELU\)"),
        ((nn.ReLU(),), r"Calls\(RELU\)"),
        (("relu",), r"Calls\(RELU\)"),
        ((LINEAR, nn.ReLU), r"Calls\(LINEAR, RELU\)"),
        ((nn.MaxPool2d,), "regraft.core.vocabulary"),
        ((), "got none"),
    ],
)
def test_what_is_no_operation(given: tuple[object, ...], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        rg.Calls(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize("modules", [nn.BatchNorm1d, [nn.BatchNorm1d], ("BatchNorm1d",)])
def test_modules_that_are_no_tuple_of_classes(modules: object) -> None:
    with pytest.raises(TypeError, match=r"modules=\(torch.nn.BatchNorm1d,\)"):
        rg.Calls(BATCH_NORM, modules=modules)  # type: ignore[arg-type]


def test_siblings_of_no_operation() -> None:
    for given in ("x", nn.Linear):
        with pytest.raises(TypeError, match=r"Siblings takes operations .*Siblings\(LINEAR\)"):
            rg.Siblings(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "shown"), [(MULTIPLY, "MULTIPLY"), (rg.Calls, "LINEAR"), ("linear", "LINEAR")])
def test_a_class_with_what_is_no_pattern(given: object, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"Wrong has .* as its pattern; .*pattern = regraft.Calls\({shown}\)"):
        type("Wrong", (rg.Rewrite,), {"pattern": given})


class Says(rg.Rewrite):
    """Takes a linear layer out, and then does what it is made with."""

    pattern = rg.Calls(LINEAR)

    def __init__(self, then):
        self.then = then

    def rewrite(self, match, edit, facts):
        edit.redirect(match.call.node, match.call.input)
        edit.erase(match.call.node)
        return self.then(match.call)


class WithoutAPattern(Says):
    @property
    def pattern(self):
        return None


class Unset(rg.Rewrite):
    def rewrite(self, match, edit, facts):
        return "nothing"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        (Unset(), TypeError, r"Unset has no pattern; .*pattern = regraft.Calls\(LINEAR\)"),
        (WithoutAPattern(str), TypeError, "WithoutAPattern has no pattern"),
        (Says(lambda call: None), TypeError, "Says.rewrite returned NoneType.*end it with `return .*require"),
        (Says(lambda call: True), TypeError, "Says.rewrite returned bool"),
        (Says(lambda call: rg.require(False)), TypeError, r"got False; .*require\(that\(condition, "),
        (Says(lambda call: rg.require(None, True)), TypeError, "got True"),
        (Says(lambda call: call["nothere"]), KeyError, "no operation has .* nothere; linear has input, weight"),
        (Says(lambda call: call.weight("wait")), KeyError, "no operation has an argument wait"),
    ],
)
def test_a_rule_that_goes_wrong(rule: rg.Rewrite, error: type[Exception], says: str, form: str) -> None:
    gm = capture(net(), (X,), form)
    before = picture(gm)
    for run in (rule, rule.explain, rg.compose(rg.FuseBiasInLinear(), rule)):
        with pytest.raises(error, match=says):
            run(gm)
        assert_same(before, picture(gm))
    assert rg.history(gm) == ()


def test_an_argument_that_only_other_operations_have_is_none() -> None:
    gm = capture(net(), (X,), "fx")
    relu, linear = (read(node, gm) for node in [*gm.graph.nodes][2:0:-1])
    assert relu is not None
    assert linear is not None
    assert relu["rounding_mode"] is None
    assert relu.weight("bias") is None
    assert linear["bias"] is linear.weight("bias").tensor
