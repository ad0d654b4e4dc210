"""transformers' caches of keys and values as lists of tensors: what a graph takes and gives in their place.

A model fills its cache in place, and a part of the cache's state is numbers. A graph sees its tensors alone, and for
the number of tokens that a window has seen a tensor without elements that is as long: a size, and so it may vary.
A cache that is written in place, or that keeps something else, has no such form and stays what it is.

This is the one file that knows how transformers' caches are made inside. In a transformers where they are made another
way every cache stays what it is, and `tests/capture/test_private_apis.py` fails.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ATTRIBUTES = {"layers", "layer_class_to_replicate", "offloading"}
_LAYER = {"keys", "values", "is_initialized"}
_WINDOW = {"sliding_window", "cumulative_length", "record_past"}


@dataclass(frozen=True)
class Form:
    """What a cache is beside its tensors.

    Args:
        windows: for each layer the length of its window, zero without one; -1 less that where nothing is in it yet.
        grows: whether layers are added as they are needed.
        halves: of the cache of an encoder-decoder, that of its own tokens and that of the encoder's.
        filled: of such a one, for each layer whether it has what it needs of the encoder.
    """

    windows: tuple[int, ...] = ()
    grows: bool = False
    halves: tuple[Form, ...] = ()
    filled: tuple[tuple[int, bool], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is in it."""
        return all(window < 0 for window in self.windows) and all(half.empty for half in self.halves)


class State:
    """A cache taken apart.

    Args:
        form: what it is.
        leaves: its keys and values by layer, and the count of tokens where a layer has a window.
    """

    def __init__(self, form: Form, leaves: list[Any]) -> None:
        self.form = form
        self.leaves = leaves


def state_of(cache: Any) -> State | None:
    """A cache taken apart; None for anything that has no such form.

    Args:
        cache: any object.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None or not _is_known(library):
        return None
    if type(cache) is library.EncoderDecoderCache:
        halves = [state_of(cache.self_attention_cache), state_of(cache.cross_attention_cache)]
        own, cross = halves
        if own is None or cross is None:
            return None
        form = Form(halves=(own.form, cross.form), filled=tuple(cache.is_updated.items()))
        return State(form, own.leaves + cross.leaves)
    if type(cache) is not library.DynamicCache or cache.offloading or vars(cache).keys() != _ATTRIBUTES:
        return None
    replicated = cache.layer_class_to_replicate
    if replicated is not None and replicated is not library.DynamicLayer:
        return None
    windows: list[int] = []
    leaves: list[Any] = []
    counts: list[Any] = []
    for layer in cache.layers:
        kind = type(layer)
        if kind is library.DynamicLayer:
            window = 0
        elif kind is library.DynamicSlidingWindowLayer and not layer.record_past:
            window = layer.sliding_window
            if layer.is_initialized:
                counts.append(layer.cumulative_length)
        else:
            return None
        windows.append(window if layer.is_initialized else -1 - window)
        if layer.is_initialized:
            leaves += (layer.keys, layer.values)
    if any(count != counts[0] for count in counts):
        return None
    leaves += [torch.empty((count, 0)) for count in counts[:1]]
    return State(Form(tuple(windows), replicated is not None), leaves)


@functools.cache
def _is_known(library: Any) -> bool:
    """Whether the caches of this transformers are made inside as this file takes them apart."""
    try:
        cache, layer = library.DynamicCache(), library.DynamicLayer()
        pair, window = library.EncoderDecoderCache(cache, cache), library.DynamicSlidingWindowLayer(sliding_window=2)
    except (AttributeError, TypeError):
        return False
    attributes = [vars(cache).keys() == _ATTRIBUTES, vars(layer).keys() == _LAYER, hasattr(pair, "is_updated")]
    return all(attributes) and vars(window).keys() >= _LAYER | _WINDOW


def restore(form: Form, leaves: list[Any]) -> Any:
    """The cache that was taken apart.

    Args:
        form: what it is.
        leaves: its tensors.
    """
    from transformers import cache_utils as library

    if form.halves:
        count = _size(form.halves[0])
        cache = library.EncoderDecoderCache(
            restore(form.halves[0], leaves[:count]), restore(form.halves[1], leaves[count:])
        )
        cache.is_updated = dict(form.filled)
        return cache
    layers = []
    given = iter(leaves)
    for window in form.windows:
        length = window if window >= 0 else -1 - window
        layer = library.DynamicSlidingWindowLayer(sliding_window=length) if length else library.DynamicLayer()
        if window >= 0:
            layer.keys, layer.values = next(given), next(given)
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.is_initialized = True
            if length:
                layer.cumulative_length = leaves[-1].shape[0]
        layers.append(layer)
    cache = library.DynamicCache()
    cache.layers = layers
    cache.layer_class_to_replicate = library.DynamicLayer if form.grows else None
    return cache


def _size(form: Form) -> int:
    """How many tensors there are in a half."""
    windows = [window for window in form.windows if window >= 0]
    return 2 * len(windows) + any(windows)


def unfold(value: Any) -> Any:
    """A value with every cache in it taken apart that can be.

    Args:
        value: any nested value.
    """
    if "transformers.cache_utils" not in sys.modules or isinstance(value, Tensor):
        return value
    return pytree.tree_map(lambda leaf: state_of(leaf) or leaf, value, is_leaf=lambda part: state_of(part) is not None)


def beyond_window(cache: Any, more: int) -> Any:
    """A cache that has seen more tokens than any window of it is long; None where it has no window.

    Its keys and values are drawn at random, like those that it is made from.

    Args:
        cache: a cache that can be taken apart.
        more: by how many tokens the longest window is exceeded.
    """
    state = state_of(cache)
    if state is None or state.form.halves or not any(window > 0 for window in state.form.windows):
        return None
    count = max(state.form.windows) + more
    lengths = [min(window - 1, count) if window else count for window in state.form.windows if window >= 0]
    generator = torch.Generator().manual_seed(0)
    leaves = []
    for index, leaf in enumerate(state.leaves[:-1]):
        shape = (*leaf.shape[:2], lengths[index // 2], leaf.shape[3])
        leaves.append(torch.randn(shape, generator=generator).to(leaf))
    return restore(state.form, [*leaves, torch.empty((count, 0))])


def fill(cache: Any, result: Any) -> Any:
    """Give a cache the keys and values that a graph returned, and the result that cache: as the model would have.

    Args:
        cache: the cache that the caller holds.
        result: what the graph returned.
    """
    made = result.past_key_values
    if made is not cache:
        _fill(cache, made)
        result.past_key_values = cache
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
    return other


def begins_alike(form: Form, config: Any) -> bool:
    """Whether an empty cache is what a model makes itself where it is given none.

    Args:
        form: the form of the cache.
        config: the config of the model.
    """
    if form.halves:
        return all(begins_alike(half, config) for half in form.halves)
    from transformers import cache_utils as library

    made = state_of(library.DynamicCache(config=config))
    if made is None:
        return False
    return form.windows == made.form.windows or (form.grows and all(window == -1 for window in made.form.windows))


def _names(form: Form) -> Iterator[str]:
    for half, name in zip(form.halves, ("self_attention_cache", "cross_attention_cache")):
        yield from (f"{name}.{inner}" for inner in _names(half))
    for index, window in enumerate(form.windows):
        if window >= 0:
            yield from (f"layers[{index}].keys", f"layers[{index}].values")
    if any(window > 0 for window in form.windows):
        yield "count"


pytree.register_pytree_node(
    State,
    lambda state: (state.leaves, state.form),
    lambda leaves, form: restore(form, list(leaves)),
    flatten_with_keys_fn=lambda state: (
        [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(_names(state.form), state.leaves, strict=True)],
        state.form,
    ),
)
