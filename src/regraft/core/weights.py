"""How a new weight comes from old ones, and, where it can, how the old ones come back from it.

A `Derivation` is kept in the journal beside the rewrite that made the weight. It is why undo can carry trained values
back, why a checkpoint of the original model loads into the rewritten one, and why the reverse never has to be written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 1 << 17  # elements: few enough for a core's own cache, and enough for torch to divide them among threads
_LARGE = 2.0**32  # larger than any input
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Derivation(ABC):
    """A pure function from old weights to one new weight. It must be picklable: write it as a frozen dataclass."""

    @abstractmethod
    def compute(self, *sources: Tensor) -> Tensor:
        """The new weight. Read each source once; make no other copy of its size."""

    def outline(self, *sources: Tensor) -> Tensor:
        """The new weight without its values, on the meta device, from sources that are there too: for a dry run."""
        return self.compute(*sources)

    def invert(self, derived: Tensor) -> tuple[Tensor, ...] | None:
        """The sources, bit for bit, or None where they cannot be had from `derived`."""
        return None


class Unknown(Derivation):
    """A weight that a user's function has put in without saying what it was made from."""

    def compute(self, *sources: Tensor) -> Tensor:
        raise NotImplementedError("nothing is known of how this weight was made")


@dataclass(frozen=True)
class Concatenate(Derivation):
    """The sources, each first viewed in its shape here, side by side along `dim`. `None` stands for zeros.

    Args:
        dim: The axis along which they follow each other.
        parts: The shape of each part as it enters; its last element tells whether it is a source or zeros.
        shapes: The shape of each source as it was, for the way back.
    """

    dim: int
    parts: tuple[tuple[int, ...], ...]
    zeros: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]

    def compute(self, *sources: Tensor) -> Tensor:
        remaining = iter(sources)
        parts = [
            sources[0].new_zeros(part) if zero else _shaped(next(remaining), part)
            for part, zero in zip(self.parts, self.zeros, strict=True)
        ]
        return torch.cat(parts, self.dim)

    def invert(self, derived: Tensor) -> tuple[Tensor, ...] | None:
        pieces = derived.split_with_sizes([part[self.dim] for part in self.parts], self.dim)
        kept = [piece for piece, zero in zip(pieces, self.zeros, strict=True) if not zero]
        if len(kept) < len(pieces) and not derived.is_meta:
            zeros = [piece for piece, zero in zip(pieces, self.zeros, strict=True) if zero]
            if any(bool(piece.count_nonzero()) for piece in zeros):
                return None
        return tuple(_shaped(piece, shape) for piece, shape in zip(kept, self.shapes, strict=True))


@dataclass(frozen=True)
class Same(Derivation):
    """The one source itself: a new module that shares the weights of the one whose place it takes."""

    def compute(self, *sources: Tensor) -> Tensor:
        return sources[0]

    def invert(self, derived: Tensor) -> tuple[Tensor, ...] | None:
        return (derived,)


def _shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def wider(dtype: torch.dtype) -> torch.dtype:
    """The precision for arithmetic on weights of `dtype`: float64 for float32 and float64, float32 for halves."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def scaled(weight: Tensor, factors: Tensor) -> Tensor:
    """`weight * factors`, computed one precision up and cast once.

    In blocks of rows that stay in the cache, so that the weight is read once, the result written once, and nothing of
    their size is held in the higher precision.

    Args:
        weight: Any shape.
        factors: In the higher precision, of a shape that broadcasts; its first axis has one element, or as many as the
            weight's.
    """
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if weight.is_meta or weight.numel() <= _BLOCK:
        return result.copy_(weight * factors)
    rows = max(1, _BLOCK * len(weight) // weight.numel())
    buffer = torch.empty((rows, *weight.shape[1:]), dtype=factors.dtype, device=weight.device)
    for start in range(0, len(weight), rows):
        block = slice(start, start + rows)
        wide = buffer[: len(weight[block])]
        wide.copy_(weight[block]).mul_(factors[block] if len(factors) > 1 else factors)
        result[block].copy_(wide)
    return result


def underflows(weight: Tensor, factors: Tensor, groups: int = 1, shift: Tensor | None = None) -> bool:
    """Whether `weight * factors` loses precision among the numbers of its dtype that are smaller than the normal ones.

    The cast is off by half an eps of a number that is normal, and by half an eps of the smallest normal one where it is
    not. So n elements whose magnitudes have a normal mean are together off by no more than an eps of their sum. That
    has to hold of each row, which is a result of its own, and of each column, whose inputs may be as large as the
    factors are small. Zeros stay zeros, and count for nothing. Beside a shift that is not as small all this is nothing.

    Args:
        weight: Of a linear layer or a convolution.
        factors: In the higher precision, of a shape that broadcasts, as for `scaled`.
        groups: The groups of the convolution, each with rows and columns of its own.
        shift: What is added to the result of each row; None where that is not known, or rows are no results.
    """
    if weight.is_meta or not weight.numel():
        return False
    smallest, width = torch.finfo(weight.dtype).smallest_normal, weight[0].numel()
    if shift is not None and (shift.detach().abs() >= smallest * width * _LARGE).all():
        return False  # and the weight need not be read
    whole = weight.detach().unflatten(0, (groups, -1))
    parts = factors.unflatten(0, (groups, -1)) if len(factors) > 1 else factors[None]
    rows = max(1, _BLOCK * whole.shape[1] // weight.numel())
    by_row, by_column = [], torch.zeros(groups, whole.shape[2], dtype=factors.dtype, device=weight.device)
    for start in range(0, whole.shape[1], rows):
        block = slice(start, start + rows)
        sizes = (whole[:, block] * (parts[:, block] if parts.shape[1] > 1 else parts)).abs_()
        sizes = sizes.flatten(3).sum(3) if sizes.ndim > 3 else sizes
        by_row.append(sizes.sum(2))
        by_column += sizes.sum(1)
    sums, height = torch.cat(by_row, 1), weight.numel() // by_column.numel()
    if not (sums < smallest * width).any() and not (by_column < smallest * height).any():
        return False
    there = ((whole != 0) & (parts != 0)).flatten(3).sum(3) if whole.ndim > 3 else (whole != 0) & (parts != 0)
    counts = [there.sum(axis, dtype=factors.dtype) for axis in (2, 1)]
    low = sums < smallest * counts[0]
    if shift is not None:
        low &= shift.detach().abs().view_as(low) < smallest * counts[0] * _LARGE
    return bool(low.any() or (by_column < smallest * counts[1]).any())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals NaN, and 0.0 differs from -0.0."""
    if left.dtype != right.dtype or left.device != right.device:
        return False
    if left.is_meta:
        return left.shape == right.shape
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.is_floating_point():
        integers = _INTEGERS[left.element_size()]
        left, right = left.detach().view(integers), right.detach().view(integers)
    return torch.equal(left, right)


def shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors as plain tuples."""
    return tuple(tuple(tensor.shape) for tensor in tensors)
