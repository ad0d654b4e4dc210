"""Which arguments have to be finite, since a kernel would make a number of a NaN.

torch's ReLU of NaN is NaN. That of oneDNN, alone or at the end of a convolution or a linear layer, is 0, as is what it
cuts off by limits: a result that says that an input was broken would become one that says nothing of it. And where
torch takes the place of a NaN for that of the largest value, OpenVINO and ONNX Runtime look for a number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regraft.dropin import Entry, floats
from regraft.optimize.graphs import Graph
from regraft.verify.run import run
from regraft.verify.tree import tree_of


def must_be_finite(graph: Graph, entry: Entry) -> dict[str, bool]:
    """The arguments of which a NaN reaches the original's result and not that of the graph, or of its engine.

    It does so as well where it makes other whole numbers, the place of the largest value say.

    Both are tried: an engine of one size leaves other sizes to the graph, whose kernels are not the engine's. A tensor
    is tried with one NaN in its middle, which may be lost beside a way on which it stays, and with nothing else in it.

    Args:
        graph: The graph.
        entry: What runs it.

    Returns:
        For each whether infinities are to be looked for as well: not where the example has some, as masks do.
    """
    reader = graph.reader
    if reader is None:
        return {}

    def original(**call: Any) -> Any:
        args, kwargs = reader.apart(call)
        return graph.reference(*args, **kwargs)

    ours = [lambda **call: entry.run(call), *([entry.gm.forward] if entry.engine is not None else [])]
    found = {}
    for name, value in graph.call.items():
        for spoiled in _spoiled(value):
            call = {**graph.call, name: spoiled}
            expected = _made_of(original, call, graph)
            if not all(_alike(_made_of(program, call, graph), expected) for program in ours):
                found[name] = all(bool(tensor.isfinite().all()) for tensor in floats(value))
                break
    return found


def _spoiled(value: Any) -> Iterator[Any]:
    """An argument with a NaN in it: in one of its tensors after the other, in all of those of a cache together."""
    tensors = floats(value)
    groups = [tensors] if len(tensors) > _MANY else [[tensor] for tensor in tensors]
    known = {id(tensor): tensor for _, tensor in tree_of(value).tensors()}  # which need no copy
    for group in groups:
        for spoil in (_in_the_middle, _everywhere):
            yield copy.deepcopy(value, {**known, **{id(tensor): spoil(tensor) for tensor in group}})


_MANY = 4
"""Tensors in an argument beyond which they are tried together: two for each layer of a cache would take long."""


def _in_the_middle(tensor: Tensor) -> Tensor:
    spoiled = tensor.detach().clone()
    if spoiled.numel():
        spoiled[tuple(size // 2 for size in spoiled.shape)] = torch.nan
    return spoiled


def _everywhere(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor.detach(), torch.nan)


def _alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _made_of(program: Callable[..., Any], call: dict[str, Any], graph: Graph) -> dict[str, Tensor]:
    """Where the tensors of a result, and the buffers written to, have a NaN, and whole numbers themselves.

    There is nothing of what refuses the call.
    """
    found = run(program, ((), call), beside=graph.reference)
    tensors = (*found.output.tensors(), *found.written.items())
    return {
        name: value.isnan() if value.is_floating_point() or value.is_complex() else value for name, value in tensors
    }
