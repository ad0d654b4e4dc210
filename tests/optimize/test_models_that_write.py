"""A model that writes as it runs: to buffers (statistics, keys and values of fixed places) or to what it is given."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regraft as rg
from regraft.core.mutation import weights_written
from regraft.dropin import grafts_of
from regraft.optimize import optimize
from regraft.optimize.shorter import shorter_call


class Centred(nn.Module):
    """Takes a running mean off its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.second(torch.relu(self.first((x - self.mean) * self.scale)))


class Static(nn.Module):
    """Attention to keys and values in buffers of a fixed length, as decoders without a cache of their own have them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(1, 10, 8))
        self.register_buffer("values", torch.zeros(1, 10, 8))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        self.keys[:, places] = key
        self.values[:, places] = value
        hidden = (torch.arange(10) <= places[:, None])[None]
        attended = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=hidden)
        return self.out(attended)


class Counted(nn.Module):
    """Adds one row of a short table after the other, beyond whose end there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("table", torch.randn(8, 8))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        row = self.table[self.count]
        self.count += 1
        return self.second(torch.relu(self.first(x + row)))


def calls(name: str) -> list[tuple[Tensor, ...]]:
    if name == "Static":
        return [(torch.randn(1, 1, 8), torch.tensor([place])) for place in range(6)]
    return [(torch.randn(3, 8),) for _ in range(6)]


MODELS: dict[str, type[nn.Module]] = {"Centred": Centred, "Static": Static, "Counted": Counted}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def optimized(model: nn.Module, call: tuple[Tensor, ...], **settings: Any) -> Any:
    return optimize(model, call, **{"seconds": 0.01, "keep": "all", **settings})


@pytest.mark.parametrize("engine", ["eager", "onednn"])
def test_optimize_leaves_them_as_they_were(name: str, engine: str) -> None:
    model = MODELS[name]().eval()
    before = buffers(model)
    optimized(model, calls(name)[0], engine=engine, keep="measured")
    for key, value in before.items():
        assert torch.equal(model.get_buffer(key), value)


def test_the_graph_runs_each_call_and_writes_what_the_model_would(name: str) -> None:
    model = MODELS[name]().eval()
    twin = copy.deepcopy(model)
    served = optimized(model, calls(name)[0]).model
    before = grafts_of(served).calls["forward"]
    with torch.no_grad():
        for call in calls(name):
            torch.testing.assert_close(served(*call), twin(*call))
            torch.testing.assert_close(buffers(served), buffers(twin))
        for each in (served, twin):  # and the caller may begin anew
            for key in {"mean", "count", "keys", "values"} & buffers(each).keys():
                each.get_buffer(key).zero_()
        for call in calls(name):
            torch.testing.assert_close(served(*call), twin(*call))
    assert grafts_of(served).calls["forward"] == before + 12
    torch.testing.assert_close(buffers(model), buffers(twin))  # the caller's model has them in common


@pytest.mark.parametrize("kind", ["program", "graph module"])
def test_those_of_what_is_no_module_of_the_callers(name: str, kind: str) -> None:
    model, (first, *others) = MODELS[name]().eval(), calls(name)
    given: Any = torch.export.export(model, first) if kind == "program" else rg.trace(model, first)
    states = [model.state_dict(), given.state_dict if kind == "program" else given.state_dict()]
    before = copy.deepcopy(states)
    result = optimized(given, first)
    torch.testing.assert_close(states, before, rtol=0, atol=0)
    served, twin = result.model.module() if kind == "program" else result.model, copy.deepcopy(model)
    with torch.no_grad():
        for call in others:
            torch.testing.assert_close(served(*call), twin(*call))


def test_a_copy_writes_to_its_own() -> None:
    model = Centred().eval()
    served = optimized(model, calls("Centred")[0]).model
    copied = copy.deepcopy(served)
    before = buffers(model)
    with torch.no_grad():
        x = torch.randn(3, 8)
        expected = copy.deepcopy(model)(x)
        torch.testing.assert_close(copied(x), expected)
    assert grafts_of(copied).calls["forward"] == 1
    torch.testing.assert_close(buffers(model), before)
    assert not torch.equal(copied.mean, model.mean)


def test_a_weight_and_what_is_only_read_are_still_watched() -> None:
    for name in ("scale", "first.weight"):
        model = Centred().eval()
        served = optimized(model, calls("Centred")[0]).model
        with torch.no_grad():
            owner, _, key = name.rpartition(".")
            getattr(model.get_submodule(owner), key).mul_(2)
            x = torch.randn(3, 8)
            expected = copy.deepcopy(model)(x)
            before = grafts_of(served).calls["forward"]
            torch.testing.assert_close(served(x), expected)
        assert grafts_of(served).calls["forward"] == before
        assert grafts_of(served).stale == "weights of it were written to"


def test_a_buffer_that_one_graph_writes_to_and_another_reads_is_watched() -> None:
    grafts = grafts_of(optimized(Centred().eval(), calls("Centred")[0]).model)
    (entry,) = grafts.entries
    assert {id(tensor) for tensor in grafts._written()} == {id(entry.gm.mean)}
    reads = copy.copy(entry)
    reads.gm = rg.trace(nn.Linear(8, 4).eval(), (torch.randn(3, 8),))
    for entries in ([entry, reads], [reads, entry]):
        grafts.entries = entries
        assert not grafts._written()


class Learns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(8, 4), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.rate.mul_(0.5)
        return self.layer(x * self.rate)


def test_a_model_that_writes_to_a_parameter_is_left_as_it_is() -> None:
    model = Learns().eval()
    twin = copy.deepcopy(model)
    result = optimized(model, calls("Centred")[0])
    assert result.graphs[0].verdict.startswith("the original is kept")
    assert torch.equal(model.rate, twin.rate)
    with torch.no_grad():
        for (x,) in calls("Centred"):
            torch.testing.assert_close(result.model(x), twin(x))


def test_a_parameter_is_watched_whatever_is_written_to_it() -> None:
    grafts = grafts_of(optimized(Centred().eval(), calls("Centred")[0]).model)
    grafts.entries[0].gm = rg.trace(Learns().eval(), (torch.randn(3, 8),))
    assert len(weights_written(grafts.entries[0].gm)) == 1
    assert not grafts._written()


def test_what_is_written_is_found() -> None:
    gm = rg.trace(Centred().eval(), (torch.randn(3, 8),))
    assert {id(tensor) for tensor in weights_written(gm)} == {id(gm.mean)}
    assert not weights_written(rg.trace(nn.Linear(8, 4).eval(), (torch.randn(3, 8),)))


def test_a_nan_that_a_buffer_would_keep_is_none_of_what_is_tried() -> None:
    model = Centred().eval()
    served = optimized(model, calls("Centred")[0]).model
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(served(x := torch.randn(3, 8)), twin(x))
        assert all(buffer.isfinite().all() for buffer in model.buffers())
        broken = torch.full((3, 8), math.nan)
        torch.testing.assert_close(served(broken), twin(broken), equal_nan=True)


class Next(nn.Module):
    """Moves on the tokens that it is given, and counts: after a few calls with one tensor there is no such token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, seen: dict[str, Tensor]) -> Tensor:
        ids.add_(1)
        seen["count"] += 1
        return self.out(self.table(ids))


@pytest.mark.parametrize("engine", ["eager", "onednn"])
@pytest.mark.parametrize("keep", ["all", "measured"])
def test_optimize_leaves_what_the_caller_gave(keep: str, engine: str) -> None:
    model = Next().eval()
    ids, seen = torch.randint(10, (2, 3)), {"count": torch.zeros(1)}
    before = ids.clone()
    served = optimized(model, (ids, seen), keep=keep, engine=engine).model
    assert torch.equal(ids, before)
    assert torch.equal(seen["count"], torch.zeros(1))
    with torch.no_grad():
        torch.testing.assert_close(served(ids, seen), model(before.clone(), {"count": torch.zeros(1)}))
    assert torch.equal(ids, before + 1)
    assert torch.equal(seen["count"], torch.ones(1))


def test_a_shorter_call_leaves_it_too() -> None:
    ids, seen = torch.zeros(8, 3, dtype=torch.long), {"count": torch.zeros(1)}
    model = Next().eval()
    gm = rg.trace(model, (ids, seen), dynamic_shapes="auto")
    shorter = shorter_call(gm, model, ((ids, seen), {}), 10.0)
    assert shorter is not None
    (fewer, others), _ = shorter
    assert len(fewer) < 8
    assert not others["count"]
    assert not seen["count"]


class Squared(nn.Module):
    """Its weight is taken for written: torch does not say that einsum gives memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = torch.einsum("ij,ij->ij", self.weight, self.weight)
        squares *= 2
        return self.out(x @ squares)


def test_what_is_only_taken_for_written_is_not_written_by_optimize() -> None:
    model, x = Squared().eval(), torch.randn(5, 8)
    assert any(each is model.weight for each in weights_written(rg.trace(model, (x,))))
    first, second = (rg.optimize(model, (x,), keep="all", seconds=0.01).model for _ in range(2))
    assert model.weight._version == 0
    with torch.no_grad():
        for dropin in (first, second):
            torch.testing.assert_close(dropin(x), model(x))
            assert grafts_of(dropin).calls["forward"] == 1
