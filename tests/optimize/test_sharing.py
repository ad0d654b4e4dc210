"""Two graphs of one model that were rewritten alike hold one set of weights, and either can still be taken back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import regraft as rg
from helpers import randomise
from regraft.core.journal import Journal
from regraft.optimize.sharing import share_weights, weights_made

X = torch.randn(3, 6)


class Net(nn.Module):
    """Has layers to merge, and a number made of its weights alone, as DiffLlama has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) - self.factor.square().sum().exp() * self.b(x)


def graphs(model: Net) -> tuple[rg.GraphModule, rg.GraphModule]:
    steps = rg.compose(rg.RemoveDeadWork(), rg.MergeLinears())
    return steps(rg.trace(model, (X,))), steps(rg.trace(model, (X,)))


def test_what_was_made_alike_is_held_once_and_taken_back_from_each() -> None:
    model = randomise(Net()).eval()
    first, second = graphs(model)
    wanted = second(X)
    assert {id(t) for t in weights_made(first)}.isdisjoint(map(id, weights_made(second)))
    share_weights(first, second)
    assert len(list(weights_made(second))) == 3  # the number, and a weight and a bias
    assert [id(t) for t in weights_made(first)] == [id(t) for t in weights_made(second)]
    assert torch.equal(second(X), wanted)
    for gm in (second, first):
        for step in reversed(rg.history(gm)):
            rg.undo(gm, step)
        assert dict(gm.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert torch.equal(gm(X), model(X))


def test_what_differs_is_not_shared() -> None:
    first, second = graphs(randomise(Net()).eval())
    with torch.no_grad():
        for tensor in weights_made(second):
            tensor.mul_(2)
    share_weights(first, second)
    assert {id(t) for t in weights_made(first)}.isdisjoint(map(id, weights_made(second)))


def test_a_graph_without_steps_gets_no_history() -> None:
    model = randomise(Net()).eval()
    first, second = graphs(model)[0], rg.trace(model, (X,))
    share_weights(first, second)
    assert Journal.KEY not in second.meta
