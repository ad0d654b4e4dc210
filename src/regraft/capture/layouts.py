"""How the inputs of a graph are laid in memory, where the model reads it: the graph has what it read for the example.

That is a number in `x.as_strided(size, (x.stride(0), 1))`, which frames of audio are often cut with, and a decision in
`if x.is_contiguous()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from regraft.core.errors import NotCovered

_OF_AXES = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.dim_order}
_WITH_START = {torch.Tensor.storage_offset}


class LayoutsRead(TorchFunctionMode):
    """Notes whether something is asked how it is laid in memory that may depend on how the inputs are.

    Attributes:
        axes: whether in which order its axes are, and how far apart.
        start: whether where in its memory it begins.
    """

    axes = start = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if args and not isinstance(args[0], torch.nn.Parameter):
            self.axes |= function in _OF_AXES
            self.start |= function in _WITH_START
        return function(*args, **(kwargs or {}))

    def of(self, names: Sequence[str], leaves: Sequence[torch.Tensor]) -> Layouts | None:
        """What is asked of the inputs of other calls; None where the model does not ask.

        Args:
            names: What the user calls each input.
            leaves: The inputs of the example.
        """
        if not (self.axes or self.start):
            return None
        starts = tuple(int(leaf.storage_offset()) if self.start else None for leaf in leaves)
        return Layouts(tuple(names), tuple(map(_laid, leaves)), starts)


@dataclass(frozen=True)
class Layouts:
    """How the inputs have to be laid.

    Args:
        names: What the user calls each input.
        laid: For each the order of its axes, from the outermost, and whether it is dense in it; its strides where it
            is not.
        starts: For each where in its memory it begins; None where that does not matter.
    """

    names: tuple[str, ...]
    laid: tuple[tuple[tuple[int, ...], bool], ...]
    starts: tuple[int | None, ...]

    def hold(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the graph holds for inputs that are laid so.

        Args:
            leaves: The inputs, of shapes for which it holds.
        """
        return all(map(_is_laid, leaves, self.laid, self.starts))

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """See `hold`.

        Raises:
            NotCovered: The graph does not hold for them; the message names the first.
        """
        for name, leaf, laid, start in zip(self.names, leaves, self.laid, self.starts, strict=True):
            if not _is_laid(leaf, laid, start):
                plain = "clone()" if leaf.is_contiguous() else "contiguous()"
                of_order = laid == _laid(leaf.contiguous()) and not start
                cure = f"give it {name}.{plain}" if of_order else "lay it as the example is"
                raise NotCovered(
                    f"{name} is laid in memory otherwise than when the graph was captured, with the strides "
                    f"{leaf.stride()} from {leaf.storage_offset()}, and the model reads how it is laid; {cure}"
                )


def _laid(leaf: torch.Tensor) -> tuple[tuple[int, ...], bool]:
    strides = leaf.stride()
    order = tuple(range(leaf.dim()))
    if not leaf.is_contiguous():
        order = tuple(sorted(order, key=lambda axis: strides[axis], reverse=True))
    is_dense = leaf.permute(order).is_contiguous()
    return (order, True) if is_dense else (strides, False)


def _is_laid(leaf: torch.Tensor, laid: tuple[tuple[int, ...], bool], start: int | None) -> bool:
    order, is_dense = laid
    as_laid = leaf.permute(order).is_contiguous() if is_dense else leaf.stride() == order
    return as_laid and (start is None or leaf.storage_offset() == start)
