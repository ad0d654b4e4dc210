"""A call in one form, however it was written: by name, without what says nothing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from regraft.capture import caches
from regraft.capture.cache_names import FORMER, NAMES, name_in
from regraft.capture.transformers_adapter import decoder_config, is_pretrained

_SETTINGS = ("return_dict", "use_cache", "output_attentions", "output_hidden_states")
_PLAIN = (bool, int, float, str, type(None))
_OTHER = object()
"""A default that no argument is taken for: of another type than those, or none at all."""


class Reader:
    """Reads calls of one model.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = tuple(p.name for p in parameters if p.kind in positional)
        self.only = sum(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters)
        self.star = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        self.config = getattr(model, "config", None)
        self.defaults = {p.name: p.default if type(p.default) in _PLAIN else _OTHER for p in parameters}
        self.cache_name = name_in([p.name for p in parameters]) if is_pretrained(model) else None
        renamed = self.cache_name == NAMES[0]
        self._former = [name for name in FORMER if renamed and name not in self.defaults]
        self._of_others: Any = None if is_pretrained(model) else _OTHER  # the default of what no parameter is named for
        self._configured: dict[str, bool] = {}
        if is_pretrained(model):  # None means "as the config says" for each of these, in every one of its models
            known = {name: getattr(model.config, name, None) for name in _SETTINGS}
            if known["use_cache"] is None:  # a model of images and text has it in the part of its config for text
                known["use_cache"] = getattr(decoder_config(model), "use_cache", None)
            self._configured = {name: value for name, value in known.items() if type(value) is bool}
            unsaid = {name: value for name, value in self._configured.items() if self.defaults.get(name) is None}
            self.defaults.update(unsaid)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, without those that are what they would be anyway.

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
        for name in self._former:  # which transformers takes for the present name, too
            if name in given and self.cache_name not in given:
                given[str(self.cache_name)] = given.pop(name)
        if len(given) < len(args) + len(kwargs):  # what was given twice is for the model to refuse
            given["given twice"] = True
        if (self.star or self.only) and len(self.unnamed(given)) > len(args):  # and so is a name of what has none
            given["given by name"] = True
        return {
            name: value
            for name, value in given.items()
            if type(value) not in _PLAIN or not self._says_nothing(name, value)
        }

    def unnamed(self, call: Mapping[str, Any]) -> tuple[str, ...]:
        """The names under which `read` lists what a call of the model cannot give by name, and what stands before it.

        Args:
            call: What `read` returned.

        Example:
            >>> Reader(nn.Sequential()).unnamed({"input": 1})
            ()
        """
        starred: list[str] = []
        while self.star and f"{self.star}_{len(starred)}" in call:
            starred.append(f"{self.star}_{len(starred)}")
        if starred:
            return (*self.names, *starred)
        last = self.only
        while last and self.names[last - 1] not in call:
            last -= 1
        return self.names[:last]

    def apart(self, call: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments for the model: by name what can be.

        Args:
            call: What `read` returned.
        """
        names = self.unnamed(call)
        args = tuple(call[name] if name in call else self.defaults[name] for name in names)
        return args, {name: value for name, value in call.items() if name not in names}

    def _says_nothing(self, name: str, value: Any) -> bool:
        if value is None:
            value = self._configured.get(name)
        default = self.defaults.get(name, self._of_others)
        return type(value) is type(default) and bool(value == default)

    def without_empty_cache(self, call: dict[str, Any]) -> tuple[dict[str, Any], Any, caches.State | None]:
        """The call less a cache that has nothing in it, the cache that the call is to fill, or None, and what is in it.

        A model that is given no cache makes one; so both are one call, but for the object that is filled.

        Args:
            call: What `read` returned.
        """
        cache = None if self.cache_name is None else call.get(self.cache_name)
        state = None if cache is None else caches.state_of(cache)
        if state is None:
            return call, None, None
        if not state.form.empty or not self.defaults.get("use_cache") or "use_cache" in call:
            return call, cache, state
        if not caches.begins_alike(state.form, self.config):
            return call, cache, state
        return {name: value for name, value in call.items() if name != self.cache_name}, cache, None
