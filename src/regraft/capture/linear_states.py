"""The layers of transformers' caches that keep states of linear attention and of short convolutions.

Beside its tensors such a layer keeps which of its states are there yet, and how wide each convolution is. Models write
these states in place; a graph returns new ones, as it does keys and values.

With `capture/caches.py` this knows how transformers' caches are made inside.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: of one state: how wide its convolution is, zero without one; whether it has a recurrent part; whether it saw a token;
#: whether its layer has noted a type, as it does with its first convolution, but after keys and values does not
StateForm = tuple[int, bool, bool, bool]

_NUMBERS = {"number_of_states", "record_past"}
_STATES = {"conv_states", "recurrent_states"}
_FLAGS = {"is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size"}
_ATTRIBUTES = _NUMBERS | _STATES | _FLAGS | {"device", "dtype"}


@functools.cache
def kinds(library: Any) -> dict[type, tuple[bool, bool]]:
    """For each class of layers: whether it has keys and values too, and whether those have a window.

    Args:
        library: `transformers.cache_utils`; nothing is found in one whose layers are made another way.
    """
    try:
        layer = library.LinearAttentionLayer()
        found = {
            library.LinearAttentionLayer: (False, False),
            library.LinearAttentionAndFullAttentionLayer: (True, False),
            library.LinearAttentionAndSlidingWindowAttentionLayer: (True, True),
        }
    except (AttributeError, TypeError):
        return {}
    return found if vars(layer).keys() == _ATTRIBUTES else {}


def form_of(layer: Any) -> tuple[StateForm, ...]:
    """What a layer's states are beside their tensors.

    Args:
        layer: a layer of one of the `kinds`.
    """
    return tuple(
        (
            layer.conv_kernel_size[index] if layer.is_conv_states_initialized[index] else 0,
            layer.is_recurrent_states_initialized[index],
            layer.has_previous_state[index],
            layer.dtype is not None,
        )
        for index in range(layer.number_of_states)
    )


def leaves_of(layer: Any, form: tuple[StateForm, ...]) -> list[Tensor]:
    """The tensors of a layer's states, those of convolutions before the recurrent ones.

    Args:
        layer: a layer of one of the `kinds`.
        form: what its states are.
    """
    leaves = []
    for index, (width, recurrent, *_) in enumerate(form):
        leaves += [layer.conv_states[index]] if width else []
        leaves += [layer.recurrent_states[index]] if recurrent else []
    return leaves


def names(form: tuple[StateForm, ...]) -> list[str]:
    """What the tensors of a layer's states are called, in their order.

    Args:
        form: what the states are.
    """
    found = []
    for index, (width, recurrent, *_) in enumerate(form):
        found += [f"conv_states[{index}]"] if width else []
        found += [f"recurrent_states[{index}]"] if recurrent else []
    return found


def give(layer: Any, form: tuple[StateForm, ...], leaves: Iterator[Tensor]) -> None:
    """Give a new layer its states.

    Args:
        layer: a layer of one of the `kinds`, made for as many states.
        form: what they are.
        leaves: their tensors, first of what is left.
    """
    for index, (width, recurrent, previous, typed) in enumerate(form):
        if width:
            layer.conv_states[index] = next(leaves)
            layer.conv_kernel_size[index] = width
            layer.is_conv_states_initialized[index] = True
            if layer.device is None:
                layer.device = layer.conv_states[index].device
            if typed and layer.dtype is None:
                layer.dtype = layer.conv_states[index].dtype
        if recurrent:
            layer.recurrent_states[index] = next(leaves)
            layer.is_recurrent_states_initialized[index] = True
        layer.has_previous_state[index] = previous


def separate(layer: Any) -> None:
    """Give a copy of a layer states of its own, since a model writes them in place.

    Args:
        layer: what `copy.copy` made of a layer of one of the `kinds`.
    """
    for name in _STATES:
        states = getattr(layer, name)
        setattr(layer, name, {index: state if state is None else state.clone() for index, state in states.items()})
    for name in _FLAGS:
        setattr(layer, name, dict(getattr(layer, name)))


@contextlib.contextmanager
def assigned(library: Any) -> Iterator[None]:
    """With states that a model replaces where it would write in place: what is written into has no form in a graph.

    Args:
        library: `transformers.cache_utils`, or None.
    """
    if library is None or not kinds(library):
        yield
        return
    layer = library.LinearAttentionLayer
    was = layer.update_conv_state, layer.update_recurrent_state
    layer.update_conv_state, layer.update_recurrent_state = _assign_conv_state, _assign_recurrent_state
    try:
        yield
    finally:
        layer.update_conv_state, layer.update_recurrent_state = was


def _assign_conv_state(
    layer: Any, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
) -> Tensor:
    """The last inputs of a convolution, those before it included: what `update_conv_state` returns."""
    if not layer.is_conv_states_initialized[state_idx]:
        layer.lazy_initialization(conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size)
    kept = layer.conv_states[state_idx]
    width = layer.conv_kernel_size[state_idx]
    if layer.has_previous_state[state_idx]:
        whole = torch.cat([kept, conv_states], dim=-1)
    elif conv_states.shape[-1] < width:
        whole = F.pad(conv_states, (width - conv_states.shape[-1], 0))
    else:
        whole = conv_states
    layer.has_previous_state[state_idx] = True
    # not a view: the whole of a long text would be kept with it
    layer.conv_states[state_idx] = whole[..., -width:].to(kept.dtype).contiguous()
    return whole


def _assign_recurrent_state(layer: Any, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    if not layer.is_recurrent_states_initialized[state_idx]:
        layer.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
    kept = recurrent_states.to(layer.recurrent_states[state_idx].dtype)
    layer.recurrent_states[state_idx] = kept
    return kept
