"""HoistActivation: over what an activation moves, to which layers, and where it has to stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, check_applied, check_refused, randomise, run

RULE = rg.HoistActivation()
IMAGE = (torch.randn(2, 3, 6, 5),)

MOVES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda y: y.flatten(2),
    "tokens": lambda y: torch.flatten(y, 2).transpose(1, 2),
    "view": lambda y: y.view(2, 4, -1),
    "reshape and permute": lambda y: y.permute(0, 2, 3, 1).reshape(2, 30, 4),
    "unsqueeze": lambda y: y.unsqueeze(1).transpose(1, 2),
    "sizes of its own": lambda y: y.reshape(y.shape[0], -1),
}
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky relu": lambda x: F.leaky_relu(x, 0.3),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.2, 0.3),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
}


def net(move: Callable[[Any], Any], activation: Callable[[Any], Any], **parts: nn.Module) -> nn.Module:
    parts = parts or {"layer": nn.Conv2d(3, 4, 3, padding=1)}
    return randomise(Wrap(lambda m, x: activation(move(m.layer(x))) * 1.5, **parts))


def hoisted(gm: torch.fx.GraphModule) -> bool:
    """Whether what follows the layer is no move."""
    (layer,) = gm.graph.find_nodes(op="call_module", target="layer")
    names = [str(user.target) for user in layer.users]
    return not any(word in name for name in names for word in ("view", "flatten", "reshape", "permute"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("move", MOVES)
def test_moves(move: str, form: str) -> None:
    model = net(MOVES[move], F.gelu)
    gm = check_applied(RULE, model, IMAGE, form)
    (found,), (wanted,) = run(gm, IMAGE), run(model, IMAGE)
    steps = [(ours, theirs) for ours, theirs, size in zip(found.stride(), wanted.stride(), wanted.shape) if size > 1]
    assert all(ours == theirs for ours, theirs in steps)
    assert hoisted(gm)
    if form == "trace":
        assert gm.graph.find_nodes(op="call_module")[0].next.meta["val"].shape == (2, 4, 6, 5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    assert hoisted(check_applied(RULE, net(MOVES["tokens"], ACTIVATIONS[name]), IMAGE, "trace"))


@pytest.mark.parametrize("form", FORMS)
def test_activations_that_are_modules(form: str) -> None:
    model = randomise(
        Wrap(lambda m, x: m.act(m.layer(x).flatten(2)), layer=nn.Conv2d(3, 4, 3), act=nn.LeakyReLU(0.4)),
    )
    gm = check_applied(RULE, model, IMAGE, form)
    assert [str(node.target) for node in gm.graph.nodes][1:3] == ["layer", "act"]


@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(6, 4, 1), nn.ConvTranspose1d(6, 4, 2), nn.Linear(5, 4)],
)
def test_layers(layer: nn.Module) -> None:
    model = randomise(Wrap(lambda m, x: m.layer(x).transpose(1, 2).relu(), layer=layer))
    assert check_applied(RULE, model, (torch.randn(2, 6, 5),), "trace")


@pytest.mark.parametrize("product", [lambda x: x @ x.mT, lambda x: F.scaled_dot_product_attention(x, x, x)])
def test_products(product: Callable[[Any], Any]) -> None:
    check_applied(RULE, Wrap(lambda m, x: F.hardswish(product(x).transpose(1, 2).flatten(2))), IMAGE, "trace")


def test_packed_layers_take_it() -> None:
    gm = rg.trace(net(MOVES["tokens"], F.gelu), IMAGE)
    rg.PrepackForCpu()(RULE(gm))
    assert not [node for node in gm.graph.nodes if "gelu" in str(node.target)]


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, result: result * 2)
    return module


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: (lambda y: y.relu() + y)(m.layer(x).flatten(2)), "'flatten' is read elsewhere"),
        (lambda m, x: (lambda y: y.flatten(2).relu() + y.sum())(m.layer(x)), "'layer' is read elsewhere"),
        (lambda m, x: x.flatten(2).relu() + m.layer(x).sum(), "'x' is no layer"),
        (lambda m, x: (m.layer(x) + 1).flatten(2).relu(), "'add' is no layer"),
        (lambda m, x: m.layer(x).flatten(2).relu_(), "works in place"),
        (lambda m, x: m.act(m.layer(x).flatten(2)), "hooks"),
        (lambda m, x: m.layer(x).view(torch.int32).flatten(2).relu(), "is no layer"),
    ],
)
def test_where_it_stays(function: Callable[[Any, Any], Any], words: str) -> None:
    model = randomise(Wrap(function, layer=nn.Conv2d(3, 4, 3), act=hooked(nn.GELU())))
    check_refused(RULE, model, IMAGE, "fx", words)


def test_another_dtype() -> None:
    whole = (torch.randint(-5, 5, (2, 3, 6, 6)),)
    check_refused(RULE, Wrap(lambda m, x: (x @ x).flatten(2).sigmoid()), whole, "trace", "another dtype")


def test_what_is_not_moved_is_no_site() -> None:
    gm = RULE(rg.trace(net(lambda y: y, F.gelu), IMAGE))
    assert not rg.history(gm)[-1].applied
    assert not rg.history(gm)[-1].refused
