"""What depends on what tensors hold and is no tensor's content: a program has it from the sample, for all calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Contents(TorchDispatchMode):
    """Notes the operations that make a number, or a size, of what a tensor holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: str | None = None

    def noted(self) -> str | None:
        """The last such operation since this was asked; None where there was none."""
        noted, self._noted = self._noted, None
        return noted

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or (torch.Tag.dynamic_output_shape in tags and _picks(func, args)):
            self._noted = str(func)
        return func(*args, **(kwargs or {}))


def _picks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of a result depends on what is in a tensor: that of an index by places does not."""
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
