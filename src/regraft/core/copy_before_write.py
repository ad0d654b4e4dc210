"""The values of tensors, saved at the moment of their first write, so that nothing is copied that is not changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from regraft.core.operation_mode import OperationMode


class CopyBeforeWrite(OperationMode):
    """Saves the values of tensors before the first operation that writes them, while it is entered.

    Args:
        tensors: The tensors; what is none, on the meta device or not strided, is left out.

    Example:
        >>> with CopyBeforeWrite([weight := torch.ones(2)]) as writes:
        ...     weight.mul_(3)
        tensor([3., 3.])
        >>> [each is weight for each in writes.written()]
        [True]
        >>> writes.restore()
        >>> weight
        tensor([1., 1.])
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_storage(each): each for each in tensors if is_strided(each) and not each.is_meta}
        self._saved: dict[int, torch.UntypedStorage] = {}

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperationMode`."""
        arguments = func._schema.arguments
        given = {**dict(zip([argument.name for argument in arguments], args)), **kwargs}
        for argument in arguments:
            says_so = argument.alias_info is not None and argument.alias_info.is_write
            # the schema of a batch norm does not say that it writes its statistics
            if says_so or (argument.name.startswith("running_") and given.get("training") is True):
                value = given.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, written: Any) -> None:
        key = _storage(written) if is_strided(written) else None
        if key in self._weights and key not in self._saved:
            self._saved[key] = self._weights[key].untyped_storage().clone()

    def before(self, weight: Any) -> Tensor | None:
        """What `weight` was before it was written; None where it was not."""
        saved = self._saved.get(_storage(weight)) if is_strided(weight) else None
        if saved is None:
            return None
        held = torch.empty(0, dtype=weight.dtype, device=weight.device)
        return held.set_(saved, weight.storage_offset(), weight.shape, weight.stride())

    def written(self) -> list[Tensor]:
        """The tensors that were written, of several with one storage the last."""
        return [self._weights[key] for key in self._saved]

    def restore(self) -> None:
        """Write the saved values back."""
        for key, saved in self._saved.items():
            self._weights[key].untyped_storage().copy_(saved)
        self._saved.clear()


def is_strided(value: Any) -> bool:
    """Whether something is a tensor whose values lie in a storage."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
