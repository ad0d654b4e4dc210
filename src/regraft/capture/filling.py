"""Caches that are filled: as the model would have, in the place of another one, and beyond their windows."""

from __future__ import annotations

import copy
from typing import Any

import torch

from regraft.capture import linear_states
from regraft.capture.cache_names import name_in, returned_in
from regraft.capture.caches import restore, state_of


def fill(cache: Any, result: Any) -> Any:
    """Give a cache the keys and values that a graph returned, and the result that cache: as the model would have.

    Args:
        cache: the cache that the caller holds.
        result: what the graph returned.
    """
    made = returned_in(result)
    if made is not cache:
        _fill(cache, made)
        setattr(result, str(name_in(vars(result))), cache)
    return result


def _fill(cache: Any, made: Any) -> None:
    if hasattr(cache, "is_updated"):
        _fill(cache.self_attention_cache, made.self_attention_cache)
        _fill(cache.cross_attention_cache, made.cross_attention_cache)
        cache.is_updated.update(made.is_updated)
        return
    for layer, new in zip(cache.layers, made.layers):
        vars(layer).update(vars(new))
    cache.layers.extend(made.layers[len(cache.layers) :])


def twin(cache: Any) -> Any:
    """Another cache with the same keys and values, to be filled in the place of the first.

    Args:
        cache: a cache that can be taken apart.
    """
    other = copy.copy(cache)
    if hasattr(cache, "is_updated"):
        other.self_attention_cache = twin(cache.self_attention_cache)
        other.cross_attention_cache = twin(cache.cross_attention_cache)
        other.is_updated = dict(cache.is_updated)
    else:
        other.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in other.layers:
            if hasattr(layer, "conv_states"):
                linear_states.separate(layer)
    return other


def beyond_window(cache: Any, more: int) -> Any:
    """A cache of keys and values that has seen more tokens than any window of it is long; None for any other.

    Its keys and values are drawn at random, like those that it is made from.

    Args:
        cache: a cache that can be taken apart.
        more: by how many tokens the longest window is exceeded.
    """
    state = state_of(cache)
    if state is None or state.form.halves or state.form.states or state.form.longest_window <= 0:
        return None
    count = state.form.longest_window + more
    windows = [window for window in state.form.windows if window is not None and window >= 0]
    lengths = [min(window - 1, count) if window else count for window in windows]
    generator = torch.Generator().manual_seed(0)
    leaves = []
    for index, leaf in enumerate(state.leaves[:-1]):
        shape = (*leaf.shape[:2], lengths[index // 2], leaf.shape[3])
        leaves.append(torch.randn(shape, generator=generator).to(leaf))
    return restore(state.form, [*leaves, torch.empty((count, 0))])
