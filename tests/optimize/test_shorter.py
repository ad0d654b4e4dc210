"""Where a call takes long, steps are timed on one of fewer rows, and all else on the call itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import every_engine, heads, ids, image
from torch import Tensor, nn
from torch.export import Dim
from transformers_models import decoder

import regraft as rg
from regraft.optimize import steps, subjects, work
from regraft.optimize.axes import axes_of
from regraft.optimize.engines import choosing, onednn_graph
from regraft.optimize.engines.flat import Flat
from regraft.optimize.graphs import Graph
from regraft.optimize.shorter import shorter_call
from regraft.verify import Comparison
from regraft.verify.oracle import Oracle


class Pair(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        return (x * mask) @ table


def traced(rows: int, dynamic_shapes: Any = "auto") -> tuple[nn.Module, Any, Any]:
    model = Pair()
    kwargs = {"x": torch.randn(rows, 6), "mask": torch.ones(rows, 6), "table": torch.randn(6, 3)}
    return model, rg.trace(model, (), kwargs, dynamic_shapes=dynamic_shapes), ((), kwargs)


@pytest.mark.parametrize(("seconds", "rows"), [(1.0, 2), (0.6, 3), (8.0, 1), (2.0, 1)])
def test_it_has_as_many_rows_as_take_a_quarter_of_a_second(seconds: float, rows: int) -> None:
    model, gm, inputs = traced(8)
    shorter = shorter_call(gm, model, inputs, seconds)
    assert shorter is not None
    args, kwargs = shorter
    assert args == ()
    assert {name: tuple(tensor.shape) for name, tensor in kwargs.items()} == {
        "x": (rows, 6),
        "mask": (rows, 6),
        "table": (6, 3),
    }
    assert torch.isin(kwargs["x"], inputs[1]["x"]).all()
    assert tuple(inputs[1]["x"].shape) == (8, 6)


def test_there_is_none_of_a_short_call_nor_of_one_that_has_to_be_as_it_is() -> None:
    model, gm, inputs = traced(8)
    assert shorter_call(gm, model, inputs, 0.4) is None
    model, gm, inputs = traced(1)
    assert shorter_call(gm, model, inputs, 8.0) is None
    model, gm, inputs = traced(2)
    assert shorter_call(gm, model, inputs, 8.0) is not None
    model, gm, inputs = traced(8, None)
    assert shorter_call(gm, model, inputs, 8.0) is None
    rows = Dim("rows", min=5)
    model, gm, inputs = traced(8, {"x": {0: rows}, "mask": {0: rows}, "table": None})
    assert shorter_call(gm, model, inputs, 8.0) is None


def test_there_is_none_of_a_call_with_a_cache() -> None:
    model = decoder("Llama")
    with torch.no_grad():
        cache = model(ids(8), use_cache=True).past_key_values
    call = {"input_ids": ids(8)[:, :1], "past_key_values": cache}
    gm = rg.trace(model, (), call, dynamic_shapes=axes_of(model, call))
    assert shorter_call(gm, model, ((), call), 9.0) is not None
    assert Graph("decode", gm, ((), call), Oracle(model, float64=True, seed=0), seconds=9.0).shorter is None


def test_steps_are_timed_on_it_and_the_result_on_the_call_itself_which_is_warm_by_then(monkeypatch) -> None:
    rows: dict[str, set[int]] = {"steps": set(), "engine": set(), "result": set()}
    warmups: dict[str, set[float]] = {name: set() for name in rows}

    def spy(what: str) -> Any:
        def compare(*programs: Any, warmup_seconds: float, **_: Any) -> Comparison:
            with torch.no_grad():
                rows[what] |= {len(program()[0]) for program in programs}
            warmups[what].add(warmup_seconds)
            return Comparison(1.0, 0.5, 0.5, 0.4, 0.6, (0.5,) * 12, 1)

        return compare

    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs))
    for what, file in (("steps", steps), ("engine", choosing), ("result", work)):
        monkeypatch.setattr(file, "compare_speed", spy(what))

    def noted(seconds: float, **settings: Any) -> tuple[str, ...]:
        monkeypatch.setattr(subjects, "_seconds_of", lambda graph: seconds)
        for found in (*rows.values(), *warmups.values()):
            found.clear()
        return rg.optimize(heads(), (image(16),), engine="inductor", seconds=0.1, **settings).notes

    assert noted(2.0) == ("forward: a call takes 2.0 s, so steps were timed on x 2x3x6x6",)
    assert rows == {"steps": {2}, "engine": {16}, "result": {16}}
    assert warmups == {"steps": {0.02}, "engine": {0.0}, "result": {0.0}}
    noted(2.0, verify=False)
    assert warmups == {"steps": {0.02}, "engine": {0.0}, "result": {0.02}}, "the original has not run"
    assert noted(0.05) == ()
    assert rows == {"steps": {16}, "engine": {16}, "result": {16}}
    assert warmups == {"steps": {0.02}, "engine": {0.02}, "result": {0.02}}
    assert noted(2.0, keep="all") == ()
    assert noted(2.0, transformations=[]) == ()


@pytest.mark.parametrize(("seconds", "settings"), [(0.4, (0.02, 4)), (0.6, (0.0, 2))])
def test_of_slow_programs_half_as_many_pairs_tell_which_is_taken(monkeypatch, seconds: float, settings: Any) -> None:
    seen = []

    def compare(*_: Any, min_seconds: float, warmup_seconds: float, min_pairs: int) -> Comparison:
        seen.append((warmup_seconds, min_pairs))
        return Comparison(1.0, 0.5, 0.5, 0.4, 0.6, (0.5,) * 2, 1)

    monkeypatch.setattr(onednn_graph, "compare_speed", compare)
    monkeypatch.setattr(onednn_graph, "_seconds", lambda program, given: seconds)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    call = {"input": image()}
    onednn_graph.build(Flat(rg.trace(layers, (), call), call))
    assert seen == [settings]
