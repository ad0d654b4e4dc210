"""The code of a captured graph reaches nested layers without `nn.Module.__getattr__`, and reaches the same ones."""

import pickle

import pytest
import torch
from torch import nn

import regraft as rg
from regraft.capture.codegen import direct


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.shift


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.inner(x))


@pytest.fixture
def pair():
    model = Outer().eval()
    return model, rg.trace(model, (torch.randn(3, 4),))


def test_nested_layers_are_reached_through_their_containers(pair):
    model, gm = pair
    assert 'self._modules["inner"]._modules["layers"]._modules["0"](' in gm.code
    assert 'self._modules["inner"].scale' in gm.code
    assert 'self._modules["inner"].shift' in gm.code
    assert "self.last(" in gm.code
    assert "getattr(" not in gm.code
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))


def test_a_layer_that_is_exchanged_or_hooked_later_is_the_one_that_runs(pair):
    model, gm = pair
    x = torch.randn(3, 4)
    model.inner.layers[0] = gm.inner.layers._modules["0"] = nn.Linear(4, 4)
    gm.inner.scale = model.inner.scale = nn.Parameter(torch.randn(4))
    assert torch.equal(gm(x), model(x))
    gm.inner.layers._modules["1"].register_forward_hook(lambda module, args, result: result * 0)
    assert torch.equal(gm(x), model.last(model.inner.shift.expand(3, 4)))


def test_it_survives_edits_copies_and_pickles(pair):
    model, gm = pair
    x = torch.randn(3, 4)
    for other in (pickle.loads(pickle.dumps(gm)), rg.RemoveDeadWork()(gm)):
        other.recompile()
        assert 'self._modules["inner"]._modules["layers"]._modules["1"](' in other.code
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(
    "line",
    [
        "y = self.norm(x)",
        "y = x.view(1, 2)",
        "y = torch.add(x, 'z = self.a.b(x)')",
        "y = selfish.a.b(x)",
        "# COUNTER: 3\n",
        ";  x = None\n",
        "return self_1",
    ],
)
def test_other_lines_stay_as_they_are(line):
    assert direct([line]) == [line]


def test_annotations_numbers_and_arguments_stay():
    assert direct(['y : torch.Tensor = getattr(getattr(self.a, "0"), "1").b(x, self.c.d)']) == [
        'y : torch.Tensor = self._modules["a"]._modules["0"]._modules["1"]._modules["b"](x, self.c.d)'
    ]


def test_a_weight_in_a_list_is_read_by_its_number():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])

        def forward(self, x):
            return x * self.weights[0] + self.weights[1]

    model = Lists().eval()
    gm = rg.trace(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))
