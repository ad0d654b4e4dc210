"""Whether a captured graph is right for the size one, which export never looks at.

Export takes every axis that varies to be of size two or more, and leaves out what a model does for one: a model that
asks `if x.shape[0] == 1` is captured without the branch. So the graph and the model are run once on such an input. Where
they differ in one bit, a call with it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from regraft.capture import torch_private
from regraft.capture.calling import Calling
from regraft.capture.constraints import Constraints
from regraft.capture.signature import Call
from regraft.capture.untouched import buffers_restored, untouched
from regraft.core.graph_module import GraphModule


def allow_size_one(model: nn.Module, gm: GraphModule, call: Call, calling: Calling) -> bool:
    """Let axes be of size one where the graph gives what the model gives, bit for bit.

    Args:
        model: the model.
        gm: its graph, which must not have been changed yet.
        call: the call that it was captured with.
        calling: how the graph is called; its constraints are changed.

    Returns:
        Whether every axis that varies may be of size one.
    """
    constraints = calling.constraints
    assert constraints is not None
    ranges = constraints.ranges
    symbols = [symbol for symbol, bounds in ranges.items() if bounds.lower <= 2]
    if any(leaf.device.type == "meta" for leaf in (*call.leaves, *model.parameters())):
        for symbol in symbols:  # nothing can be run: take export's word, which is "two or more"
            ranges[symbol].lower = 2
        return not symbols
    for symbol in symbols:
        ranges[symbol].lower = 1
    wrong = {symbol for symbol in symbols if not _agree(model, gm, call, _resized(call.leaves, constraints, {symbol}))}
    together = set(symbols) - wrong
    if len(together) > 1 and not _agree(model, gm, call, _resized(call.leaves, constraints, together)):
        wrong |= together
    for symbol in wrong:
        ranges[symbol].lower = 2
    return not wrong


def agrees(model: nn.Module, gm: GraphModule, call: Call) -> bool:
    """Whether a graph gives, bit for bit, what the model gives for the call that it was captured with.

    Args:
        model: the model.
        gm: its graph.
        call: the call.
    """
    return _agree(model, gm, call, list(call.leaves))


def _resized(leaves: Sequence[torch.Tensor], constraints: Constraints, symbols: set[str]) -> list[torch.Tensor] | None:
    """The sample cut down so that some symbols are one; None where a size depends on them in another way."""
    resized = []
    for leaf, shape in zip(leaves, constraints.shapes):
        for axis, size in enumerate(shape):
            if size in symbols:
                leaf = leaf.narrow(axis, 0, 1)
            elif isinstance(size, str) and size not in constraints.ranges:
                return None
        resized.append(leaf.clone())
    return resized


def _agree(model: nn.Module, gm: GraphModule, call: Call, leaves: list[torch.Tensor] | None) -> bool:
    if leaves is None:
        return False
    results = []
    for module in (model, gm):
        args, kwargs = call.rebuild([leaf.clone() for leaf in leaves])
        try:
            with untouched(model), buffers_restored(model), torch.no_grad():
                results.append(torch_private.tree_leaves(module(*args, **kwargs)))
        except Exception:  # a model that does not take this size makes no promise about it
            return False
    return len(results[0]) == len(results[1]) and all(_equal(a, b) for a, b in zip(*results))


def _equal(left: object, right: object) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
