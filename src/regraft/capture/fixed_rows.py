"""Calls whose result has as many rows as a mask has entries, written so that it has those of the example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor | None]
"""From a mask to the indices of its entries, a row for each; None where nobody knows how many there are."""

_PARTS = (Tensor, slice, int, torch.SymInt, type(Ellipsis))
_NONZERO = (torch.nonzero, Tensor.nonzero)


def with_fixed_rows(function: Any, args: Any, kwargs: Any, rows: Rows) -> Any:
    """What a call gives, in a form in which its rows are counted; None where they are not or need not be.

    Args:
        function: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        rows: counts the entries of a mask.
    """
    if function in _NONZERO and len(args) == 1:
        found = rows(args[0])
        return found.unbind(1) if found is not None and kwargs.get("as_tuple") else found
    if function is torch.where and len(args) == 1 and not kwargs:
        found = rows(args[0])
        return None if found is None else found.unbind(1)
    return _picked(args[0], args[1], rows) if function is Tensor.__getitem__ else None


def _picked(tensor: Tensor, index: Any, rows: Rows) -> Tensor | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)) or not all(isinstance(part, _PARTS) or part is None for part in parts):
        return None
    axes = sum(map(_axes, parts))
    written: list[Any] = []
    axis, found = 0, False
    for part in parts:
        places = rows(part) if _is_mask(part) else None
        if places is not None:
            of_mask, of_tensor = part.shape, tensor.shape[axis : axis + part.dim()]
            torch._check(of_mask == of_tensor, lambda: "a mask has other sizes than what it is an index of")
            written += places.unbind(1)
            found = True
        else:
            written.append(part)
        axis += tensor.dim() - axes if part is Ellipsis else _axes(part)
    return tensor[tuple(written)] if found else None


def _axes(part: Any) -> int:
    """Of how many axes a part of an index is."""
    if _is_mask(part):
        return int(part.dim())
    return 0 if part is None or part is Ellipsis else 1


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 0
