"""Inductor, through `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regraft.core.errors import NotCovered
from regraft.optimize.engines.flat import Flat, Run


def build(flat: Flat) -> Run:
    """Compile a graph.

    A size of one is a program of its own to the compiler, which would take seconds or minutes for another. So sizes
    that vary vary from two on, and those that are one in the example stay one.

    Args:
        flat: The graph.

    Raises:
        Exception: What the compiler raises; without a C++ compiler nothing can be compiled for a CPU.
    """
    axes = [(place, axis) for place, varying in enumerate(flat.varying) for axis in varying]
    sizes = [(place, axis, flat.sample[place].shape[axis]) for place, axis in axes]
    compiled = torch.compile(flat.module, fullgraph=True, dynamic=any(size > 1 for _, _, size in sizes))

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if any((inputs[place].shape[axis] == 1) is not (size == 1) for place, axis, size in sizes):
            raise NotCovered("Inductor would compile another program for a size of one")
        with torch.no_grad():
            return [leaf for leaf in pytree.tree_leaves(compiled(*inputs)) if isinstance(leaf, Tensor)]

    run(flat.sample)
    return run
