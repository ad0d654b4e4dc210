"""transformers' caches of keys and values, which a model fills in place and a graph returns anew."""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import Tensor, nn


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers; it is imported by whoever made the model, never by this.

    Args:
        model: Any module.
    """
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def is_plain(cache: Any) -> bool:
    """Whether a cache is one whose whole state is its keys and values.

    One with a window counts its tokens, and a fixed one writes in place: neither can be returned anew.

    Args:
        cache: Any object.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None or type(cache) is not library.DynamicCache or getattr(cache, "offloading", False):
        return False
    replicated = getattr(cache, "layer_class_to_replicate", None)
    if not cache.layers and replicated not in (None, library.DynamicLayer):
        return False
    return all(type(layer) is library.DynamicLayer for layer in cache.layers)


def is_empty(cache: Any) -> bool:
    """Whether nothing has been put into a plain cache.

    Args:
        cache: A plain cache.
    """
    return not any(layer.is_initialized for layer in cache.layers)


def tensors(cache: Any) -> list[Tensor]:
    """The keys and values of a plain cache, in order.

    Args:
        cache: A plain cache.
    """
    return [tensor for layer in cache.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]


def fill(cache: Any, result: Any) -> Any:
    """Give a cache the keys and values that a graph returned, and the result that cache: as the model would have.

    Args:
        cache: The cache that the caller holds.
        result: What the graph returned.
    """
    made = result.past_key_values
    if made is not cache:
        for layer, new in zip(cache.layers, made.layers):
            vars(layer).update(vars(new))
        cache.layers.extend(made.layers[len(cache.layers) :])
        result.past_key_values = cache
    return result


def twin(cache: Any) -> Any:
    """Another cache with the same keys and values, to be filled in the place of the first.

    Args:
        cache: A plain cache.
    """
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other
