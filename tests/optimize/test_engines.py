"""An engine runs a rewritten graph where it is right; everything else about the model stays as it is."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from models import decoder, heads, ids, image

import regraft as rg
from regraft.dropin import Entry, grafts_of
from regraft.optimize.engines import ENGINES, choosing
from regraft.optimize.engines.flat import Flat
from regraft.optimize.subjects import Graph

EXACT = {"transformations": [rg.FoldBatchNorm(), rg.MergeLinears()], "seconds": 0.01}


def available(name: str) -> None:
    if choosing.missing_packages(name):
        pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_engine_runs_the_model(name: str) -> None:
    available(name)
    model = heads()
    result = rg.optimize(model, kwargs={"x": image()}, engine=name, keep="all", verify=False, **EXACT)
    assert result.graphs[0].engine.engine == name, result
    entry = grafts_of(result.model).entries[0]
    for batch in (1, 5):
        with torch.no_grad():
            found, expected = result.model(image(batch)), model(image(batch))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
    assert grafts_of(result.model).calls["forward"] >= 2
    other = copy.deepcopy(result.model)
    assert grafts_of(other).entries[0].engine is None
    result.undo()
    assert entry.engine is None


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_an_engine_runs_attention_of_groups_of_queries(name: str) -> None:
    available(name)

    class Groups(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)

        def forward(self, x):
            q, k = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k))
            k = k.repeat_interleave(2, 1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, k)

    model, call = Groups().eval(), {"x": torch.randn(2, 5, 16)}
    options = {"transformations": [rg.FuseAttention()], "seconds": 0.01}
    result = rg.optimize(model, kwargs=call, engine=name, keep="all", **options)
    assert result.steps[0].applied == 1, result
    assert result.graphs[0].engine.engine == name, result
    with torch.no_grad():
        torch.testing.assert_close(result.model(**call), model(**call), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_engine_decodes_with_a_cache() -> None:
    available("onnxruntime")
    model = decoder("Llama")
    result = rg.optimize(
        model, kwargs={"input_ids": ids()}, engine="onnxruntime", keep="all", transformations=[], seconds=0.01
    )
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(result.model.generate(ids(1, 5), **options), model.generate(ids(1, 5), **options))
    assert {graph.engine.engine for graph in result.graphs} == {"onnxruntime"}, result


def test_an_engine_that_is_wrong_or_fails_is_not_taken(monkeypatch) -> None:
    model = heads()

    def fails(flat: Flat):
        raise RuntimeError("no form for this")

    monkeypatch.setattr(sys.modules["regraft.optimize.engines.choosing"].importlib, "import_module", lambda name: made)
    for build, sentence in (
        (lambda flat: lambda inputs: [result + 1 for result in flat.module(*inputs)], "is not right"),
        (fails, "cannot run it (RuntimeError: no form for this)"),
    ):
        made = type("Adapter", (), {"build": staticmethod(build)})
        result = rg.optimize(model, kwargs={"x": image()}, engine="inductor", keep="all", **EXACT)
        assert result.graphs[0].engine.engine == "torch"
        assert sentence in str(result)
        assert grafts_of(result.model).entries[0].engine is None


def test_what_rewriting_adds_to_an_engine_is_measured_and_shown(monkeypatch) -> None:
    from regraft.verify import Comparison

    seen = []
    build = lambda flat: seen.append(flat.module) or (lambda inputs: flat.module(*inputs))
    monkeypatch.setattr(choosing.importlib, "import_module", lambda name: type("A", (), {"build": staticmethod(build)}))
    ratios: list[float] = []

    def compare(*programs, **clock) -> Comparison:
        ratio = ratios.pop(0)
        return Comparison(1.0, ratio, ratio, ratio - 0.05, ratio + 0.05, (ratio,) * 10, 1)

    monkeypatch.setattr(choosing, "compare_speed", compare)
    for ratio, keep, where in ((0.7, "measured", 3), (1.6, "measured", 4), (1.6, "all", 3)):
        seen.clear()
        ratios[:] = [ratio, 0.5]
        graph = rg.optimize(heads(), kwargs={"x": image()}, keep="all", **EXACT).graphs[0]
        subject = Graph("forward", graph.graph_module, graph.inputs, heads())
        entry = Entry("forward", graph.graph_module, graph.inputs[1])
        found = choosing.adopt_engine("inductor", subject, entry, 0.01, keep == "measured")
        layers = [sum(node.op == "call_module" for node in module.graph.nodes) for module in seen]
        assert layers == [2, 4], "rewritten, and as it was captured"
        assert entry.engine is not None
        assert entry.engine._flat.module is seen[where - 3], "where rewriting slows an engine down it runs alone"
        assert found.rewriting["inductor"].ratio == ratio
        assert f"regraft + inductor against inductor alone: {found.rewriting['inductor'].reason}" in str(found)
        assert found.to_dict()["rewriting"]["inductor"]["ratio"] == ratio


def test_nothing_rewritten_adds_nothing_to_an_engine() -> None:
    available("onnxruntime")
    result = rg.optimize(heads(), kwargs={"x": image()}, engine="onnxruntime", transformations=[], seconds=0.01)
    assert result.graphs[0].engine.rewriting == {}


def test_auto_takes_the_fastest_that_is_right(monkeypatch) -> None:
    from regraft.verify import Comparison

    ratios = {"inductor": 0.9, "onnxruntime": 0.5, "openvino": 1.5}
    build = lambda flat: lambda inputs: flat.module(*inputs)
    monkeypatch.setattr(choosing, "missing_packages", lambda name: ())
    monkeypatch.setattr(choosing.importlib, "import_module", lambda name: type("A", (), {"build": staticmethod(build)}))
    left = iter([ratio for each in ratios.values() for ratio in (0.9, each)])
    assert list(ratios) == list(ENGINES)

    def compare(*programs, **clock) -> Comparison:
        ratio = next(left)
        return Comparison(1.0, ratio, ratio, ratio - 0.05, ratio + 0.05, (ratio,) * 10, 1)

    monkeypatch.setattr(choosing, "compare_speed", compare)
    result = rg.optimize(heads(), kwargs={"x": image()}, engine="auto", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "onnxruntime"
    assert set(result.graphs[0].engine.comparisons) == set(ratios)


def test_an_engine_that_is_not_installed_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(choosing, "missing_packages", lambda name: ("openvino",))
    with pytest.raises(ImportError, match=r"pip install 'regraft\[openvino\]'"):
        rg.optimize(heads(), (image(),), engine="openvino")
