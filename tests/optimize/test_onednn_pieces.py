"""A long program in pieces gives what the whole gives."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regraft.optimize.engines import onednn_graph, onednn_pieces
from regraft.optimize.engines.flat import Flat
from regraft.optimize.engines.onednn_pieces import in_pieces

Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(6, 6, generator=GENERATOR) / 3
X, Y = torch.randn(4, 6, generator=GENERATOR), torch.randn(4, 6, generator=GENERATOR)


def residual(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    for _ in range(5):
        x = x + F.linear(F.linear(x, W).relu() * x.sigmoid(), W)
    return (x,)


def wider(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x = x.relu()
    y = x.exp()
    for _ in range(6):
        x, y = x.tanh(), y + x.cos()
    return (x + y,)


def results_of_all_parts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first = x.relu() + y
    second = F.linear(first, W).tanh()
    last = F.linear(second.sigmoid() * first, W) - y
    return first, last, second, first


def inputs_as_results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x, (F.linear(x, W).relu().sigmoid() + 1).tanh(), y


def lists_across(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    parts = [x.relu(), y.tanh()]
    both = F.linear(torch.cat(parts, 0).sigmoid().view(2, 4, 6), W)
    return (torch.cat([both.sum(0), *parts, torch.ones(1, 6)]).exp(), torch.stack(parts).sum(0))


def several_at_once(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, second, third = (x * y).relu().split(2, 1)
    values, places = F.linear(x, W).sort(1)
    return (first.exp() + third, second.tanh().cos(), values + places)


FUNCTIONS: list[Function] = [
    residual,
    results_of_all_parts,
    inputs_as_results,
    lists_across,
    several_at_once,
]


def frozen(function: Callable[..., Any], *inputs: Tensor) -> torch.jit.ScriptModule:
    class Of(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return function(*given)

    program = torch.jit.trace(Of().eval(), inputs, check_trace=False)
    return torch.jit.freeze(program)  # type: ignore[no-any-return]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pieces that are made from here on."""
    found, usual = [], onednn_pieces._piece

    def spy(*arguments: Any) -> Any:
        found.append(usual(*arguments))
        return found[-1]

    monkeypatch.setattr(onednn_pieces, "_piece", spy)
    return found


@pytest.mark.parametrize("fusing", [False, True])
@pytest.mark.parametrize("longest", [1, 2, 3, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_pieces_give_what_the_whole_gives(function: Function, longest: int, fusing: bool, monkeypatch) -> None:
    made = spied(monkeypatch)
    program = in_pieces(frozen(function, X, Y), longest)
    assert len(made) > 1
    with onednn_graph._fusing() if fusing else torch.no_grad(), torch.no_grad():
        for scale in (1.0, 1.0, -0.5, 2.0):
            x, y = X * scale + 0.1, Y * scale
            before = x.clone(), y.clone()
            found, expected = program(x, y), function(x.clone(), y.clone())
            assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
            torch.testing.assert_close(found, expected, rtol=2e-6 if fusing else 0, atol=2e-6 if fusing else 0)
            assert torch.equal(x, before[0])
            assert torch.equal(y, before[1])


def test_what_writes_is_run_whole() -> None:
    # a piece would make the zeros once for all calls, or one of them for both, and another would write into them
    def writing(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        table, other = torch.zeros(4, 6), torch.zeros(4, 6)
        first = x.relu().exp().tanh()
        table[1:] = y[1:]
        return first + table, other + y

    program = frozen(writing, X, Y)
    assert in_pieces(program, 2) is program


def test_what_reads_its_module_is_run_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.full((6,), 3.0))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return (x.relu().exp().tanh() * self.factor,)

    program = torch.jit.freeze(torch.jit.trace(Scaled().eval(), (X, Y)), preserved_attrs=["factor"])
    assert in_pieces(program, 2) is program


def test_cuts_are_where_little_is_alive(monkeypatch) -> None:
    made = spied(monkeypatch)
    in_pieces(frozen(residual, X, Y), 7)
    assert [(len(piece.takes), len(piece.gives)) for piece in made] == [(1, 1)] * 5
    made.clear()
    in_pieces(frozen(residual, X, Y), 13)  # two layers of six operations each
    assert [len(piece.gives) for piece in made] == [1, 1, 1]
    made.clear()
    in_pieces(frozen(wider, X, Y), 10)  # not where a piece would be less than half as long as it may be
    assert [len(piece.gives) for piece in made] == [2, 2, 1]


def test_no_piece_is_longer_than_it_may_be(monkeypatch) -> None:
    made = spied(monkeypatch)
    for longest in range(1, 32):
        made.clear()
        in_pieces(frozen(residual, X, Y), longest)
        lengths = [
            sum(node.kind() not in ("prim::Constant", "prim::TupleConstruct") for node in piece.program.graph.nodes())
            for piece in made
        ]
        assert max(lengths, default=0) <= longest
        assert sum(lengths) == (30 if longest < 30 else 0)


def test_nothing_is_held_longer_than_it_is_read(monkeypatch) -> None:
    made = spied(monkeypatch)
    program = in_pieces(frozen(residual, X, Y), 6)
    results: list[weakref.ref[Tensor]] = []

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*given: Tensor) -> Any:
            found = run(*given)
            alive = [result() is not None for result in results]
            assert alive == [index == len(results) - 1 for index in range(len(results))]  # what was just given
            results.extend(map(weakref.ref, found))
            return found

        return watching

    for piece in made:
        object.__setattr__(piece, "program", watched(piece.program))
    assert torch.equal(program(X, Y)[0], residual(X, Y)[0])
    assert len(results) == len(made) == 5


@pytest.mark.parametrize("missing", ["createClone", "_create_function_from_graph"])
def test_a_torch_that_cannot_cut_a_program_runs_it_whole(missing: str, monkeypatch) -> None:
    program = frozen(residual, X, Y)
    assert in_pieces(program, 5) is not program  # if these have moved, this fails
    if missing == "createClone":
        monkeypatch.delattr(torch._C.Graph, missing)
    else:
        monkeypatch.delattr(torch._C, missing)
    assert in_pieces(program, 5) is program


def test_what_cannot_be_cut_is_run_whole() -> None:
    @torch.jit.script
    def branching(x: Tensor, y: Tensor) -> Tensor:
        return x.relu() if bool(x.sum() > 0) else y.exp().tanh()

    def of_numbers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        size = x.size(0)  # a number is alive throughout
        return (x.relu().tanh().exp().cos().view(size, -1),)

    for program in (
        frozen(lambda x, y: (branching(x, y).exp().relu().cos(),), X, Y),
        frozen(of_numbers, X, Y),
        frozen(lambda x, y: x.relu().tanh().exp().cos(), X, Y),  # no tuple
        frozen(lambda x, y: [x.relu().tanh().exp().cos(), y], X, Y),
        frozen(lambda x, y: (x.relu().tanh().exp().cos(), torch.ones(2)), X, Y),  # a constant among its results
        frozen(lambda x, y: (x.relu().tanh().exp(),), X, Y),  # short
        frozen(lambda x, y: (x, y), X, Y),
        frozen(lambda x, y: x, X, Y),
    ):
        assert in_pieces(program, 3) is program


def test_an_engine_makes_a_long_program_in_pieces(monkeypatch) -> None:
    made = spied(monkeypatch)
    monkeypatch.setattr(onednn_graph, "in_pieces", partial(in_pieces, longest=4))
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(4))).eval()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_()
        run = onednn_graph.build(Flat(torch.fx.symbolic_trace(layers), {"input": X}))
        assert len(made) > 2
        exact = copy.deepcopy(layers).double()
        for x in (X, -X):
            torch.testing.assert_close(run([x])[0].double(), exact(x.double()), rtol=1e-5, atol=1e-5)
