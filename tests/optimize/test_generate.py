"""`generate` of a decoder runs on the rewritten graphs, prefill and decode, and gives the same tokens."""

from __future__ import annotations

import pytest
import torch
from models import decoder, ids

from regraft.dropin import grafts_of
from regraft.optimize import optimize

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["GPT2", "Llama", "Qwen2"])
def pair(request):
    model = decoder(request.param)
    result = optimize(model, kwargs={"input_ids": ids()}, transformations="MergeLinears", keep="all", seconds=0.01)
    assert result.verification.ok, result.verification
    assert [graph.name for graph in result.graphs if graph.used] == ["forward", "prefill", "decode"]
    return model, result


def tokens(model, *args, **kwargs) -> torch.Tensor:
    return model.generate(*args, **{"max_new_tokens": 8, "do_sample": False, **kwargs})


def counted(dropin) -> dict[str, int]:
    return dict(grafts_of(dropin).calls)


@pytest.mark.parametrize(("batch", "length"), [(2, 7), (1, 5), (3, 1)])
def test_greedy_tokens_are_the_same_and_the_graphs_made_them(pair, batch: int, length: int) -> None:
    model, result = pair
    before = counted(result.model)
    expected = tokens(model, ids(batch, length), min_new_tokens=8)
    assert torch.equal(tokens(result.model, ids(batch, length), min_new_tokens=8), expected)
    after = counted(result.model)
    assert after["prefill"] == before["prefill"] + 1
    assert after["decode"] == before["decode"] + 7


def test_beams_and_padding_are_never_wrong(pair) -> None:
    model, result = pair
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    for options in (
        {"num_beams": 2},
        {"attention_mask": mask},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ):
        assert torch.equal(tokens(result.model, ids(), **options), tokens(model, ids(), **options)), options


def test_the_cache_that_is_given_is_filled(pair) -> None:
    from transformers import DynamicCache

    model, result = pair
    positions = torch.arange(7).expand(2, 7)
    for each in (model, result.model):
        each.eval()
    caches, logits = [], []
    for each in (model, result.model):
        cache = DynamicCache(config=each.config)
        with torch.no_grad():
            first = each(ids(), past_key_values=cache, position_ids=positions, logits_to_keep=1)
            assert first.past_key_values is cache
            assert cache.get_seq_length() == 7
            last = each(
                ids(2, 1), past_key_values=cache, position_ids=torch.full((2, 1), 7), logits_to_keep=1, use_cache=True
            )
            assert last.past_key_values is cache
        caches.append(cache)
        logits.append(last.logits)
    assert torch.allclose(*logits, atol=1e-5)
    assert caches[1].get_seq_length() == 8
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(mine.values, theirs.values, atol=1e-5)


def test_the_graphs_of_one_model_hold_one_copy_of_a_rewritten_weight(pair) -> None:
    model, result = pair
    known = {p.data_ptr() for p in model.parameters()}
    made = [
        {p.data_ptr() for p in graph.graph_module.parameters() if p.data_ptr() not in known} for graph in result.graphs
    ]
    assert made[0] == made[1] == made[2]


def test_undone_it_still_generates(pair) -> None:
    model, result = pair
    result.undo()
    assert all(not step.kept for step in result.steps)
    before = counted(result.model)
    assert torch.equal(tokens(result.model, ids(), min_new_tokens=8), tokens(model, ids(), min_new_tokens=8))
    assert counted(result.model)["decode"] == before["decode"] + 7
