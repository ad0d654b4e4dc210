"""Tables that are written piece by piece are the same in each call, where nothing that changes goes into them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_onednn_graph import Of, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace

import regraft as rg
from regraft.optimize.engines import onednn_graph
from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor], Any]
X = weight(3, 10, 10)


def places(x: Tensor) -> Tensor:
    """As BEiT numbers pairs of patches: sums of differences, and three numbers of their own."""
    rows = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
    apart = (rows[:, :, None] - rows[:, None, :]).permute(1, 2, 0).contiguous()
    apart[:, :, 0] += 2
    apart[:, :, 1] += 2
    apart[:, :, 0] *= 5
    table = torch.zeros((x.size(1), x.size(1)), dtype=apart.dtype)
    table[1:, 1:] = apart.sum(-1)
    table[0, 0:] = 25
    table[0:, 0] = 26
    table[0, 0] = 27
    return table


def filled(x: Tensor, number: float = 2.0) -> Tensor:
    table = torch.zeros(x.size(1), 10)
    table[1:, :4] = number
    table[:, 0].add_(1)
    return table


class Table(nn.Module):
    """A bias for each pair, from a table of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(weight(28, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table[places(x).view(-1)].view(10, 10, 3).permute(2, 0, 1).contiguous()).softmax(-1)


def forms_of(function: Function) -> Forms:
    return Forms(rg.trace(Of(function), (X,)), [X.clone()])


def check(module: nn.Module, gm: Any) -> None:
    """Two calls of a program, and what they leave of the inputs, are those of the model."""
    with torch.no_grad():
        expected = module(X.clone())
        dtypes = [result.dtype for result in ((expected,) if isinstance(expected, Tensor) else expected)]
        run = onednn_graph.build(SimpleNamespace(module=gm, sample=[X.clone()], dtypes=dtypes))
        for x in (X, X * -2, X + 1):
            given, mine = x.clone(), x.clone()
            found, expected = run([given]), module(mine)
            for one, other in zip(found, (expected,) if isinstance(expected, Tensor) else expected, strict=True):
                torch.testing.assert_close(one, other)
            assert torch.equal(given, mine)


SAME: dict[str, Function] = {
    "pieces": lambda x: x + filled(x),
    "of another table": lambda x: x * (filled(x) + 1).copy_(filled(x, 3.0).mT.contiguous()),
    "read between, by what is the same": lambda x: (t := filled(x), u := t + 1, t[0].fill_(7), x * t + u)[-1],
    "seen through a view": lambda x: (t := filled(x), v := t[2:], t[3].mul_(5), x[:, 2:] + v)[-1],
    "an index": lambda x: (t := torch.arange(10), t[3:5].copy_(t[:2]), x[..., t] * 2)[-1],
    "of the input's type": lambda x: (t := x.new_zeros(10, 10), t[1:, :4].fill_(2), x + t)[-1],
    "like the input": lambda x: (t := torch.ones_like(x), t[:, 1:].mul_(3), x * t)[-1],
    "filled like the input": lambda x: (t := torch.full_like(x, 3.0), t[1].copy_(filled(x)), x * t)[-1],
    "a result": lambda x: (t := filled(x), x.relu(), t[1:]),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same(name: str) -> None:
    def function(x: Tensor) -> Any:
        found = SAME[name](x)
        return tuple(each for each in found if isinstance(each, Tensor)) if isinstance(found, tuple) else found

    forms = forms_of(function)
    program: Any = torch.jit.trace(forms, (X, *forms.beside), check_trace=False).graph
    assert not forms.known.writes
    assert not [node for node in program.nodes() if node.kind().endswith("_")]
    check(Of(function), rg.trace(Of(function), (X,)))


def test_a_table_of_pairs_is_made_once() -> None:
    gm = rg.trace(Table(), (X,))
    forms = Forms(gm, [X])
    program: Any = torch.jit.trace(forms, (X, *forms.beside), check_trace=False).graph
    assert {node.kind() for node in program.nodes()} <= {
        "prim::Constant",
        "aten::add",
        "aten::softmax",
        "aten::alias",
    } | {"prim::TupleConstruct"}
    check(Table(), gm)


class Learned(nn.Module):
    """A bias for each pair that layers compute from how far its two places are apart, as Swin V2's, in place."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), activation, nn.Linear(8, 3, bias=False))
        self.apart: Tensor
        self.register_buffer("apart", weight(10, 10, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layers(self.apart).permute(2, 0, 1)).softmax(-1)


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.ReLU()])
def test_a_bias_that_layers_compute_is_made_once(activation: nn.Module) -> None:
    model = Learned(activation).eval()
    gm = rg.trace(model, (X,))
    forms = Forms(gm, [X])
    program: Any = torch.jit.trace(forms, (X, *forms.beside), check_trace=False).graph
    kinds = {node.kind() for node in program.nodes()}
    assert not forms.known.writes
    assert kinds == {"prim::Constant", "aten::add", "aten::softmax", "prim::TupleConstruct"}
    check(model, gm)


def test_a_layer_in_place_on_what_changes_is_not_the_same() -> None:
    gm = rg.trace(nn.Sequential(nn.Linear(10, 10), nn.ReLU(inplace=True)), (X,))
    assert not {node for node in Forms(gm, [X]).known.steady if node.op != "get_attr"}


class Growing(nn.Module):
    """Writes into what it is given, each time more."""

    inplace, calls = True, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.add_(self.calls)


def test_what_a_layer_of_the_users_writes_is_not_the_same() -> None:
    root, graph = nn.ModuleDict({"growing": Growing()}), torch.fx.Graph()
    x = graph.placeholder("x")
    table = graph.call_function(torch.zeros, (3,))
    graph.output(graph.call_function(torch.add, (x, graph.call_module("growing", (table,)))))
    forms = Forms(torch.fx.GraphModule(root, graph), [torch.ones(3)])
    assert not forms.known.steady
    assert forms.known.writes


OTHERS: dict[str, Function] = {
    "what changes goes into it": lambda x: (t := filled(x), t[0].copy_(x[0, 0]), x + t)[-1],
    "what changes is multiplied with it": lambda x: (t := filled(x), t[1].mul_(x[0, 1, 2]), x + t)[-1],
    "read before it is whole": lambda x: (t := filled(x), y := x * t, t[0].fill_(7), x + t + y)[-1],
    "seen before it is whole": lambda x: (t := filled(x), v := t[0], y := x * v, t[0].fill_(7), y + t)[-1],
    "made of one that changes": lambda x: (
        t := filled(x),
        u := torch.zeros(10, 10),
        t[0].copy_(x[0, 0]),
        u[1].copy_(t[0]),
        x + u,
    )[-1],
    "like what changes, with that in it": lambda x: (t := torch.zeros_like(x), t[1].copy_(x[0]), x * t)[-1],
    "random": lambda x: (t := filled(x), t[0].bernoulli_(1.0), x + t)[-1],
    "the input": lambda x: (v := x[0], v.add_(1), x * 2)[-1],
    "a view of the input": lambda x: (v := x.view(-1), v[2:5].zero_(), x * filled(x))[-1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not(name: str) -> None:
    def function(x: Tensor) -> Any:
        return OTHERS[name](x)

    gm = rg.trace(Of(function), (X.clone(),))
    assert Forms(gm, [X.clone()]).known.writes
    check(Of(function), gm)


def test_what_is_written_by_an_assignment_is_written_once() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    table = graph.call_function(torch.arange, (10.0,))
    for place in (0, 2, 4):  # moved on by two, and by two more if it were done again
        part = graph.call_function(operator.getitem, (table, slice(place + 2, place + 4)))
        graph.call_function(operator.setitem, (table, slice(place, place + 2), part))
    graph.output(graph.call_function(torch.matmul, (x, table)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert not Forms(gm, [X]).known.writes
    check(gm, gm)


def shift_(table: Tensor) -> Tensor:
    """A function of somebody's, which writes into its argument."""
    return table.add_(1)


torch.fx.wrap("shift_")


def test_what_an_unknown_function_writes_may_change() -> None:
    gm = symbolic_trace(Of(lambda x: x + shift_(torch.ones(x.size(-1)))))
    assert {node.name for node in Forms(gm, [X]).known.steady} == set()


class Counting(nn.Module):
    """A buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 10))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0].add_(1)
        return x + self.calls[0]


def test_a_buffer_that_is_written_to_changes() -> None:
    known = Forms(rg.trace(Counting(), (X,)), [X]).known
    assert known.writes
    assert not known.steady
