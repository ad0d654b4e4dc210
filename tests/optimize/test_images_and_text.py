"""Decoders that are told about images: what can be captured of them runs on graphs, and gives the same tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers_models import image_and_text, of_images

from regraft.core.errors import CaptureError
from regraft.dropin import grafts_of
from regraft.optimize import Optimized, optimize, subjects

pytest.importorskip("transformers")


def optimized(model: nn.Module, **call: Any) -> Optimized:
    settings = {"transformations": "MergeLinears", "keep": "all", "seconds": 0.01, "engine": "eager"}
    return optimize(model, **settings, **call)


@pytest.fixture(scope="module", params=["Llava", "Gemma3", "Qwen2VL"])
def pair(request):
    model = of_images(request.param)
    result = optimized(model, kwargs=image_and_text(request.param))
    assert getattr(result.model.model, "rope_deltas", None) is None, "what it was watched doing left nothing behind"
    return request.param, model, result


def tokens(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)


def test_what_generate_calls_runs_on_graphs(pair) -> None:
    kind, model, result = pair
    assert result.verification.ok, result.verification
    inputs = image_and_text(kind, seed=1)
    before = dict(grafts_of(result.model).calls)
    assert torch.equal(tokens(result.model, inputs), tokens(model, inputs))
    calls = {
        name: count - before[name] for name, count in grafts_of(result.model).calls.items() if count > before[name]
    }
    assert calls == {"prefill": 1, "decode": 4}


def test_forward_sees_the_image(pair) -> None:
    kind, model, result = pair
    inputs = image_and_text(kind, seed=2)
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    with torch.no_grad():
        expected, changed = model(**inputs).logits, model(**other).logits
        assert torch.allclose(result.model(**inputs).logits, expected, atol=1e-5)
        assert torch.allclose(result.model(**other).logits, changed, atol=1e-5)
    assert not torch.allclose(expected, changed, atol=1e-5)


def test_without_a_graph_of_the_example_there_is_none_to_give(pair, tmp_path) -> None:
    kind, _, result = pair
    if kind != "Qwen2VL":
        assert [graph.name for graph in result.graphs][:3] == ["forward", "prefill", "decode"]
        assert result.graph_module is result.graphs[0].graph_module
        return
    assert [graph.name for graph in result.graphs][:2] == ["prefill", "decode"]
    assert any(note.startswith("forward was not captured, so the original runs it") for note in result.notes)
    with pytest.raises(CaptureError, match=r"result\.graphs: prefill, decode.*result\.notes says why"):
        result.save(tmp_path / "model.pt2")
    with pytest.raises(CaptureError, match=r"result\.graphs: prefill"):
        _ = result.graph_module
    assert result.benchmark is None
    assert not list(tmp_path.iterdir())
    assert "the time of a prefill" in result.report(tmp_path / "page.html").read_text()


def test_converted_it_captures_the_same_calls_again(pair) -> None:
    kind, model, result = pair
    if kind != "Qwen2VL":
        pytest.skip("the example's own call was captured, and is so again")
    inputs = {name: v.double() if v.is_floating_point() else v for name, v in image_and_text(kind, seed=1).items()}
    converted = copy.deepcopy(result.model).double()
    assert torch.equal(tokens(converted, inputs), tokens(copy.deepcopy(model).double(), inputs))
    assert [entry.name for entry in grafts_of(converted).entries] == [graph.name for graph in result.graphs]
    assert grafts_of(converted).calls["decode"] == 4


def test_what_the_model_keeps_from_call_to_call_is_its_own_affair(pair) -> None:
    kind, model, result = pair
    if kind != "Qwen2VL":
        pytest.skip("it keeps nothing")
    inputs, dropin = image_and_text(kind, seed=3), result.model
    assert all(graph.ignores == {("model", "rope_deltas")} for graph in grafts_of(dropin).entries)
    cache = [each(**inputs, use_cache=True).past_key_values for each in (model, dropin)]  # the original's own forward
    before = dict(grafts_of(dropin).calls)
    assert torch.equal(tokens(dropin, inputs), tokens(model, inputs))
    assert grafts_of(dropin).calls["decode"] == before["decode"] + 4
    # without positions the model goes by what it has kept, which no graph does
    kept = dropin.model.rope_deltas
    assert torch.equal(kept, model.model.rope_deltas)
    found = []
    for each, cached in zip((model, dropin), cache, strict=True):
        each.model.rope_deltas = kept + 3
        with torch.no_grad():
            found.append(each(inputs["input_ids"][:, -1:], past_key_values=cached).logits)
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [("Llava", "vision_tower"), ("Qwen2VL", "visual")])
def test_the_part_that_encodes_images_is_optimized_by_itself(kind: str, name: str) -> None:
    model, inputs, given = of_images(kind), image_and_text(kind), []
    part = getattr(model.model, name)
    handle = part.register_forward_pre_hook(lambda _, *call: given.append(call), with_kwargs=True)
    expected = tokens(model, inputs)
    handle.remove()
    setattr(model.model, name, optimized(part, args=given[0][0], kwargs=given[0][1]).model)
    assert torch.equal(tokens(model, inputs), expected)
    assert grafts_of(getattr(model.model, name)).calls == {"forward": 1}
    if kind == "Qwen2VL":
        for grid in ([[1, 2, 8]], [[1, 8, 2]], [[2, 2, 4]]):  # of as many pieces, which other pieces are beside
            call = torch.randn(16, 384), torch.tensor(grid)
            with torch.no_grad():
                found, wanted = getattr(model.model, name)(*call), part(*call)
            assert torch.allclose(found.pooler_output, wanted.pooler_output, atol=1e-5)


def test_where_nothing_can_be_captured_the_error_is_that_of_the_example(monkeypatch) -> None:
    def trace(*args: Any, **kwargs: Any) -> None:
        raise CaptureError(f"what {', '.join(args[2])} asks cannot be captured")

    monkeypatch.setattr(subjects, "trace", trace)
    with pytest.raises(CaptureError, match="what input_ids, attention_mask, pixel_values asks"):
        optimized(of_images("Llava"), kwargs=image_and_text("Llava"))


def test_an_example_without_images_is_made_where_none_fits(caplog) -> None:
    result = optimized(of_images("Qwen2VL"))
    assert "the example of Qwen2VLForConditionalGeneration was made without pixel_values" in caplog.text
    (note,) = [note for note in result.notes if "made without" in note]
    assert 'regraft.optimize(model, kwargs={"input_ids": ..., "attention_mask": ..., "pixel_values": ...})' in note


def test_what_no_example_can_be_made_for_is_to_be_called_with_one() -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BrosModel(transformers.BrosConfig(**sizes, vocab_size=64)).eval()
    with pytest.raises(TypeError, match=r'BrosModel cannot be called with .*optimize\(model, kwargs=\{"input_ids": \.'):
        optimized(model)
