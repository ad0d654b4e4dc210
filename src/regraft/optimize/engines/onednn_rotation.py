"""Queries and keys turned by their positions, in four calls of torch (Su et al. 2021, arXiv:2104.09864).

`x cos + (-x2, x1) sin`, of the halves `x1` and `x2` of each row `x`. oneDNN Graph would join the halves, and add one of
the products to the other: for that it has each copied first, which takes longer. The sign goes to the sine.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.values import JOINING
from regraft.core.vocabulary import ADD, MULTIPLY, NEGATE, Call, Operation, read
from regraft.optimize.engines.onednn_fusions import called
from regraft.optimize.engines.onednn_layouts import order
from regraft.optimize.engines.onednn_single import TYPES


@dataclass(frozen=True)
class Rotation:
    """The calls that turn rows by angles.

    Args:
        total: The sum.
        straight: What is added, `x cos`.
        turned: The halves times the sine.
        joined: The halves, one of them negated.
        negated: That half.
        half: What is negated.
        other: The other half.
        sine: The sine, of the size of a row along the last axis.
        size: The size of a half along that axis.
    """

    total: Node
    straight: Node
    turned: Node
    joined: Node
    negated: Node
    half: Node
    other: Node
    sine: Node
    size: int

    @staticmethod
    def of(
        total: Node, result: Tensor, gm: GraphModule, forms: Mapping[Node, tuple[torch.Size, Any]]
    ) -> Rotation | None:
        """The rotation that ends in a sum; None where it is another sum.

        Args:
            total: The sum.
            result: Its result.
            gm: The graph.
            forms: Of each tensor the size, and the order of its axes.
        """
        ends = _pair(read(total, gm), ADD)
        if not ends or result.dtype not in TYPES or not result.is_cpu:
            return None
        for straight, turned in (ends, ends[::-1]):
            factors = _pair(read(turned, gm), MULTIPLY) if len(turned.users) == 1 and turned is not straight else ()
            for joined, sine in (factors, factors[::-1]) if factors else ():
                halves = _halves(joined, gm, forms)
                if halves is None or sine not in forms or forms.get(straight) != (result.shape, order(result)):
                    continue  # in the latter case the sum would lie otherwise than the model's
                negated, half, other = halves
                size = forms[half][0][-1]
                if forms[sine][0][-1:] == (2 * size,):
                    return Rotation(total, straight, turned, joined, negated, half, other, sine, size)
        return None

    def spelled(
        self, sine: Tensor | None, gm: GraphModule, others: Container[Node]
    ) -> dict[Node, Callable[[Mapping[Node, Any]], Any]]:
        """The calls in another spelling, as functions of the values of the nodes; what is turned is two tensors.

        Args:
            sine: The sine, where it is the same in each call.
            gm: The graph.
            others: What is spelled otherwise already: what is added to stays so.
        """
        known = None if sine is None else self._signed(sine)
        found: dict[Node, Callable[[Mapping[Node, Any]], Any]] = {
            self.negated: lambda env: env[self.half],
            self.joined: lambda env: _joined(env[self.negated], env[self.other]),
            self.turned: lambda env: (env[self.joined], self._signed(env[self.sine]) if known is None else known),
            self.total: self._sum,
        }
        factors = _pair(read(self.straight, gm), MULTIPLY)
        if factors and self.straight not in others:
            found[self.straight] = lambda env: env[factors[0]] * env[factors[1]]
        return found

    def _signed(self, sine: Tensor) -> Tensor:
        return _joined(-sine[..., : self.size], sine[..., self.size :])

    def _sum(self, env: Mapping[Node, Any]) -> Tensor:
        return torch.addcmul(env[self.straight], *env[self.turned])


def _pair(call: Call | None, operation: Operation) -> tuple[Node, ...]:
    """Both arguments of a sum or a product of two values."""
    if call is None or call.operation is not operation or call["alpha"] not in (None, 1):
        return ()
    pair = tuple(value for value in (call["input"], call["other"]) if isinstance(value, Node))
    return pair if len(pair) == 2 else ()


def _halves(
    joined: Node, gm: GraphModule, forms: Mapping[Node, tuple[torch.Size, Any]]
) -> tuple[Node, Node, Node] | None:
    """What is negated in the first half of joined rows, of what, and the second half."""
    parts, axis = (*joined.args, *joined.kwargs.values(), None, None)[:2]
    if called(joined, gm) not in JOINING or not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    negation, other = read(parts[0], gm), parts[1]
    if negation is None or negation.operation is not NEGATE or not isinstance(other, Node):
        return None
    negated, half = negation.node, negation.input
    if len(joined.users) > 1 or len(negated.users) > 1 or half not in forms:
        return None
    return (negated, half, other) if axis in (-1, len(forms[half][0]) - 1) else None


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Two halves side by side, by a function that oneDNN Graph does not know."""
    return torch.stack((first, second), -2).flatten(-2)
