"""Scales and shifts of few elements, applied to a tensor of many in one pass.

`x s w + b + x`, the response normalization of ConvNeXt V2 (Woo et al. 2023, arXiv:2301.00808), is `x (s w + 1) + b`,
`x (1 + s) + b` that of a diffusion transformer (Peebles and Xie 2023, arXiv:2212.09748), `y + x s` its gate. torch
reads and writes all of `x` at each step. The products of the scales are made first here, which takes no time, and one
call of `addcmul` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from regraft.core.vocabulary import ADD, ADD_IN_PLACE, MULTIPLY, Call
from regraft.optimize.engines.onednn_layouts import anew, order
from regraft.optimize.engines.onednn_single import TYPES, Env

FEWER = 8
"""To read a tensor of so many times fewer elements than the result takes far less than one as large as that."""

_SUMS = (ADD, ADD_IN_PLACE)
_Size = tuple[int, ...]
_Step = Callable[[Any, Tensor], "_Affine"]


@dataclass(frozen=True)
class _Affine:
    """`value * factor + shift`, of which nothing large is computed yet.

    What is made of few elements is looked at anew: oneDNN Graph would fuse it, with constants that it cannot compile.
    """

    value: Tensor
    factor: Tensor
    shift: Tensor | None = None

    def scaled(self, factor: Tensor) -> _Affine:
        shift = None if self.shift is None else anew(self.shift * factor)
        return replace(self, factor=anew(self.factor * factor), shift=shift)

    def shifted(self, shift: Tensor) -> _Affine:
        return replace(self, shift=shift if self.shift is None else anew(self.shift + shift))

    def with_itself(self, _: Tensor) -> _Affine:
        return replace(self, factor=anew(self.factor + 1))

    def computed(self) -> Tensor:
        return self.value * self.factor if self.shift is None else torch.addcmul(self.shift, self.value, self.factor)


@dataclass(frozen=True)
class _Link:
    """What is known of such a value: the large tensor, and the sizes of the factor and of the shift."""

    base: Node
    factor: _Size
    shift: _Size | None = None

    def scaled(self, factor: _Size) -> _Link:
        shift = None if self.shift is None else torch.broadcast_shapes(self.shift, factor)
        return replace(self, factor=torch.broadcast_shapes(self.factor, factor), shift=shift)

    def shifted(self, shift: _Size) -> _Link:
        return replace(self, shift=torch.broadcast_shapes(self.shift or (), shift))

    def pays(self, large: Tensor) -> bool:
        """Whether both are of few elements still, and one has the axis that lies in one piece: else torch is slow."""
        few = [self.factor] if self.shift is None else [self.factor, self.shift]
        if not all(FEWER * torch.Size(size).numel() <= large.numel() for size in few):
            return False
        last = order(large)[-1] - large.ndim
        return self.shift is None or any(len(size) >= -last and size[last] == large.shape[last] for size in few)


class Chains:
    """The chains of a graph, as its nodes are noted one by one, in their order.

    Attributes:
        open: The values that are not computed, since what reads them goes on.
    """

    def __init__(self) -> None:
        self.open: set[Node] = set()
        self._links: dict[Node, _Link] = {}

    def spelled(self, call: Call | None, result: Tensor, env: Env) -> Callable[[Env], Any] | None:
        """A product or a sum as a part of such a chain, as a function of the nodes' values; None where it is none.

        Args:
            call: The call, which goes into no kernel, and need not write into its arguments.
            result: Its result in the sample.
            env: The values of the nodes there.
        """
        if call is None or call.operation not in (MULTIPLY, *_SUMS) or call["alpha"] not in (None, 1):
            return None
        pair = (call["input"], call["other"])
        if pair[0] is pair[1] or not all(isinstance(each, Node) and _is_of(env.get(each), result) for each in pair):
            return None
        for large, other in (pair, pair[::-1]):
            before = self._links.get(large) if len(large.users) == 1 else None
            for known in dict.fromkeys((before, None)):  # what does not go on may begin
                step, link = _next(call, large, other, known, env) if _lies_as(env[large], result) else (None, None)
                if step is not None and (link is None or link.pays(result)):
                    if link is not None:
                        self._links[call.node] = link
                    if known is not None:
                        self.open.add(large)
                    return partial(self._value, call.node, large, other, step)
        return None

    def _value(self, node: Node, large: Node, other: Node, step: _Step, env: Env) -> Any:
        found = step(env[large], env[other])
        return found if node in self.open else found.computed()


def _next(call: Call, large: Node, other: Node, before: _Link | None, env: Env) -> tuple[_Step | None, _Link | None]:
    """What makes the next value of a chain, of the one before or of a large tensor, and what is known of it.

    Nothing is known of one that ends its chain.
    """
    size = tuple(env[other].shape)
    few = FEWER * env[other].numel() <= env[large].numel() and _lies_along(env[other], env[large])
    if call.operation is MULTIPLY:
        if not few:
            return None, None
        return (_Affine, _Link(large, size)) if before is None else (_Affine.scaled, before.scaled(size))
    if before is None:
        return None, None
    if other is before.base:
        return _Affine.with_itself, before
    if few:
        return _Affine.shifted, before.shifted(size)
    ends = before.shift is None and _lies_as(env[other], env[large])
    return (_Affine.shifted if ends else None), None


def scales_channels(size: torch.Size, sizes: Sequence[torch.Size]) -> bool:
    """Whether a product of a size is that of an image with one number for each of its channels.

    Args:
        size: The size.
        sizes: Those of what is multiplied.
    """
    pixels = torch.Size((*size[:2], 1, 1))
    return len(size) == 4 and pixels != size and sorted(sizes) == sorted((pixels, size))


def _is_of(value: Any, result: Tensor) -> bool:
    """Whether a value is a tensor of the type of the result, on the CPU, and of one that `addcmul` is fast at."""
    return isinstance(value, Tensor) and value.dtype == result.dtype and value.dtype in TYPES and value.is_cpu


def _lies_as(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and order(one) == order(other)


def _lies_along(few: Tensor, large: Tensor) -> bool:
    """Whether the axes of a tensor follow each other in memory as those of the large one, so that no order changes."""
    longer = [axis + large.ndim - few.ndim for axis in order(few) if few.shape[axis] > 1]
    return longer == [axis for axis in order(large) if axis in longer]
