"""Whether memory was freed: what lies at its address later on is something else, and no address tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Memory:
    """The memory that some tensors have now, which is freed where they are given another and nobody else has it.

    Where torch does not say when memory is freed, this keeps it, so that nothing else can lie there.

    Args:
        tensors: Any strided tensors.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> memory = Memory([weight])
    >>> memory.freed
    False
    >>> weight.data = torch.zeros(3)
    >>> memory.freed
    True
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._freed: list[Any] = []
        storages = (tensor.untyped_storage() for tensor in tensors)
        said = _objects_last()
        self._held = [weakref.ref(storage, self._freed.append) if said else storage for storage in storages]

    @property
    def freed(self) -> bool:
        """Whether some of it was freed."""
        return bool(self._freed)


@cache
def _objects_last() -> bool:
    """Whether the Python object of a storage lives as long as the storage does, though nobody holds it."""
    tensor = torch.empty(1)
    return weakref.ref(tensor.untyped_storage())() is not None
