"""One output of every run, taken a part at a time.

In one piece the logits of a language model would need gigabytes for the float64 numbers in between, which by themselves
take longer to get from the system than to compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

_PART = 1 << 18  # elements: 2 MiB in float64, which stays in a cache
_SAMPLE = 1 << 20  # of more elements than this, so many tell what is typical


class Part:
    """Some of an output's elements, in float64.

    Args:
        start: The first of them.
        tensors: As for `Output`.
        limit: Likewise.
    """

    def __init__(self, start: int, tensors: Sequence[Tensor | None], limit: float) -> None:
        self.start = start
        ref, can, exact, self._spread, self.rounded = (
            None if tensor is None else tensor.to(torch.float64) for tensor in tensors
        )
        assert ref is not None
        assert can is not None
        self.ref, self.can = ref, can
        self.truth = ref if exact is None else exact
        self._limit = limit

    @cached_property
    def finite(self) -> Tensor:
        """Where the reference is a number."""
        return self.ref.abs() < math.inf

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Both sides, with zero where they are not numbers."""
        return torch.where(self.finite, self.ref, 0.0), torch.where(self.finite, self.can, 0.0)

    @cached_property
    def error(self) -> Tensor:
        """How far the reference is from float64."""
        return (self.ref - self.truth).abs() if self._spread is None else self._spread

    @cached_property
    def known(self) -> Tensor:
        """Where float64 can judge."""
        return self.finite & (self.truth.abs() <= self._limit) & (self.error < math.inf)

    @cached_property
    def away(self) -> Tensor:
        """How far the candidate is from the reference."""
        return torch.where(self.finite, (self.can - self.ref).abs(), 0.0)

    def direct(self, typical: float) -> Tensor:
        """The same, relative to the reference."""
        return torch.where(self.finite, self.away / self.ref.abs().clamp(min=typical), 0.0)


class Output:
    """One output of every run.

    Args:
        tensors: Of the reference, of the candidate, of float64, the spread and of moved weights; None where there is
            none.
        limit: Beyond this float64 says nothing about the output.
    """

    def __init__(self, tensors: Sequence[Tensor | None], limit: float) -> None:
        assert tensors[0] is not None
        self._shape, self._pairs = tuple(tensors[0].shape), 2 if tensors[0].is_complex() else 1
        self._flat = [None if tensor is None else _flat(tensor) for tensor in tensors]
        self._limit = limit
        self.size = tensors[0].numel() * self._pairs
        self._step = self.size // _SAMPLE + 1

    def __iter__(self) -> Iterator[Part]:
        """Every part, made anew each time."""
        return (self.part(start, start + _PART) for start in range(0, self.size, _PART))

    def part(self, start: int, stop: int) -> Part:
        """The elements from `start` up to `stop`."""
        return Part(start, [None if flat is None else flat[start:stop] for flat in self._flat], self._limit)

    def sample(self, values: Tensor) -> Tensor:
        """A part's share of what tells what is typical of all; a copy, since a view would keep all the values."""
        return values[:: self._step].clone()

    def at(self, flat: int) -> tuple[int, ...]:
        """The place in the output's own shape."""
        flat //= self._pairs
        index = []
        for size in reversed(self._shape):
            index.append(flat % size)
            flat //= size
        return tuple(reversed(index))


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).flatten()


class Most:
    """The largest of the values seen, and where it is."""

    def __init__(self) -> None:
        self.value, self.place = 0.0, 0

    def see(self, values: Tensor, part: Part) -> None:
        """Look at a part's values."""
        most, place = values.max(0)
        if not (float(most) <= self.value or math.isnan(self.value)):  # NaN is the most there is
            self.value, self.place = float(most), part.start + int(place)
