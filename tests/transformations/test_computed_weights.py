"""Weights that a graph computes, by weight norm, spectral norm or pruning, are those of their layers once folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import regraft as rg
from helpers import Wrap, assert_matches_float64, assert_same, check_applied, picture, randomise


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight + weight.transpose(0, 1)) / 2


def symmetric(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Standardized(nn.Conv2d):
    """As those of BiT and of NFNets are."""

    def __init__(self) -> None:
        super().__init__(6, 6, 3)
        self.gain = nn.Parameter(torch.rand(6, 1, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = (self.gain * 3).view(-1)
        weight = F.batch_norm(self.weight.reshape(1, 6, -1), None, None, gain, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")

MADE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", amount=0.5),
    "one's own": symmetric,
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 6), nn.BatchNorm1d, (5, 6)),
    "convolution": (lambda: nn.Conv2d(6, 6, 3), nn.BatchNorm2d, (2, 6, 7, 7)),
    "transposed": (lambda: nn.ConvTranspose1d(6, 6, 4, 2), nn.BatchNorm1d, (2, 6, 7)),
}


def normed(made: Callable[[nn.Module], nn.Module], layer: str) -> tuple[nn.Module, tuple[torch.Tensor]]:
    make, norm, shape = LAYERS[layer]
    with torch.no_grad():  # what a hook has made is no leaf, which cannot be copied
        model = nn.Sequential(made(make()), norm(6), nn.ReLU())
        model(torch.randn(shape))  # spectral norm finds its vectors
        randomise(model)
        model.eval()(torch.randn(shape))
    return model, (torch.randn(shape),)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", MADE)
def test_a_batch_norm_folds_into_a_layer_with_it(name: str, layer: str) -> None:
    model, inputs = normed(MADE[name], layer)
    gm = rg.trace(model, inputs)
    before = picture(gm)
    t = rg.compose(rg.RemoveDeadWork(), rg.FoldBatchNorm())
    gm = t(gm)
    assert len(gm.graph.nodes) == 4, str(gm.graph)  # one layer, and the ReLU
    with torch.no_grad():
        assert_matches_float64(model, gm, inputs)
    assert_same(before, picture(t(gm, reverse=True)))


@pytest.mark.parametrize("name", MADE)
def test_such_layers_merge(name: str) -> None:
    with torch.no_grad():
        model = Wrap(lambda m, x: m.a(x).sin() + m.b(x), a=MADE[name](nn.Linear(4, 4)), b=MADE[name](nn.Linear(4, 4)))
        model.eval()(torch.randn(3, 4))
    gm = rg.trace(model, (torch.randn(3, 4),))
    gm = rg.MergeLinears()(rg.RemoveDeadWork()(gm))
    assert [step.transformation for step in rg.history(gm) if step.applied] == ["RemoveDeadWork", "MergeLinears"]
    with torch.no_grad():
        assert_matches_float64(model, gm, (torch.randn(3, 4),))


@pytest.mark.parametrize("limit", [1 << 20, 100])
def test_a_batch_norm_folds_into_a_standardized_convolution(limit: int) -> None:
    model = randomise(nn.Sequential(Standardized(), nn.BatchNorm2d(6), nn.ReLU())).eval()
    inputs = (torch.randn(2, 6, 7, 7),)
    gm = rg.trace(model, inputs)
    gm = rg.compose(rg.RemoveDeadWork(largest_constant=limit), rg.FoldBatchNorm())(gm)
    assert len(gm.graph.nodes) == 4, str(gm.graph)
    assert_matches_float64(model, gm, inputs)


def test_what_keeps_statistics_is_no_constant() -> None:
    def running(m: Any, x: Any) -> Any:
        return F.linear(x, F.batch_norm(m.w, m.mean, m.var, training=True))

    statistics = {"mean": torch.zeros(4), "var": torch.ones(4)}
    model = Wrap(running, w=nn.Parameter(torch.randn(4, 4)), **statistics)
    gm = rg.RemoveDeadWork()(rg.trace(model, (torch.randn(3, 4),)))
    before = model.mean.clone()
    gm(torch.randn(3, 4))
    assert not torch.equal(model.mean, before)


def test_a_large_one_takes_the_place_of_what_it_is_made_of() -> None:
    model = Wrap(lambda m, x: m.l(x), l=parametrizations.weight_norm(nn.Linear(40, 40)))
    gm = check_applied(rg.RemoveDeadWork(largest_constant=100), model, (torch.randn(3, 40),), "trace")
    assert len(gm.graph.find_nodes(op="get_attr")) == 2


def test_a_large_one_that_is_made_of_less_is_refused() -> None:
    u, v = nn.Parameter(torch.randn(40, 2)), nn.Parameter(torch.randn(2, 40))
    gm = rg.trace(Wrap(lambda m, x: F.linear(x, m.u @ m.v), u=u, v=v), (torch.randn(3, 40),))
    rg.RemoveDeadWork(largest_constant=100)(gm)
    (step,) = rg.history(gm)
    assert ["6400 bytes" in refusal.reason for refusal in step.refused] == [True]


def test_a_large_one_that_is_a_view_is_not_copied() -> None:
    gm = rg.trace(Wrap(lambda m, x: F.linear(x, m.w.mT), w=nn.Parameter(torch.randn(40, 40))), (torch.randn(3, 40),))
    rg.RemoveDeadWork(largest_constant=100)(gm)
    assert not [node for node in gm.graph.nodes if "constant" in node.name]


USES: dict[str, Callable[[Any, Any], Any]] = {
    "read by more than layers": lambda m, x: F.linear(x, w := m.w * 2) + w.sum(),
    "what a layer works on": lambda m, x: F.linear(m.w * 2, x),
    "read by no layer": lambda m, x: x @ (m.w * 2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_one_that_is_more_than_a_weight_asks_for_gradients_where_they_are_recorded(use: Any) -> None:
    gm = rg.trace(Wrap(use, w=nn.Parameter(torch.randn(4, 4))), (torch.randn(3, 4),))
    nodes = rg.RemoveDeadWork()(gm).graph
    (constant,) = nodes.find_nodes(op="get_attr")
    assert [user.target for user in constant.users] == [torch.clone]


def read_by_a_node_each(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as one written by hand may be: whatever reads the weight has a node of its own for that."""
    (weight,) = gm.graph.find_nodes(op="get_attr")
    for user in list(weight.users)[1:]:
        with gm.graph.inserting_before(user):
            user.replace_input_with(weight, gm.graph.node_copy(weight))
    gm.recompile()
    return gm


@pytest.mark.parametrize("apart", [False, True])
def test_one_that_is_made_of_a_weight_twice(apart: bool) -> None:
    model = Wrap(lambda m, x: F.linear(x, m.w / m.w.norm()), w=nn.Parameter(torch.randn(4, 4)))
    gm = rg.trace(model, (torch.randn(3, 4),))
    gm = rg.RemoveDeadWork()(read_by_a_node_each(gm) if apart else gm)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]
    assert_matches_float64(model, gm, (torch.randn(3, 4),))


@pytest.mark.parametrize("apart", [False, True])
def test_one_that_is_trained_elsewhere_too_stays_one_parameter(apart: bool) -> None:
    model = Wrap(lambda m, x: F.linear(x, m.w.sin()) + F.linear(x, m.w), w=nn.Parameter(torch.randn(4, 4)))
    gm = rg.trace(model, (torch.randn(3, 4),))
    gm = read_by_a_node_each(gm) if apart else gm
    said = str(rg.RemoveDeadWork(largest_constant=0).explain(gm))
    rg.RemoveDeadWork()(gm)
    assert "must stay one parameter" in said
    assert [node for node in gm.graph.nodes if node.target is torch.sin]


def test_one_that_a_layer_trains_too_stays_one_parameter() -> None:
    model = Wrap(lambda m, x: m.l(x) + F.linear(x, m.l.weight.sin()), l=nn.Linear(4, 4))
    gm = rg.RemoveDeadWork()(rg.trace(model, (torch.randn(3, 4),)))
    (step,) = rg.history(gm)
    assert not step.applied
    assert ["must stay one parameter" in refusal.reason for refusal in step.refused] == [True]


def test_a_copy_of_a_buffer_is_a_constant_as_well() -> None:
    model = Wrap(lambda m, x: x + m.b.clone().sin(), b=torch.randn(4))
    gm = check_applied(rg.RemoveDeadWork(), model, (torch.randn(3, 4),), "trace", sites=2)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]


def test_a_copy_by_keyword() -> None:
    model = Wrap(lambda m, x: x + torch.clone(input=m.w) * 2, w=nn.Parameter(torch.randn(4)))
    gm = torch.fx.symbolic_trace(model)
    rg.RemoveDeadWork()(gm)
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))


def test_a_copy_of_a_buffer_that_is_written_to_is_none() -> None:
    def running(m: Any, x: Any) -> Any:
        total = m.b.clone()
        total.add_(x.sum(0))
        return total * 2

    model = Wrap(running, b=torch.randn(4))
    gm = rg.RemoveDeadWork()(rg.trace(model, (torch.randn(3, 4),)))
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(gm(x), model(x))
