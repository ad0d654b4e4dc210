"""What a forward puts into the lists and dictionaries that it is given, as those of sentence-transformers do.

A graph computes results alone. What is put there is made further results of it, and the drop-in puts them there.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from regraft.core.errors import NotCovered

Path = tuple[Any, ...]
"""Where something is: the name of an argument, and keys and indices from there."""


class Filled(NamedTuple):
    """A container that a call changes.

    Args:
        path: Where it is in the call.
        entries: The keys that it has afterwards, in order, and of each whether its entry is what was there before.
    """

    path: Path
    entries: tuple[tuple[Any, bool], ...]


class Contents(NamedTuple):
    """What a call makes of the containers that it is given; empty where it leaves them as they are.

    Args:
        filled: The containers that it changes.
        returned: Where those are in the result, if they are returned, and where in the call.
    """

    filled: tuple[Filled, ...] = ()
    returned: tuple[tuple[Path, Path], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What is new, as one writes it: `features['sentence_embedding']`; or the container, where nothing in it is."""
        names: list[str] = []
        for path, entries in self.filled:
            names += [spelled((*path, key)) for key, kept in entries if not kept] or [spelled(path)]
        return tuple(names)

    def values(self, given: Given) -> list[Any]:
        """What a call has put in.

        Args:
            given: The containers, looked at before the call.

        Returns:
            What is new in each container, and a remark if it is not what this says.
        """
        values = [given.now(path).get(key) for path, entries in self.filled for key, kept in entries if not kept]
        return values if given.filled() == self.filled else [*values, "other entries"]

    def put(self, call: Mapping[str, Any], values: Sequence[Any], result: Any) -> Any:
        """Put into the containers of a call what belongs there.

        Args:
            call: The call, by name.
            values: What is new.
            result: What the call returns.

        Returns:
            The result, with the containers in it that the model returns.

        Raises:
            NotCovered: One container was given twice.
        """
        containers = [_at(call, container.path) for container in self.filled]
        if len(set(map(id, containers))) < len(containers):
            raise NotCovered("a container was given twice")
        new = iter(values)
        for container, (_, entries) in zip(containers, self.filled):
            before = _items(container)
            _fill(container, {key: before[key] if kept else next(new) for key, kept in entries})
        for path, source in self.returned:
            result = _with(result, path, _at(call, source))
        return result


class Given:
    """The containers of a call, and what is in them before it.

    Args:
        call: The call, by name.
    """

    def __init__(self, call: Mapping[str, Any]) -> None:
        self._containers = dict(_containers(call, ()))
        self._before = {path: _items(container) for path, container in self._containers.items()}

    def __bool__(self) -> bool:
        return bool(self._containers)

    def now(self, path: Path) -> dict[Any, Any]:
        """What is in a container.

        Args:
            path: Where the container is.
        """
        return _items(self._containers[path])

    def filled(self) -> tuple[Filled, ...]:
        """The containers in which there is something else by now."""
        return tuple(
            Filled(path, entries)
            for path, before in self._before.items()
            if (entries := _entries(before, self.now(path))) != tuple((key, True) for key in before)
        )

    def contents(self, result: Any) -> Contents:
        """What a call has made of them.

        Args:
            result: What the call returned.
        """
        filled = self.filled()
        given = {id(self._containers[container.path]): container.path for container in filled}
        within = _containers({"": result}, ())
        return Contents(filled, tuple((path[1:], given[id(each)]) for path, each in within if id(each) in given))


def spelled(path: Path) -> str:
    """A path as it would be written.

    Args:
        path: The path.

    Example:
        >>> spelled(("features", "hidden", 0))
        "features['hidden'][0]"
    """
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def with_own_containers(value: Any) -> Any:
    """Arguments of a call with lists and dictionaries of their own, and what is in them as it was.

    Args:
        value: Positional arguments, named ones, or one of them.
    """
    if type(value) is tuple:
        return tuple(map(with_own_containers, value))
    if not _is_container(value):
        return value
    return _fill(copy.copy(value), {key: with_own_containers(part) for key, part in _items(value).items()})


def _containers(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if path and _is_container(value):
        yield path, value
    if _is_container(value) or type(value) is tuple:
        for key, part in _items(value).items():
            yield from _containers(part, (*path, key))


def _is_container(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list) or isinstance(value, UserDict)


def _items(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, Mapping) else enumerate(container))


def _fill(container: Any, items: dict[Any, Any]) -> Any:
    """Put these into a container, in the place of what is in it."""
    inner = container.data if isinstance(container, UserDict) else container
    inner.clear()
    if isinstance(inner, list):
        inner.extend(items.values())
    else:
        inner.update(items)
    return container


def _entries(before: dict[Any, Any], now: dict[Any, Any]) -> tuple[tuple[Any, bool], ...]:
    return tuple((key, key in before and before[key] is value) for key, value in now.items())


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(result: Any, path: Path, container: Any) -> Any:
    """A result with a container in its place; the graph has made all around it."""
    if not path:
        return container
    first, *rest = path
    part = _with(result[first], tuple(rest), container)
    if isinstance(result, tuple):
        return (*result[:first], part, *result[first + 1 :])
    result[first] = part
    return result
