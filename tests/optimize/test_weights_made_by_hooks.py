"""Weight norm, spectral norm and pruning by hooks: the graph computes what they make, and its drop-in runs on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import regraft as rg
from regraft.dropin import grafts_of
from regraft.optimize import optimize


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=0.5)


def pruned_twice(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(prune.random_unstructured(layer, "weight", amount=0.3), "weight", amount=0.3)


def both_pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(pruned(layer), "bias", amount=0.5)


HOOKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": weight_norm,
    "weight norm of the whole": lambda layer: weight_norm(layer, dim=None),
    "spectral norm": spectral_norm,
    "pruned": pruned,
    "pruned twice": pruned_twice,
    "weight and bias pruned": both_pruned,
}


class Net(nn.Module):
    def __init__(self, hooked: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = hooked(nn.Conv1d(4, 8, 3, padding=1)), hooked(nn.ConvTranspose1d(8, 6, 4, 2))
        self.norm, self.last = nn.BatchNorm1d(6), hooked(nn.Linear(6, 5))
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.second(torch.relu(self.first(x))))
        return self.last(y.mT) + self.last(y.mT.relu())


def net(name: str) -> Any:
    with torch.no_grad():
        model = Net(HOOKS[name])
        model(torch.randn(1, 4, 10))  # spectral norm finds its vectors
    return model.eval()


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """In float64; what the hooks last made is no leaf, which deepcopy refuses."""
    with torch.no_grad():
        model(x)
        return copy.deepcopy(model).double()(x.double())


@pytest.mark.parametrize("keep", ["all", "measured"])
@pytest.mark.parametrize("engine", ["eager", "onednn"])
@pytest.mark.parametrize("name", HOOKS)
def test_the_drop_in_runs_on_its_graph(name: str, engine: str, keep: str) -> None:
    model = net(name)
    result = optimize(model, (torch.randn(2, 4, 10),), engine=engine, keep=keep, seconds=0.01)
    if keep == "measured" and not result.graphs[0].used:
        return  # it was not faster here
    calls = grafts_of(result.model).calls
    before = calls["forward"]
    with torch.no_grad():
        for batch in (2, 2, 3):
            x = torch.randn(batch, 4, 10)
            true, own = exact(model, x), model(x)
            error, bound = ((y.double() - true).abs().max() for y in (result.model(x), own))
            assert error <= 4 * bound + 1e-6
    assert calls["forward"] == before + 3


@pytest.mark.parametrize("name", HOOKS)
def test_a_call_of_the_original_does_not_end_it(name: str) -> None:
    model = net(name)
    served = optimize(model, (torch.randn(2, 4, 10),), keep="all", seconds=0.01).model
    x = torch.randn(2, 4, 10)
    served(x).sum().backward()  # which the original runs, and its hooks make weights
    before = grafts_of(served).calls["forward"]
    with torch.no_grad():
        torch.testing.assert_close(served(x), model(x), rtol=1e-5, atol=1e-5)
    assert grafts_of(served).calls["forward"] == before + 1


@pytest.mark.parametrize("name", HOOKS)
def test_they_are_nothing_that_the_model_leaves_behind(name: str) -> None:
    result = optimize(net(name), (torch.randn(2, 4, 10),), keep="all", seconds=0.01)
    assert result.notes == ()
    assert result.graphs[0].sets == ()
    assert isinstance(result.graph_module(torch.randn(2, 4, 10)), Tensor)


def test_what_a_forward_sets_beside_them_is_left_behind() -> None:
    class Noting(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.first.seen = x.mean()
            return super().forward(x)

    with torch.no_grad():
        model = Noting(weight_norm).eval()
        result = optimize(model, (torch.randn(2, 4, 10),), keep="all", seconds=0.01)
        result.model(x := torch.randn(2, 4, 10))
    assert result.graphs[0].sets == ("first.seen",)
    assert [note.partition(" as it runs")[0] for note in result.notes] == ["the model sets first.seen"]
    torch.testing.assert_close(result.model.first.seen, x.mean())


def test_what_they_are_made_of_is_watched() -> None:
    model = net("weight norm")
    served = optimize(model, (torch.randn(2, 4, 10),), keep="all", seconds=0.01).model
    x = torch.randn(2, 4, 10)
    with torch.no_grad():
        served(x)
        model.first.weight_g.mul_(2)
        before = grafts_of(served).calls["forward"]
        torch.testing.assert_close(served(x), model(x))
    assert grafts_of(served).calls["forward"] == before


@pytest.mark.parametrize("name", HOOKS)
def test_a_graph_follows_them(name: str) -> None:
    model = net(name)
    gm = rg.trace(model, (torch.randn(2, 4, 10),), dynamic_shapes="auto")
    assert "first" not in [node.target for node in gm.graph.find_nodes(op="call_module")]
    assert gm.state_dict().keys() == model.state_dict().keys()
    x = torch.randn(3, 4, 10)
    assert torch.equal(gm(x), model(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(gm(x), model(x))
    parameters = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad(each(x).sum(), parameters.values()) for each in (gm, model))
    torch.testing.assert_close(ours, theirs)


def test_a_layer_with_a_hook_of_the_callers_is_called() -> None:
    model = net("weight norm")
    seen: list[Tensor] = []
    model.first.register_forward_hook(lambda layer, given, result: seen.append(result))
    gm = rg.trace(model, (torch.randn(2, 4, 10),))
    seen.clear()
    gm(torch.randn(2, 4, 10))
    assert len(seen) == 1


def test_a_weight_that_the_caller_has_put_there_is_watched() -> None:
    model = net("weight norm")
    nn.utils.remove_weight_norm(model.last)
    del model.last._parameters["weight"]
    model.last.weight = torch.randn(5, 6)
    served = optimize(model, (torch.randn(2, 4, 10),), keep="all", seconds=0.01).model
    x = torch.randn(2, 4, 10)
    with torch.no_grad():
        served(x)
        served.last.weight = torch.randn(5, 6)
        before = grafts_of(served).calls["forward"]
        assert not torch.allclose(served(x), model(x))
    assert grafts_of(served).calls["forward"] == before


def test_a_recurrent_layer() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = weight_norm(nn.LSTM(4, 6, batch_first=True), "weight_hh_l0")

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    with torch.no_grad():
        model = Recurrent().eval()
        served = optimize(model, (torch.randn(2, 5, 4),), keep="all", seconds=0.01).model
        for _ in range(2):
            x = torch.randn(2, 5, 4)
            torch.testing.assert_close(served(x), model(x))
    assert grafts_of(served).calls["forward"] == 2
