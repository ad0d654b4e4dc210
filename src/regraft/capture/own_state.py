"""What a model sets itself as it runs, as Qwen2-VL keeps its `rope_deltas` from one call to the next.

A graph for which such an attribute was neither read nor set holds whatever its value is. Where what one call leaves
behind makes a difference to the next, there is no graph of it: that of the first call would answer all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import nn

from regraft.capture.holders import holders

Attribute = tuple[str, str]
"""The path of a module, and the name of an attribute of it."""


@contextmanager
def set_meanwhile(model: nn.Module) -> Iterator[set[Attribute]]:
    """Which attributes of a model get another value; known on leaving.

    Args:
        model: The model.
    """
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    found: set[Attribute] = set()
    yield found
    for path, module in model.named_modules():
        had = before.get(path, {})
        found.update((path, name) for name, value in vars(module).items() if name in had and value is not had[name])


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
def used_meanwhile(model: nn.Module, attributes: Set[Attribute]) -> Iterator[set[Attribute]]:
    """Which of some attributes are read, set or deleted.

    Args:
        model: The model.
        attributes: The attributes.
    """
    modules = dict(model.named_modules())
    found: set[Attribute] = set()
    with ExitStack() as stack:
        for path, name in attributes:
            cls = type(modules[path])
            asked = vars(cls).get(name)
            if asked is None and not hasattr(cls, name):
                asked = _Asked(name, found)
                setattr(cls, name, asked)
                stack.callback(delattr, cls, name)
            if isinstance(asked, _Asked):
                asked.paths[id(modules[path])] = path
            else:  # the class has one too, and who asks for which cannot be seen
                found.add((path, name))
        yield found


class _Asked:
    """Stands in a class for an attribute of its instances, and writes down which of them were asked for it."""

    def __init__(self, name: str, found: set[Attribute]) -> None:
        self.name, self.found = name, found
        self.paths: dict[int, str] = {}

    def _note(self, module: Any) -> dict[str, Any]:
        if id(module) in self.paths:
            self.found.add((self.paths[id(module)], self.name))
        having: dict[str, Any] = vars(module)
        return having

    def __get__(self, module: Any, cls: Any) -> Any:
        try:
            return self._note(module)[self.name]
        except (KeyError, TypeError):  # TypeError: it is the class that was asked, and it has none
            raise AttributeError(self.name) from None

    def __set__(self, module: Any, value: Any) -> None:
        self._note(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        del self._note(module)[self.name]
