"""`generate` of a decoder runs on the rewritten graphs, prefill and decode, and gives the same tokens."""

from __future__ import annotations

import copy
import functools
import inspect
import sys

import pytest
import torch
from models import ids
from transformers_models import WINDOW, decoder

from regraft.capture.cache_names import name_in
from regraft.dropin import grafts_of
from regraft.optimize import optimize
from regraft.verify import oracle

pytest.importorskip("transformers")


KINDS = ("GPT2", "Llama", "Gemma3", "Lfm2", "FalconH1", "T5", "Whisper")


def example(model, batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    if model.main_input_name == "input_features":
        generator = torch.Generator().manual_seed(length)
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    return {"input_ids": ids(batch, length)}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    model = decoder(request.param)
    inputs = example(model)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids(2, 3)
    result = optimize(model, kwargs=inputs, transformations="MergeLinears", keep="all", seconds=0.01)
    assert result.verification.ok, result.verification
    assert [graph.name for graph in result.graphs if graph.used][:3] == ["forward", "prefill", "decode"]
    return model, result


def tokens(model, *args, **kwargs) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(*args, **{"max_new_tokens": 8, "do_sample": False, **kwargs})


def counted(dropin) -> dict[str, int]:
    return dict(grafts_of(dropin).calls)


def ran(model, dropin, inputs, **options) -> dict[str, int]:
    """Which graphs ran, after a look that the tokens are the same."""
    before = counted(dropin)
    expected = tokens(model, **inputs, min_new_tokens=8, **options)
    assert torch.equal(tokens(dropin, **inputs, min_new_tokens=8, **options), expected)
    after = counted(dropin)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.mark.parametrize(("batch", "length"), [(2, 7), (1, 5), (3, 10)])
def test_greedy_tokens_are_the_same_and_the_graphs_made_them(pair, batch: int, length: int) -> None:
    model, result = pair
    assert ran(model, result.model, example(model, batch, length)) == {"prefill": 1, "decode": 7}


SEARCHES = [{"do_sample": True}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}]


@pytest.mark.parametrize("options", SEARCHES, ids=str)
def test_sampling_and_beams_run_on_the_graphs(pair, options) -> None:
    model, result = pair
    assert ran(model, result.model, example(model), **options)["decode"] == 7


def test_all_graphs_are_compared_with_one_copy_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    made, in_precision = [], oracle.in_precision
    monkeypatch.setattr(oracle, "in_precision", lambda model, dtype: made.append(dtype) or in_precision(model, dtype))
    model = decoder("Llama")
    settings = {"transformations": "MergeLinears", "keep": "all", "engine": "eager", "seconds": 0.01}
    result = optimize(model, kwargs=example(model), **settings)
    assert len(result.graphs) > 3
    assert made == [torch.float64]


def test_padded_texts_have_graphs_of_their_own(pair) -> None:
    model, result = pair
    if model.main_input_name != "input_ids":
        pytest.skip("its texts begin with what the model is given, and sounds are of one length")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    made = ran(model, result.model, {"input_ids": ids(2, 9), "attention_mask": mask})
    assert made == {"padded prefill": 1, "padded decode": 7}


def test_a_text_longer_than_the_window_is_decoded_on_a_graph(pair) -> None:
    model, result = pair
    if not getattr(model.config, "sliding_window", None):
        pytest.skip("no layer has a window")
    expected = tokens(model, ids(), max_new_tokens=30, min_new_tokens=30)
    before = counted(result.model)
    assert torch.equal(tokens(result.model, ids(), max_new_tokens=30, min_new_tokens=30), expected)
    after = counted(result.model)
    assert after["decode past the window"] - before["decode past the window"] >= 29 - WINDOW + 7
    assert sum(after.values()) - sum(before.values()) >= 27, "the original runs a token or two where the window fills"


def test_a_prompt_that_is_longer_than_the_window() -> None:
    model = decoder("Mistral")
    inputs = {"input_ids": ids(1, WINDOW + 5)}
    result = optimize(model, kwargs=inputs, transformations="MergeLinears", keep="all", seconds=0.01)
    assert result.verification.ok, result.verification
    made = ran(model, result.model, {"input_ids": ids(2, WINDOW + 7)})
    assert made == {"prefill": 1, "decode": 7}


def test_what_a_model_keeps_and_computes_with_is_watched() -> None:
    import transformers

    class Shifted(transformers.LlamaForCausalLM):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.shift = 0.0

        def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
            self.shift = float(input_ids.shape[1])
            return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

        @functools.wraps(transformers.LlamaForCausalLM.forward)
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            result.logits = result.logits * self.shift
            return result

    model = Shifted(decoder("Llama").config).eval()
    dropin = optimize(model, kwargs=example(model), transformations="MergeLinears", keep="all", seconds=0.01).model
    for shift in (0.0, 3.0):
        model.shift = dropin.shift = shift
        with torch.no_grad():
            assert torch.allclose(dropin(ids()).logits, model(ids()).logits, atol=1e-5)
    assert torch.equal(tokens(dropin, ids()), tokens(model, ids()))
    assert counted(dropin)["forward"] == 1


def test_a_cache_that_the_result_does_not_have_is_the_originals_business() -> None:
    """Of an encoder's class with a head for texts; it takes a cache, and whether it fills it is its own affair."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, vocab_size=64)).eval()
    result = optimize(model, kwargs=example(model), transformations="MergeLinears", keep="all", seconds=0.01)
    assert result.verification.ok, result.verification
    assert [graph.name for graph in result.graphs] == ["forward"]
    assert torch.equal(tokens(result.model, ids()), tokens(model, ids()))
    for compiled in (False, True):
        lengths = []
        for each in (model, result.model):
            cache = transformers.DynamicCache(config=model.config)
            run = torch.compile(each, backend="eager", fullgraph=True) if compiled else each
            with torch.no_grad():
                assert run(ids(), past_key_values=cache).past_key_values is None
            lengths.append(cache.get_seq_length())
        assert lengths[0] == lengths[1]
    before = counted(result.model)
    with torch.no_grad():
        result.model(ids())
    assert counted(result.model)["forward"] == before["forward"] + 1


def test_what_no_graph_covers_is_never_wrong(pair) -> None:
    model, result = pair
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        options |= example(model)
        assert torch.equal(tokens(result.model, **options), tokens(model, **options))


@pytest.mark.parametrize("former", [False, True])
def test_the_cache_that_is_given_is_filled(pair, former: bool) -> None:
    from transformers import DynamicCache

    model, result = pair
    present = name_in(inspect.signature(model.forward).parameters)
    name = "past_key_values" if former else present  # the same before transformers 5.24, which takes both
    if model.config.is_encoder_decoder:
        pytest.skip("its caches are made by generate, which is tested above")
    positions = torch.arange(7).expand(2, 7)
    for each in (model, result.model):
        each.eval()
    ran_before = sum(grafts_of(result.model).calls.values())
    caches, logits = [], []
    for each in (model, result.model):
        cache = DynamicCache(config=each.config)
        given = {name: cache, "logits_to_keep": 1}
        with torch.no_grad():
            first = each(ids(), position_ids=positions, **given)
            assert getattr(first, name) is getattr(first, present) is cache
            assert cache.get_seq_length() == 7
            last = each(ids(2, 1), position_ids=torch.full((2, 1), 7), use_cache=True, **given)
            assert getattr(last, name) is getattr(last, present) is cache
        caches.append(cache)
        logits.append(last.logits)
    assert sum(grafts_of(result.model).calls.values()) == ran_before + 2
    assert torch.allclose(*logits, atol=1e-5)
    assert caches[1].get_seq_length() == 8
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert vars(mine).keys() == vars(theirs).keys()
        for name, kept in vars(theirs).items():
            assert _close(vars(mine)[name], kept), name


def _close(one: object, other: object) -> bool:
    if isinstance(other, dict):
        return isinstance(one, dict) and all(_close(one[name], each) for name, each in other.items())
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.shape == other.shape and torch.allclose(one, other, atol=1e-5)
    return one == other


def test_compiled_in_one_graph_it_fills_the_cache(pair) -> None:
    from transformers import DynamicCache

    model, result = pair
    if model.config.is_encoder_decoder:
        pytest.skip("its caches are made by generate")
    torch.compiler.reset()  # all drop-ins of a process have one code, and so share its limit of recompilations
    compiled = torch.compile(result.model, fullgraph=True, backend="eager")
    found = []
    for each in (model, compiled):
        cache = DynamicCache(config=model.config)
        options = {"past_key_values": cache, "logits_to_keep": 1}
        with torch.no_grad():
            each(input_ids=ids(), position_ids=torch.arange(7).expand(2, 7), **options)
            found.append(each(input_ids=ids(2, 1), position_ids=torch.full((2, 1), 7), **options).logits)
        assert cache.get_seq_length() == 8
    assert torch.allclose(*found, atol=1e-5)


def test_a_token_costs_few_calls_in_python_beside_its_graph(pair) -> None:
    _, result = pair
    calls = []

    def count(frame, event, argument) -> None:
        if event == "call" and "regraft" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    options = {**example(result.model, 1), "min_new_tokens": 8}
    tokens(result.model, **options)
    sys.setprofile(count)
    try:
        tokens(result.model, **options)
    finally:
        sys.setprofile(None)
    assert len(calls) / 8 < 120, sorted(calls)


def test_the_graphs_of_one_model_hold_one_copy_of_a_rewritten_weight(pair) -> None:
    model, result = pair
    known = {p.data_ptr() for p in model.parameters()}
    made = [
        {p.data_ptr() for p in graph.graph_module.parameters() if p.data_ptr() not in known} for graph in result.graphs
    ]
    assert all(more <= made[0] for more in made[1:])


def test_undone_it_still_generates(pair) -> None:
    model, result = pair
    result.undo()
    assert all(not step.kept for step in result.steps)
    assert ran(model, result.model, example(model)) == {"prefill": 1, "decode": 7}


class Adapted(torch.nn.Module):
    """As peft does it: generates with the model within."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = decoder("Llama")

    def forward(self, input_ids):
        return self.base_model.model(input_ids=input_ids)

    def generate(self, *args, **kwargs):
        return self.base_model.model.generate(*args, **kwargs)


def test_a_model_that_generates_with_another_within_it_says_so(caplog) -> None:
    model = Adapted().eval()
    result = optimize(model, kwargs={"input_ids": ids(2, 7)}, transformations=[], keep="all", seconds=0.01)
    said = "model.base_model.model = regraft.optimize(model.base_model.model, ...).model"
    assert any(said in note for note in result.notes)
    assert said in caplog.text
    expected = tokens(model, input_ids=ids(2, 7))
    inner = optimize(model.base_model.model, kwargs={"input_ids": ids(2, 7)}, keep="all", engine="eager", seconds=0.01)
    model.base_model.model = inner.model
    assert torch.equal(tokens(model, input_ids=ids(2, 7)), expected)
    assert counted(inner.model)["decode"] > 0
    assert not any("generate calls" in note for note in inner.notes)


@pytest.mark.parametrize("decides", ["of the mask", "of the steps"])
def test_what_a_model_reads_of_its_inputs_is_asked_at_each_step_or_no_graph_is_made(decides: str) -> None:
    plain = decoder("Llama")

    class Deciding(type(plain)):
        @functools.wraps(type(plain).forward)
        def forward(self, *args, attention_mask=None, **kwargs):
            result = super().forward(*args, attention_mask=attention_mask, **kwargs)
            if attention_mask is not None:
                full = bool(attention_mask.all())
                doubled = full if decides == "of the mask" else attention_mask.sum().item() % 4 == 0
                result.logits = result.logits * (2 if doubled else -1)
            return result

    model = copy.deepcopy(plain)
    model.__class__ = Deciding
    inputs = {"input_ids": ids(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    ids_alone = {"input_ids": ids(2, 7)}  # generate gives the mask
    settings = {"transformations": "MergeLinears", "keep": "all", "seconds": 0.01, "engine": "eager"}
    result = optimize(model, kwargs=ids_alone, **settings)
    unmade = [note for note in result.notes if "was not captured" in note]
    padded = inputs["attention_mask"].clone()
    padded[0, 0] = 0
    if decides == "of the mask":
        assert not unmade
        assert ran(model, result.model, inputs) == {"prefill": 1, "decode": 7}
        assert ran(model, result.model, {**inputs, "attention_mask": padded}) == {
            "padded prefill": 1,
            "padded decode": 7,
        }
    else:
        assert len(unmade) == 1
        assert unmade[0].startswith("padded decode was not captured")
        assert "what it reads of its inputs and flags is not the same in each call" in unmade[0]
        assert ran(model, result.model, {**inputs, "attention_mask": padded}) == {"padded prefill": 1}
