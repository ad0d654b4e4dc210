"""Whether a model is still what its graphs were captured from. Asked at each call, so it runs at the speed of C."""

from __future__ import annotations

import copy
from collections.abc import Collection
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_training = itemgetter("training")
_version = attrgetter("_version")
_dtype = attrgetter("dtype")
_trainable = attrgetter("requires_grad")


#: what saving, a pipeline or a loss writes into the config of a transformers model, and no forward computes with
_BOOKKEEPING = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_commit_hash"),
    *("task_specific_params", "id2label", "label2id", "problem_type"),
)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    settings = dict(config)
    for name in _BOOKKEEPING:
        settings.pop(name, None)
    return settings


class Watch:
    """Remembers the modules, weights, hooks and settings of a model, or of several that share some.

    Args:
        models: The models.
        held: The `id` of each tensor that the graphs hold themselves, whose values they see change.
    """

    def __init__(self, *models: nn.Module, held: Collection[int] = ()) -> None:
        modules = list(dict.fromkeys(chain.from_iterable(model.modules() for model in models)))
        self._states = list(map(vars, modules))
        tables: list[Any] = [table for m in modules for table in (m._parameters, m._buffers, m._modules) if table]
        self._tables: list[dict[str, Any]] = tables
        self._contents = list(chain.from_iterable(map(dict.values, self._tables)))
        inner = [getattr(m, name) for m in modules if m not in models for name in _HOOKS]
        self._hooks: list[dict[int, Any]] = [hooks for hooks in inner if isinstance(hooks, dict)]
        self._hook_count = sum(map(len, self._hooks))
        tensors = list({id(value): value for value in self._contents if isinstance(value, Tensor)}.values())
        self._parameters = [value for value in tensors if isinstance(value, nn.Parameter)]
        self._tensors = tensors
        self._dtypes = list(map(_dtype, tensors))
        self._read = [t for t in tensors if id(t) not in held and not t.is_inference()]
        self._versions = sum(map(_version, self._read))
        self._plain = [t for t in self._read if type(t) in (Tensor, nn.Parameter)]
        self._pointers = list(map(Tensor.data_ptr, self._plain))
        config = getattr(models[0], "config", None)
        self._config: dict[str, Any] = vars(config) if hasattr(config, "__dict__") else {}
        self._settings = copy.deepcopy(_settings(self._config))

    @property
    def trainable(self) -> bool:
        """Whether a parameter of the model wants a gradient."""
        return any(map(_trainable, self._parameters))

    @property
    def training(self) -> bool:
        """Whether a module of the model is in training mode."""
        return any(map(_training, self._states))

    def change(self) -> str | None:
        """What has changed since, as the end of a sentence; None where nothing has."""
        if not all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._contents)):
            return "a module or a weight of it was replaced"
        if sum(map(_version, self._read)) != self._versions:
            return "weights were written to that its graph holds in another form"
        if not all(map(is_, map(_dtype, self._tensors), self._dtypes)):
            return "weights of it were given another type"
        if list(map(Tensor.data_ptr, self._plain)) != self._pointers:
            return "weights were given other memory that its graph holds in another form"
        return None

    @property
    def configured(self) -> bool:
        """Whether the config of the model, where it has one, says something else now."""
        return _settings(self._config) != self._settings

    @property
    def hooked(self) -> bool:
        """Whether a module inside has been given a hook, or lost one."""
        return sum(map(len, self._hooks)) != self._hook_count if self._hook_count else any(self._hooks)
