"""What a model sets itself as it runs, as Qwen2-VL keeps its `rope_deltas` from one call to the next.

A graph for which such an attribute was neither read nor set holds whatever its value is. Where what one call leaves
behind makes a difference to the next, there is no graph of it: that of the first call would answer all of them alike.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import nn

from regraft.capture.holders import holders

Attribute = tuple[str, str]
"""The path of a module, and the name of an attribute of it."""

_ONE_AT_A_TIME = threading.RLock()
_NOTHING = object()


def spelled(attribute: Attribute) -> str:
    """An attribute as one name: `"layer.0.weights"`.

    Args:
        attribute: The attribute.
    """
    return ".".join(filter(None, attribute))


def set_attribute(model: nn.Module, attribute: Attribute, value: Any) -> None:
    """Set what a forward sets.

    Args:
        model: The model.
        attribute: The attribute.
        value: What to set it to.
    """
    path, name = attribute
    setattr(model.get_submodule(path), name, value)


@contextmanager
def set_meanwhile(model: nn.Module) -> Iterator[set[Attribute]]:
    """Which attributes of a model are set, be it to the value that they have.

    Args:
        model: The model.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: set[Attribute] = set()

    def note(module: nn.Module, name: str, value: Any) -> None:
        set_plainly(module, name, value)
        if name in vars(module) and id(module) in paths:
            found.add((paths[id(module)], name))

    with _ONE_AT_A_TIME:
        set_plainly: Callable[[nn.Module, str, Any], None] = nn.Module.__setattr__
        every_module: Any = nn.Module
        every_module.__setattr__ = note
        try:
            yield found
        finally:
            every_module.__setattr__ = set_plainly


@contextmanager
def changed_meanwhile(model: nn.Module) -> Iterator[set[str]]:
    """The names of the attributes, buffers and parameters that are replaced, and of the containers that are filled.

    What is written in place is not among them. Known on leaving.

    Args:
        model: The model.
    """
    before = holders(model)
    found: set[str] = set()
    yield found
    found.update(chain.from_iterable(holder.changed() for holder in before))


@contextmanager
def used_meanwhile(model: nn.Module, attributes: Set[Attribute]) -> Iterator[dict[Attribute, str]]:
    """Which of some attributes are read, set or deleted, and what is done first to each: `"get"`, `"set"`, `"delete"`.

    Args:
        model: The model.
        attributes: The attributes.
    """
    modules = dict(model.named_modules())
    found: dict[Attribute, str] = {}
    with ExitStack() as stack:
        for path, name in attributes:
            cls = type(modules[path])
            asked = inspect.getattr_static(cls, name, _NOTHING)
            if not isinstance(asked, _Asked):
                if hasattr(type(asked), "__get__"):  # a property, which keeps its values elsewhere
                    found[path, name] = "get"
                    continue
                put_back = (setattr, cls, name, asked) if name in vars(cls) else (delattr, cls, name)
                asked = _Asked(name, found, asked)
                setattr(cls, name, asked)
                stack.callback(*put_back)
            asked.paths[id(modules[path])] = path
        yield found


class _Asked:
    """Stands in a class for an attribute of its instances, and writes down which of them were asked for it."""

    def __init__(self, name: str, found: dict[Attribute, str], default: Any) -> None:
        self.name, self.found, self.default = name, found, default
        self.paths: dict[int, str] = {}

    def _note(self, module: Any, how: str) -> dict[str, Any]:
        if id(module) in self.paths:
            self.found.setdefault((self.paths[id(module)], self.name), how)
        having: dict[str, Any] = vars(module)
        return having

    def __get__(self, module: Any, cls: Any) -> Any:
        try:
            return self._note(module, "get")[self.name]
        except (KeyError, TypeError):  # TypeError: it is the class that was asked
            if self.default is _NOTHING:
                raise AttributeError(self.name) from None
            return self.default

    def __set__(self, module: Any, value: Any) -> None:
        self._note(module, "set")[self.name] = value

    def __delete__(self, module: Any) -> None:
        del self._note(module, "delete")[self.name]
