"""Which calls of a model `generate` makes: the model is asked, and what it is called with is written down."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regraft.capture import caches, filling
from regraft.capture.cache_names import name_in, returned_in
from regraft.dropin import Reader

logger = logging.getLogger("regraft")

_TOKENS = 4
_LARGEST = 1 << 24  # elements of the keys and values that are made up, at most


def calls_of_generate(
    model: nn.Module, reader: Reader, call: Mapping[str, Any], padded: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls that a short greedy generation makes, in the form of the reader.

    Args:
        model: A model of transformers; nothing is found for any other.
        reader: Reads calls of it.
        call: A call of it, from which the generation starts.
        padded: Whether a token of the first text is masked: texts of one length are decoded without a mask.

    Returns:
        Those that begin with an empty cache, and those that go on with one that has something in it.
    """
    if reader.cache_name is None or not model.can_generate() or reader.cache_name in call:  # type: ignore[operator]
        return [], []
    first: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    inner = model.forward

    @functools.wraps(inner)  # generate looks at the signature to see what it may pass
    def forward(*args: Any, **kwargs: Any) -> Any:
        read, cache, _ = reader.without_empty_cache(reader.read(args, kwargs))
        before = copy.deepcopy(read)  # the model fills the cache in place
        result = inner(*args, **kwargs)
        if cache is not None and returned_in(result) is not None:
            (later if read.get(str(reader.cache_name)) is cache else first).append(before)
        return result

    # what is decoded begins as `generate` begins it, not with the example's targets
    inputs = {name: v for name, v in call.items() if isinstance(v, Tensor) and not name.startswith("decoder_")}
    if padded:
        mask = _padded(reader, inputs)
        if mask is None:
            return [], []
        inputs["attention_mask"] = mask
    had = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.generate(**inputs, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, num_beams=1)  # type: ignore[operator]
    except Exception as error:  # whatever a model raises that cannot generate from these inputs
        logger.info("no decoding was captured: generate raised %s: %s", type(error).__name__, error)
    finally:
        del model.__dict__["forward"]
        if had is not None:
            model.__dict__["forward"] = had
    return first, later


def _padded(reader: Reader, inputs: Mapping[str, Tensor]) -> Tensor | None:
    tokens = inputs.get("input_ids")
    if "attention_mask" not in reader.names or tokens is None or tokens.dim() != 2 or tokens.shape[1] < 2:
        return None
    mask = torch.ones_like(tokens, dtype=torch.long)
    mask[0, 0] = 0
    return mask


def beyond_the_window(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `generate` calls where a text has become longer than the window of a layer, made from shorter calls.

    Args:
        calls: Calls with a cache in them.

    Returns:
        None at all where no layer has a window, the calls are such ones already, or would take long to compute.
    """
    found = []
    for more, call in enumerate(calls, 1):
        name = str(name_in(call))
        cache = call[name]
        state = caches.state_of(cache)
        if state is None or state.form.halves or state.form.states or state.form.longest_window <= 0:
            return []
        window = state.form.longest_window
        if more == 1 and len(state.leaves[-1]) >= window:
            return []
        if sum(leaf.numel() // leaf.shape[2] * window for leaf in state.leaves[:-1]) > _LARGEST:
            return []
        longer = {**call, name: filling.beyond_window(cache, more)}
        if "position_ids" in call:
            longer["position_ids"] = torch.full_like(call["position_ids"], window + more)
        if "attention_mask" in call:
            mask = call["attention_mask"]
            longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), window + more + 1 - mask.shape[1])], 1)
        found.append(longer)
    return found
