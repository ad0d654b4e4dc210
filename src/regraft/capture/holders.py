"""Where a model may keep something: its modules and their classes, and the containers and objects that hang on them."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

_CONTAINERS = (OrderedDict, dict, list, set, deque)  # the first of which something is one, is what it is taken for
_KEEPS_NOTHING = (nn.Module, torch.Tensor, type, enum.Enum)  # what else is not of a model has a class of Python's own
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_BY_NAME = ("_parameters", "_buffers", "_modules")
_CONSTANTS = (int, float, complex, str, bytes, torch.device)
"""What may be equal and yet two objects. Not sizes: those of a capture would be fixed by being compared."""
_DEEPEST = 4
"""So far from a module is looked: a cache, its list of layers, one of these, and the dictionary that it has."""


@dataclass(frozen=True)
class Holder:
    """A container, or whatever has attributes, and what it held.

    Args:
        what: The container, the object, the module or the class.
        held: What it held: a copy of a container, or the attributes.
        name: The path of a module, with the attribute if it hangs on one; the name of a class. None for what torch
            itself hangs on every module, such as hooks.
        named: Whether what it holds goes by names of its own.
    """

    what: Any
    held: Any
    name: str | None
    named: bool = False

    def restore(self) -> None:
        """Give it what it held, where that is not what it holds."""
        now = _held(self.what)
        if _same(self.held, now):
            return
        if isinstance(self.what, type):
            for name in now.keys() - self.held.keys():
                delattr(self.what, name)
            for name, value in self.held.items():
                setattr(self.what, name, value)
            return
        content = self.what if isinstance(self.what, _CONTAINERS) else vars(self.what)
        kind: Any = _kind(content)  # a subclass may do otherwise
        kind.clear(content)
        kind.extend(content, self.held) if kind in (list, deque) else kind.update(content, self.held)

    def changed(self) -> Iterator[str]:
        """The names of what it no longer holds, or only now; its own, where that has none."""
        now = _held(self.what)
        if self.named:
            names = (name for name in self.held.keys() | now.keys() if not self._has_still(name, now))
            yield from (f"{self.name}.{name}" if self.name else name for name in names)
        elif self.name is not None and not _same(self.held, now):
            yield self.name

    def _has_still(self, name: str, now: dict[str, Any]) -> bool:
        old, new = self.held.get(name, self), now.get(name, self)
        return old is new or (type(old) is type(new) and isinstance(old, _CONSTANTS) and bool(old == new))


def holders(model: nn.Module) -> list[Holder]:
    """What there is of a model that can be given other contents, with those that it has now.

    Args:
        model: The model.
    """
    found: dict[int, Holder] = {}
    for path, module in model.named_modules():
        found[id(module)] = Holder(module, _held(module), path, named=True)
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                _walk(f"{path}.{name}" if path else name, value, found, _DEEPEST)
            elif isinstance(value, _CONTAINERS):
                found[id(value)] = Holder(value, _held(value), path if name in _BY_NAME else None, name in _BY_NAME)
        for cls in type(module).__mro__:
            if not _is_built_in(cls) and id(cls) not in found:
                found[id(cls)] = Holder(cls, _held(cls), cls.__name__, named=True)
                for name, value in found[id(cls)].held.items():
                    _walk(f"{cls.__name__}.{name}", value, found, _DEEPEST)
    return list(found.values())


def _walk(name: str, value: Any, found: dict[int, Holder], steps: int) -> None:
    if steps == 0 or id(value) in found:
        return
    if isinstance(value, _CONTAINERS) or _is_object(value):
        found[id(value)] = Holder(value, _held(value), name)
    elif not isinstance(value, tuple):
        return
    for each in values_of(value):
        _walk(name, each, found, steps - 1)


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _KEEPS_NOTHING) and not _is_built_in(type(value))


def _is_built_in(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("builtins", "torch")


def _kind(container: Any) -> type:
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))


def _held(what: Any) -> Any:
    if isinstance(what, _CONTAINERS):
        return _kind(what)(what)
    if isinstance(what, type):  # methods and the like are found through a class, and kept nowhere else
        return {name: v for name, v in vars(what).items() if name[:2] != "__" and not hasattr(type(v), "__get__")}
    return dict(vars(what))


def values_of(value: Any) -> Iterable[Any]:
    """What a container has in it, as values or as attributes where it is none.

    Args:
        value: The container or object.
    """
    content: Iterable[Any] = value if isinstance(value, (*_CONTAINERS, tuple)) else vars(value)
    return content.values() if isinstance(content, dict) else content


def _same(old: Any, new: Any) -> bool:
    """Whether two copies of what something held have the same objects in them, by the same names in the same order."""
    if isinstance(old, dict) and list(old) != list(new):
        return False
    return len(old) == len(new) and all(map(is_, values_of(old), values_of(new)))
