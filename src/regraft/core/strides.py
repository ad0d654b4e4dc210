"""Who needs a tensor to be contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from regraft.core.values import value_of

_STRIDE_METHODS = {
    "view",
    "view_as",
    "as_strided",
    "as_strided_",
    "stride",
    "is_contiguous",
    "data_ptr",
    "storage_offset",
}
_STRIDE_FUNCTIONS = {
    torch.as_strided,
    torch.view_as_complex,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
}


def needs_strides(user: Node, value: Node, width: int) -> bool:
    """Whether `user` needs more of `value` than that its last axis, of `width` elements, is contiguous."""
    if user.op == "call_method" and user.target in _STRIDE_METHODS:
        sizes = user.args[1:] if user.args and user.args[0] is value else ()
    elif user.op == "call_function" and user.target in _STRIDE_FUNCTIONS:
        sizes = user.args[1:2]
    else:
        return False
    if user.target not in ("view", torch.ops.aten.view.default):
        return True
    return not _splits_last_axis(user, sizes, width)


def _splits_last_axis(view: Node, sizes: Sequence[Any], width: int) -> bool:
    """Whether a view only divides the last axis: its trailing sizes multiply to `width`."""
    shape: Iterable[Any] = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)) else sizes
    known = value_of(view)
    if known is not None:
        shape = tuple(known.shape)
    product = 1
    for size in reversed(list(shape)):
        if not isinstance(size, int) or size < 1:
            return False
        product *= size
        if product == width:
            return True
    return False
