"""Calls whose result has as many rows as values say, those of a mask, say, written so that it has the example's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regraft.capture.given_numbers import GivenNumbers

_PARTS = (Tensor, slice, int, torch.SymInt, type(Ellipsis))
_NONZERO = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_SELECTING = (torch.masked_select, Tensor.masked_select)
_REPEATING = (torch.repeat_interleave, Tensor.repeat_interleave)


def with_fixed_rows(function: Any, args: Any, kwargs: Any, given: GivenNumbers) -> Any:
    """What a call gives, in a form in which its rows are counted; None where they are not or need not be.

    Args:
        function: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        given: counts the entries of a mask, or adds numbers up, where they are given.
    """
    if function in _NONZERO and len(args) == 1:
        found = given.rows(args[0])
        return found.unbind(1) if found is not None and kwargs.get("as_tuple") else found
    if function is torch.where and len(args) == 1 and not kwargs:
        found = given.rows(args[0])
        return None if found is None else found.unbind(1)
    if function in _SELECTING and len(args) == 2 and not kwargs:
        found = given.rows(args[1])
        return None if found is None or args[0].shape != args[1].shape else args[0][found.unbind(1)]
    if function in _REPEATING and args and given.follows:
        return _repeated(*args, given=given, **kwargs)
    return _picked(args[0], args[1], given) if function is Tensor.__getitem__ else None


def _repeated(
    tensor: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None, given: GivenNumbers
) -> Tensor | None:
    of_each = tensor if repeats is None else repeats
    if output_size is not None or not isinstance(of_each, Tensor) or of_each.dim() != 1:
        return None
    if repeats is not None and of_each.shape[0] == 1:  # which stands for all rows
        return None
    size = given.total(of_each)
    if size is None:
        return None
    if repeats is None:
        return torch.repeat_interleave(tensor, output_size=size)
    return torch.repeat_interleave(tensor, repeats, dim, output_size=size)


def _picked(tensor: Tensor, index: Any, given: GivenNumbers) -> Tensor | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)) or not all(isinstance(part, _PARTS) or part is None for part in parts):
        return None
    axes = sum(map(_axes, parts))
    written: list[Any] = []
    axis, found = 0, False
    for part in parts:
        places = given.rows(part) if _is_mask(part) else None
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
