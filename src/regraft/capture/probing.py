"""Whether a captured graph is right for what export never looks at: the size one, a second call, and anything else.

Export takes every axis that varies to be of size two or more, and leaves out what a model does for one: a model that
asks `if x.shape[0] == 1` is captured without the branch. So the graph and the model are run once on such an input.
Where they differ in one bit, a call with it is refused.

Export sees one call. A model that keeps something for the next, and computes with it, is run twice.

Whatever else export does not see shows where the two are run on the sample itself, and are far apart.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from regraft.capture import caches, torch_private
from regraft.capture.calling import Calling
from regraft.capture.constraints import Constraints, Range
from regraft.capture.signature import Call
from regraft.capture.untouched import untouched, values_kept
from regraft.core.graph_module import GraphModule
from regraft.core.mutation import weights_written

ROUNDED, FAR = (0.01, 1e-5), (0.3, 0.01)
"""Of the length of a result, in two bytes and in more: what rounding makes of it where the same product is computed
otherwise at each call, as some are by several threads; and what rounding does not make of it at all."""


class Probe:
    """A model and its graph, run on the sample cut to other sizes: once for each.

    Args:
        model: the model.
        gm: its graph, which must not have been changed yet.
        call: the call that it was captured with.
        calling: how the graph is called.
    """

    def __init__(self, model: nn.Module, gm: GraphModule, call: Call, calling: Calling) -> None:
        assert calling.constraints is not None
        self.model, self.gm, self.call, self.calling = model, gm, call, calling
        self.constraints = calling.constraints
        self._written = [*model.buffers(), *weights_written(gm)]
        self._verdicts: dict[tuple[torch.Size, ...], bool | None] = {}

    def allow_size_one(self) -> None:
        """Let axes be of size one where the graph gives what the model gives, bit for bit; it changes constraints."""
        ranges = self.constraints.ranges
        symbols = [symbol for symbol, bounds in ranges.items() if bounds.lower <= 2]
        if self._is_meta:
            self.constraints.allow_from(2, symbols)  # nothing can be run: take export's word, "two or more"
            return
        self.constraints.allow_from(1, symbols)
        verdicts = {
            group: self._agree(_sample_of_one(self.call.leaves, self.constraints, group))
            for group in _groups(ranges, symbols)
        }
        alone = {symbol for symbol in symbols if verdicts[frozenset({symbol})]}
        for group, verdict in verdicts.items():
            if verdict is False and group <= alone:
                alone -= group
        for symbol in [symbol for symbol in symbols if symbol not in alone]:
            together = next((group for group, verdict in verdicts.items() if verdict and group > {symbol}), None)
            if together is None:
                self.constraints.allow_from(2, [symbol])
            else:
                self.constraints.require_together(symbol, together)

    def agrees(self, within: tuple[float, float] | None = None) -> bool:
        """Whether the graph takes the sample as it is, and gives what the model gives.

        Args:
            within: but for this, `ROUNDED` say; None for bit for bit.
        """
        verdict = self._of_sample()
        return verdict is True or (verdict is False and within is not None and self._is_near(within))

    def is_far_off(self) -> bool:
        """Whether the graph takes the sample, and gives something of it that rounding does not make of a result."""
        return self._of_sample() is False and not self._is_near(FAR)

    def answers_alike(self) -> bool:
        """Whether the model answers a second time as it did at first, or as the graph does then."""
        leaves = list(self.call.leaves)
        if self._is_meta:
            return True
        first, second = (self._run(self.model, leaves, times) for times in (1, 2))
        if first is None or second is None or _all_equal(first, second):
            return True
        given = self._run(self.gm, leaves, times=2)
        return given is not None and _all_equal(second, given)

    def _of_sample(self) -> bool | None:
        """Whether the two agree on the sample; None where the graph does not take it, and where there are no values."""
        leaves = list(self.call.leaves)
        try:
            self.calling.check(leaves)  # it may have been tried before a size of one was forbidden
        except TypeError:
            return None
        return None if self._is_meta else self._agree(leaves)

    def _is_near(self, by: tuple[float, float]) -> bool:
        leaves = list(self.call.leaves)
        expected, given = (self._run(module, leaves) for module in (self.model, self.gm))
        return expected is not None and given is not None and _all_near(expected, given, by)

    @property
    def _is_meta(self) -> bool:
        return any(leaf.device.type == "meta" for leaf in (*self.call.leaves, *self.model.parameters()))

    def _agree(self, leaves: list[torch.Tensor] | None) -> bool | None:
        """Whether the two agree on some inputs; None where the model does not take them, and so promises nothing."""
        if leaves is None:
            return None
        sizes = tuple(leaf.shape for leaf in leaves)
        if sizes not in self._verdicts:
            self._verdicts[sizes] = self._compared(leaves)
        return self._verdicts[sizes]

    def _compared(self, leaves: list[torch.Tensor]) -> bool | None:
        expected = self._run(self.model, leaves)
        if expected is None:
            return None
        given = self._run(self.gm, leaves)
        return given is not None and _all_equal(expected, given)

    def _run(self, module: nn.Module, leaves: list[torch.Tensor], times: int = 1) -> list[Any] | None:
        """What the last of some calls of the model or its graph with the same inputs gives."""
        found: list[Any] = []
        try:
            # fx writes about a failing graph to stderr, where nobody is to read of a mere try
            with (
                untouched(self.model),
                values_kept(self._written),
                torch.no_grad(),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                for _ in range(times):
                    args, kwargs = self.call.rebuild([leaf.clone() for leaf in leaves])
                    found = list(torch_private.tree_leaves(caches.unfold(module(*args, **kwargs))))
        except Exception:  # whatever a model raises when it does not take this size
            return None
        return found


def _groups(ranges: dict[str, Range], symbols: list[str]) -> list[frozenset[str]]:
    """Which axes to make one together: each alone, those at one place in the shape (the batch), all."""
    by_axis: dict[int, set[str]] = {}
    for symbol in symbols:
        by_axis.setdefault(ranges[symbol].at[1], set()).add(symbol)
    groups = [frozenset({symbol}) for symbol in symbols] + [frozenset(group) for group in by_axis.values()]
    return list(dict.fromkeys([*groups, frozenset(symbols)])) if symbols else []


def _sample_of_one(
    leaves: Sequence[torch.Tensor], constraints: Constraints, group: Set[str]
) -> list[torch.Tensor] | None:
    """The sample cut down so that some sizes are one; None where the graph's conditions then do not hold.

    Where they do not, one other size is cut by as much: a mask as long as what is kept and what is new together.
    Nor do they hold for the sample itself where a size of one was made larger and then taken for another's.
    """
    sizes: dict[str, int] = {}
    for leaf, shape in zip(leaves, constraints.shapes):
        for axis, size in enumerate(shape):
            if size in constraints.ranges and sizes.setdefault(str(size), leaf.shape[axis]) != leaf.shape[axis]:
                return None
    less = max(sizes[symbol] for symbol in group) - 1
    wanted = {**sizes, **dict.fromkeys(group, 1)}
    others = [symbol for symbol in sizes if symbol not in group and sizes[symbol] > less > 0]
    for trial in [wanted, *({**wanted, other: sizes[other] - less} for other in others)]:
        resized = _resized(leaves, constraints, trial)
        try:
            constraints.check(resized)
        except TypeError:
            continue
        return resized
    return None


def _resized(leaves: Sequence[torch.Tensor], constraints: Constraints, sizes: dict[str, int]) -> list[torch.Tensor]:
    resized = []
    for leaf, shape in zip(leaves, constraints.shapes):
        for axis, size in enumerate(shape):
            if isinstance(size, str) and size in sizes:
                leaf = leaf.narrow(axis, 0, sizes[size])
        resized.append(leaf.clone())
    return resized


def _all_equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(_equal, left, right))


def _all_near(left: list[Any], right: list[Any], by: tuple[float, float]) -> bool:
    return len(left) == len(right) and all(_near(*both, by) for both in zip(left, right))


def _near(left: object, right: object, by: tuple[float, float]) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return _equal(left, right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.is_floating_point() or left.layout is not torch.strided:
        return True  # an index may be that of a value that is as large but for rounding
    finite = left.isfinite()
    wide, other = (each.detach().where(finite, torch.zeros_like(each)).double() for each in (left, right))
    near = (wide - other).norm() <= by[left.dtype.itemsize > 2] * wide.norm()
    return bool(near) and torch.equal(finite, right.isfinite())


def _equal(left: object, right: object) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
