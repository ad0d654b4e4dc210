"""The states of linear attention in transformers' caches: taken apart, put together, and assigned for a graph."""

from __future__ import annotations

import copy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import regraft as rg
from regraft.capture import caches, filling, linear_states, transformers_adapter

library: Any = pytest.importorskip("transformers.cache_utils")

WIDTH = 4
KINDS = {
    "states": lambda count: library.LinearAttentionLayer(number_of_states=count),
    "states and keys": lambda count: library.LinearAttentionAndFullAttentionLayer(number_of_states=count),
    "states and a window": lambda count: library.LinearAttentionAndSlidingWindowAttentionLayer(
        sliding_window=3, number_of_states=count
    ),
}


def inputs(tokens: int, states: int = 1, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What a layer is told of some tokens: for each state its convolution's and its recurrent part; keys and values."""
    made = [(torch.randn(2, 5, tokens).to(dtype), torch.randn(2, 3, 5).to(dtype)) for _ in range(states)]
    return [*made, (torch.randn(2, 2, tokens, 3), torch.randn(2, 2, tokens, 3))]


def tell(layer: Any, told: list[Any]) -> list[Any]:
    """Give a layer new tokens; what it returns, in the same order."""
    returned = []
    for index, (conv, recurrent) in enumerate(told[:-1]):
        returned.append(layer.update_conv_state(conv, state_idx=index, conv_kernel_size=WIDTH))
        returned.append(layer.update_recurrent_state(recurrent, state_idx=index))
    return returned + (list(layer.update(*told[-1])) if hasattr(layer, "keys") else [])


def filled(kind: str, states: int = 1, tokens: int = 6) -> Any:
    cache = library.DynamicCache()
    cache.layers = [KINDS[kind](states), library.DynamicLayer()]
    tell(cache.layers[0], inputs(tokens, states))
    cache.layers[1].update(torch.randn(2, 2, tokens, 3), torch.randn(2, 2, tokens, 3))
    return cache


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(each, other[name]) for name, each in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("states", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_comes_back_as_transformers_made_it_and_goes_on_as_that_does(kind: str, states: int) -> None:
    cache = filled(kind, states)
    state = caches.state_of(cache)
    assert state is not None
    other = caches.restore(state.form, state.leaves)
    again = caches.state_of(other)
    assert again is not None
    assert again.form == state.form
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert type(one) is type(two)
        assert same(vars(one), vars(two))
    more = inputs(1, states)
    other = copy.deepcopy(other)  # the two share tensors, and a model writes into them
    assert same(dict(enumerate(tell(cache.layers[0], more))), dict(enumerate(tell(other.layers[0], more))))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_one_and_one_that_was_emptied_are_not_one_form(kind: str) -> None:
    empty, emptied = library.DynamicCache(), filled(kind)
    empty.layers = [KINDS[kind](1), library.DynamicLayer()]
    forms = {}
    emptied.reset()
    for name, cache in (("empty", empty), ("emptied", emptied), ("filled", filled(kind))):
        state = caches.state_of(cache)
        assert state is not None
        forms[name] = state.form
        assert state.form.empty is (name == "empty")
        again = caches.restore(state.form, state.leaves)
        assert same(vars(again.layers[0]), vars(cache.layers[0]))
    assert len(set(forms.values())) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [2, WIDTH, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_assigned_states_are_what_the_library_writes(kind: str, first: int, dtype: torch.dtype) -> None:
    ours, theirs = KINDS[kind](2), KINDS[kind](2)
    for tokens in (first, 1, 3):  # the prompt, the next token, several at once
        told = inputs(tokens, 2, dtype if tokens == first else torch.float64)
        with linear_states.assigned(library):
            mine = tell(ours, told)
        assert same(dict(enumerate(mine)), dict(enumerate(tell(theirs, told))))
        assert same(vars(ours), vars(theirs))
        assert all(state.is_contiguous() for state in ours.conv_states.values())


def test_assigned_states_leave_what_was_there() -> None:
    layer = KINDS["states"](1)
    tell(layer, inputs(6))
    was = layer.conv_states[0], layer.recurrent_states[0]
    copies = [state.clone() for state in was]
    with linear_states.assigned(library):
        tell(layer, inputs(1))
    assert all(map(torch.equal, was, copies))
    assert not torch.equal(layer.conv_states[0], copies[0])
    tell(layer, inputs(1))  # and outside of a capture the library's own write in place again
    assert layer.conv_states[0].data_ptr() != was[0].data_ptr()
    kept = layer.conv_states[0]
    tell(layer, inputs(1))
    assert layer.conv_states[0] is kept


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_is_filled_for_itself(kind: str, begun: bool) -> None:
    cache = filled(kind)
    if not begun:  # which flags the first token sets
        cache.layers[0] = KINDS[kind](1)
    was = copy.deepcopy(cache)
    other = filling.twin(cache)
    assert same(vars(other.layers[0]), vars(cache.layers[0]))
    tell(other.layers[0], inputs(1))
    assert same(vars(cache.layers[0]), vars(was.layers[0]))
    assert not same(vars(other.layers[0]), vars(cache.layers[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_keeps_more_than_the_next_token_needs_stays_what_it_is(kind: str) -> None:
    cache = filled(kind)
    cache.layers[0].activate_past_recording()
    assert caches.state_of(cache) is None


def test_only_the_batch_of_a_state_varies() -> None:
    state = caches.state_of(filled("states and a window"))
    assert state is not None
    assert len(state.leaves) == len(caches.varying_axes(state))
    assert [leaf.dim() for leaf in state.leaves] == [4, 4, 3, 3, 4, 4, 2]
    assert caches.varying_axes(state) == [(0, 2), (0, 2), (0,), (0,), (0, 2), (0, 2), (0,)]


@pytest.mark.parametrize(
    "moved",
    [{"LinearAttentionAndFullAttentionLayer": None}, {"LinearAttentionLayer": lambda: SimpleNamespace(states={})}],
)
def test_a_layer_that_has_moved_stays_what_it_is(moved: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType(library.__name__)
    vars(other).update({name: each for name, each in {**vars(library), **moved}.items() if each is not None})
    cache = filled("states")
    assert caches.state_of(cache) is not None
    monkeypatch.setitem(sys.modules, library.__name__, other)
    assert caches.state_of(cache) is None
    with linear_states.assigned(other):
        assert library.LinearAttentionLayer.update_conv_state is not linear_states._assign_conv_state


_SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24, "pad_token_id": 0}


def test_a_triangular_system_is_solved_as_the_model_solves_it() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = {f"linear_{each}": 4 for each in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")}
    heads |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_SIZES, **heads, layer_types=["linear_attention"])).eval()
    ids = torch.randint(0, 32, (1, 9))
    gm = rg.trace(model, kwargs={"input_ids": ids, "use_cache": False})
    assert "solve_triangular" in gm.code
    assert len(gm.graph.nodes) < 300  # row by row it is more than 500 for each layer
    assert torch.equal(gm(input_ids=ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_state_space_is_scanned_token_by_token_as_the_model_scans_it() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    call = {"input_ids": torch.randint(0, 32, (1, 9)), "use_cache": False}
    counts = set()
    for scan in (False, True):  # only a compiled model scans by the operator of higher order
        model = MambaForCausalLM(MambaConfig(**_SIZES, state_size=4, use_associative_scan=scan)).eval()
        for way in transformers_adapter.ways(model):
            with way(), torch.no_grad():
                counts.add(len(torch.export.export(model, (), call).graph.nodes))
        assert torch.equal(rg.trace(model, kwargs=call)(**call).logits, model(**call).logits)
    assert len(counts) == 1
