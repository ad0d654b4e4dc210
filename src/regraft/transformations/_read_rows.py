"""The rows that are read of a value, and what computes the others for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.values import called_name, same_shape, value_of
from regraft.core.vocabulary import ATTENTION, operation_of, read
from regraft.transformations._rows import LAYERS, SPLITTING, rows_needed

_LAST = slice(-1, None)


@dataclass(frozen=True)
class ReadRows:
    """The rows that are read of a value.

    Args:
        reads: Who reads them: all readers of the value.
        axis: Along which axis of the value.
        rows: Which.
        needed: The nodes that need to compute only these, each with the arguments of which it needs only these.
        axes: For each of those nodes, along which axis of its result.
    """

    reads: tuple[Node, ...]
    axis: int
    rows: slice
    needed: Mapping[Node, Mapping[Node, int]]
    axes: Mapping[Node, int]

    @classmethod
    def of(cls, value: Node, owner: GraphModule) -> ReadRows | None:
        """What is read of a value; None where all is, or where no layer computes more.

        Args:
            value: The value.
            owner: The graph module.
        """
        reads, tensor = tuple(value.users), value_of(value)
        indices = [_index(each, value, tensor) for each in reads] if tensor is not None else []
        if tensor is None or not indices or None in indices:
            return None
        for axis, size in enumerate(tensor.shape):
            rows = _hull([_rows(index[axis], size) for index in indices if index is not None], size)
            if rows is None:
                continue
            needed, axes = _needed(value, axis, rows, owner)
            if any(operation_of(node, owner) in LAYERS for node in needed):
                return cls(reads, axis, rows, needed, axes)
        return None

    @property
    def length(self) -> int:
        """How many rows are read."""
        return 1 if self.rows == _LAST else int(self.rows.stop - self.rows.start)

    def index(self, axis: int) -> tuple[slice, ...]:
        """The index of these rows along an axis.

        Args:
            axis: The axis, from the front.
        """
        return (*[slice(None)] * axis, self.rows)

    def rest(self, read_: Node) -> tuple[Any, ...]:
        """The index by which one of the reads gets what it read from the rows alone.

        Args:
            read_: The read.
        """
        value = read_.all_input_nodes[0]
        index: list[Any] = list(_index(read_, value, value.meta["val"]) or ())
        item = index[self.axis]
        if self.rows == _LAST:
            index[self.axis] = 0 if isinstance(item, int) else slice(None)
            return tuple(index)
        first = self.rows.start
        if isinstance(item, int):
            index[self.axis] = (item if item >= 0 else item + value.meta["val"].shape[self.axis]) - first
        else:
            start, stop, _ = item.indices(value.meta["val"].shape[self.axis])
            whole = slice(start, stop) == self.rows
            index[self.axis] = slice(None) if whole else slice(start - first, stop - first)
        return tuple(index)


def _index(read_: Node, value: Node, tensor: Tensor) -> tuple[Any, ...] | None:
    """The index of a read, with an item for each axis; None where it is another one than of numbers and slices."""
    name, given = called_name(read_), read_.args[1:]
    if not given or read_.args[0] is not value:
        return None
    items: tuple[Any, ...] = given[0] if isinstance(given[0], tuple) else given
    if name == "narrow":
        if len(given) != 3 or not all(type(number) is int for number in given):
            return None
        axis, first, length = items
        items = (*[slice(None)] * (axis % tensor.ndim), slice(first, first + length))
    elif name != "getitem":
        return None
    if not all(isinstance(item, slice) or type(item) is int for item in items):
        return None
    return (*items, *[slice(None)] * (tensor.ndim - len(items)))


def _rows(item: int | slice, size: Any) -> slice | None:
    """The rows that an item of an index stands for; None where that is not known."""
    if item in (-1, _LAST) and not isinstance(size, int):
        return _LAST
    if isinstance(item, int):
        first = item % size if isinstance(size, int) else item
        return slice(first, first + 1) if first >= 0 else None
    parts = (item.start, item.stop, item.step)
    if not isinstance(size, int) or not all(type(part) is int or part is None for part in parts):
        return None
    start, stop, step = item.indices(size)
    return slice(start, stop) if step == 1 and start < stop else None


def _hull(all_rows: list[slice | None], size: Any) -> slice | None:
    """The rows from the first to the last that are read; None where these are all, or it is not known."""
    known = [rows for rows in all_rows if rows is not None]
    if len(known) < len(all_rows):
        return None
    if _LAST in known:
        return _LAST if all(rows == _LAST for rows in known) else None
    hull = slice(min(rows.start for rows in known), max(rows.stop for rows in known))
    if isinstance(size, int):
        return hull if hull.stop - hull.start < size else None
    return hull


def _needed(
    value: Node, axis: int, rows: slice, owner: GraphModule
) -> tuple[dict[Node, Mapping[Node, int]], dict[Node, int]]:
    """The nodes of whose results nobody reads other rows; of the value itself these rows alone are read."""
    needed: dict[Node, Mapping[Node, int]] = {}
    axes: dict[Node, int] = {}
    pending: dict[Node, int | None] = {value: axis}
    while pending:
        node = max(pending)  # its readers have all been looked at
        its = pending.pop(node)
        if its is None or not (node is value or all(node in needed.get(user, ()) for user in node.users)):
            continue
        found = rows_needed(node, its, owner)
        if found is None or not _seen_by_all(node, rows, owner):
            continue
        needed[node], axes[node] = found, its
        for given, where in found.items():
            pending[given] = where if pending.get(given, where) == where else None
    for node in [each for each, found in needed.items() if any(_stays_split(given, needed) for given in found)]:
        del needed[node]
    return needed, axes


def _stays_split(node: Node, needed: Mapping[Node, Any]) -> bool:
    return called_name(node) in SPLITTING and node not in needed


def _seen_by_all(node: Node, rows: slice, owner: GraphModule) -> bool:
    """Whether attention, if it is causal, lets the rows see all: then they need no mask."""
    call = read(node, owner)
    if call is None or call.operation is not ATTENTION or not call["is_causal"]:
        return call is None or call.operation is not ATTENTION or call["is_causal"] is False
    query, key = value_of(call["input"]), value_of(call["key"])
    if query is None or key is None or not same_shape(query.shape[-2:-1], key.shape[-2:-1]):
        return False
    return rows == _LAST or (rows.stop == query.shape[-2] and rows.stop - rows.start == 1)
