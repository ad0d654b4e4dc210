"""Whether a forward calls its layers as they are, or sets their attributes, hooks or mode for that call.

A graph calls a layer as it finds it. What a forward has set there is gone by then, since a capture leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from regraft.capture.torch_private import hooks_of_all

_PLAIN = (bool, int, float, str)


class LayersCalled:
    """The modules of a model as they were before it ran.

    Args:
        model: the model.

    Attributes:
        otherwise: those that were called when they were otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        self.otherwise: set[nn.Module] = set()
        self._were = {module: _state(module) for module in model.modules()}
        self._hooks = _hooks_of_all()

    def is_as_it_was(self, module: nn.Module) -> bool:
        """Whether nothing of a module, and no hook of all modules, has been set.

        Args:
            module: a module; one that the model did not have is not as it was.
        """
        were = self._were.get(module)
        return were is not None and _same(were, _state(module)) and self._hooks == _hooks_of_all()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While each call of a module is looked at."""

        def look(module: nn.Module, args: Any) -> None:
            del args
            if not self.is_as_it_was(module):
                self.otherwise.add(module)

        handle = register_module_forward_pre_hook(look)
        self._hooks = _hooks_of_all()
        try:
            yield
        finally:
            handle.remove()


def _state(module: nn.Module) -> dict[tuple[str, ...], Any]:
    state: dict[tuple[str, ...], Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, dict):  # of weights, or of hooks
            state |= {(name, str(key)): part for key, part in value.items()}
        else:
            state[name,] = value
    return state


def _same(old: dict[tuple[str, ...], Any], new: dict[tuple[str, ...], Any]) -> bool:
    return old.keys() == new.keys() and all(_is(value, new[key]) for key, value in old.items())


def _is(one: object, other: object) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is, one, other))
    return isinstance(one, _PLAIN) and one == other


def _hooks_of_all() -> list[list[int]]:
    return [list(table) for table in hooks_of_all()]
