"""A call in one form, however it was written: by name, without what says nothing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from regraft.capture import caches
from regraft.capture.transformers_adapter import decoder_config, is_pretrained

_SETTINGS = ("return_dict", "use_cache", "output_attentions", "output_hidden_states")
_PLAIN = (bool, int, float, str)


class Reader:
    """Reads calls of one model.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = tuple(p.name for p in parameters if p.kind in positional)
        self.star = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        self.config = getattr(model, "config", None)
        self.defaults = {p.name: p.default for p in parameters if type(p.default) in _PLAIN}
        self.has_cache = is_pretrained(model) and any(p.name == "past_key_values" for p in parameters)
        if is_pretrained(model):  # None means "as the config says" for each of these, in every one of its models
            known = {name: getattr(model.config, name, None) for name in _SETTINGS}
            if known["use_cache"] is None:  # a model of images and text has it in the part of its config for text
                known["use_cache"] = getattr(decoder_config(model), "use_cache", None)
            self.defaults.update({name: value for name, value in known.items() if type(value) is bool})

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, without those that are None or what they would be anyway.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.

        Example:
            >>> Reader(nn.Linear(2, 2)).read((1,), {})
            {'input': 1}
        """
        given = dict(zip(self.names, args))
        if len(args) > len(self.names):
            given.update({f"{self.star}_{i}": value for i, value in enumerate(args[len(self.names) :])})
        given.update(kwargs)
        call = {}
        for name, value in given.items():
            if value is None or (type(value) in _PLAIN and self._says_nothing(name, value)):
                continue
            call[name] = value
        return call

    def _says_nothing(self, name: str, value: Any) -> bool:
        default = self.defaults.get(name)
        return type(value) is type(default) and bool(value == default)

    def without_empty_cache(self, call: dict[str, Any]) -> tuple[dict[str, Any], Any, caches.State | None]:
        """The call less a cache that has nothing in it, the cache that the call is to fill, or None, and what is in it.

        A model that is given no cache makes one; so both are one call, but for the object that is filled.

        Args:
            call: What `read` returned.
        """
        cache = call.get("past_key_values") if self.has_cache else None
        state = None if cache is None else caches.state_of(cache)
        if state is None:
            return call, None, None
        if not state.form.empty or not self.defaults.get("use_cache") or "use_cache" in call:
            return call, cache, state
        if not caches.begins_alike(state.form, self.config):
            return call, cache, state
        return {name: value for name, value in call.items() if name != "past_key_values"}, cache, None
