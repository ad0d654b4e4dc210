"""Which calls of a model `generate` makes: the model is asked, and what it is called with is written down."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regraft.dropin import Reader

logger = logging.getLogger("regraft")

_TOKENS = 4


def calls_of_generate(
    model: nn.Module, reader: Reader, call: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls that a short greedy generation makes, in the form of the reader.

    Args:
        model: A model of transformers; nothing is found for any other.
        reader: Reads calls of it.
        call: A call of it, from which the generation starts.

    Returns:
        Those that begin with an empty cache, and those that go on with one that has something in it.
    """
    if not reader.has_cache or not model.can_generate() or "past_key_values" in call:  # type: ignore[operator]
        return [], []
    first: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    inner = model.forward

    @functools.wraps(inner)  # generate looks at the signature to see what it may pass
    def forward(*args: Any, **kwargs: Any) -> Any:
        read, cache = reader.without_empty_cache(reader.read(args, kwargs))
        if cache is not None:
            (later if read.get("past_key_values") is cache else first).append(copy.deepcopy(read))
        return inner(*args, **kwargs)

    inputs = {name: value for name, value in call.items() if isinstance(value, Tensor)}
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
