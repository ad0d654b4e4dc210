"""transformers' caches as lists of tensors: what a graph takes and gives in their place.

A model fills its cache in place, and a part of the cache's state is numbers. A graph sees its tensors alone, and for
the number of tokens that a window has seen a tensor without elements that is as long: a size, and so it may vary.
A cache of another kind (of one length from the start, quantized) has no such form and stays what it is.

This, `filling.py` and `linear_states.py` alone know how transformers' caches are made inside. In a transformers where
they are made another way every cache stays what it is, and `tests/capture/test_private_apis.py` fails.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regraft.capture import linear_states

_ATTRIBUTES = {"layers", "layer_class_to_replicate", "offloading"}
_LAYER = {"keys", "values", "is_initialized"}
_WINDOW = {"sliding_window", "cumulative_length", "record_past"}


@dataclass(frozen=True)
class Form:
    """What a cache is beside its tensors.

    Args:
        windows: for each layer the length of its window, zero without one; -1 less that where nothing is in it yet;
            None where a layer has no keys and values.
        grows: whether layers are added as they are needed.
        halves: of the cache of an encoder-decoder, that of its own tokens and that of the encoder's.
        filled: of such a one, for each layer whether it has what it needs of the encoder.
        states: for each layer what its states of linear attention are; empty where no layer has any.
    """

    windows: tuple[int | None, ...] = ()
    grows: bool = False
    halves: tuple[Form, ...] = ()
    filled: tuple[tuple[int, bool], ...] = ()
    states: tuple[tuple[linear_states.StateForm, ...], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is in it."""
        begun = any(any(state) for layer in self.states for state in layer)
        return not begun and not self.has_keys and all(half.empty for half in self.halves)

    @property
    def has_keys(self) -> bool:
        """Whether there are keys and values in a layer of it."""
        return any(window is not None and window >= 0 for window in self.windows)

    @property
    def longest_window(self) -> int:
        """How long the longest window is of those layers that have keys and values in them; zero without one."""
        return max((window for window in self.windows if window is not None), default=0)


class State:
    """A cache taken apart.

    Args:
        form: what it is.
        leaves: by layer its keys and values, then what else it keeps; last the count of tokens where one has a window.
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
    windows: list[int | None] = []
    states: list[tuple[linear_states.StateForm, ...]] = []
    leaves: list[Any] = []
    counts: list[int] = []  # symbols in a capture
    for layer in cache.layers:  # in one loop, since it is gone through for each token
        part = _taken_apart(layer, library)
        if part is None:
            return None
        windows.append(part.window)
        states.append(part.states)
        leaves += part.leaves
        if part.window is not None and part.window > 0:
            counts.append(layer.cumulative_length)
    if any(count != counts[0] for count in counts[1:]):
        return None
    leaves += [torch.empty((count, 0)) for count in counts[:1]]
    form = Form(tuple(windows), replicated is not None, states=tuple(states) if any(states) else ())
    return State(form, leaves)


class _Part(NamedTuple):
    """One layer of a cache: an entry of `Form.windows`, one of `Form.states`, and its tensors."""

    window: int | None
    states: tuple[linear_states.StateForm, ...]
    leaves: list[Any]


def _taken_apart(layer: Any, library: Any) -> _Part | None:
    window: int | None
    states: tuple[linear_states.StateForm, ...] = ()
    kind = type(layer)
    if kind is library.DynamicLayer:
        window = 0
    elif kind is library.DynamicSlidingWindowLayer and not layer.record_past:
        window = layer.sliding_window
    elif kind is library.DummyLayer:
        window = None
    elif kind in (kinds := linear_states.kinds(library)) and not layer.record_past:
        attends, slides = kinds[kind]
        window = (layer.sliding_window if slides else 0) if attends else None
        states = linear_states.form_of(layer)
    else:
        return None
    if window is not None and not layer.is_initialized:
        window = -1 - window
    leaves = [layer.keys, layer.values] if window is not None and window >= 0 else []
    return _Part(window, states, leaves + linear_states.leaves_of(layer, states) if states else leaves)


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


@functools.cache
def _keys_have_type(library: Any) -> bool:
    """Whether a layer notes the type of its keys, as before transformers 5.24."""
    layer = library.DynamicLayer()
    layer.lazy_initialization(torch.zeros(0), torch.zeros(0))
    return hasattr(layer, "dtype")


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
    for index, window in enumerate(form.windows):
        state = form.states[index] if form.states else ()
        layer = _empty_layer(library, window, len(state))
        if window is not None and window >= 0:
            layer.keys, layer.values = next(given), next(given)
            layer.device = layer.keys.device
            if _keys_have_type(library):
                layer.dtype = layer.keys.dtype
            layer.is_initialized = True
            if window:
                layer.cumulative_length = leaves[-1].shape[0]
        if state:
            linear_states.give(layer, state, given)
        layers.append(layer)
    cache = library.DynamicCache()
    cache.layers = layers
    cache.layer_class_to_replicate = library.DynamicLayer if form.grows else None
    return cache


def _empty_layer(library: Any, window: int | None, states: int) -> Any:
    length = window if window is None or window >= 0 else -1 - window
    settings: dict[str, int] = {"sliding_window": length} if length else {}
    if states:
        slides = (length is not None, bool(length))
        kind = next(kind for kind, has in linear_states.kinds(library).items() if has == slides)
        return kind(number_of_states=states, **settings)
    if length is None:
        return library.DummyLayer()
    return library.DynamicSlidingWindowLayer(**settings) if length else library.DynamicLayer()


@functools.lru_cache
def _size(form: Form) -> int:
    """How many tensors there are in a cache of a form."""
    return sum(1 for _ in _names(form))


def varying_axes(state: State) -> list[tuple[int, ...]]:
    """For each tensor the axes that differ from call to call: the batch, and the length so far of keys and values.

    Args:
        state: a cache taken apart.
    """
    names = [name.rpartition(".")[2] for name in _names(state.form)]
    return [(0, 2) if name in ("keys", "values") else (0,) for name in names]


def unfold(value: Any) -> Any:
    """A value with every cache in it taken apart that can be.

    Args:
        value: any nested value.
    """
    if "transformers.cache_utils" not in sys.modules or isinstance(value, Tensor):
        return value
    return pytree.tree_map(lambda leaf: state_of(leaf) or leaf, value, is_leaf=lambda part: state_of(part) is not None)


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
    alike = form.windows == made.form.windows and form.states == made.form.states
    return alike or (form.grows and all(window == -1 for window in made.form.windows))


def _names(form: Form) -> Iterator[str]:
    for half, name in zip(form.halves, ("self_attention_cache", "cross_attention_cache")):
        yield from (f"{name}.{inner}" for inner in _names(half))
    for index, window in enumerate(form.windows):
        if window is not None and window >= 0:
            yield from (f"layers[{index}].keys", f"layers[{index}].values")
        if form.states:
            yield from (f"layers[{index}].{name}" for name in linear_states.names(form.states[index]))
    if form.longest_window > 0:
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
