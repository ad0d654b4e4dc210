"""Inductor, through `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regraft.optimize.engines.flat import Flat, Run


def build(flat: Flat) -> Run:
    """Compile a graph.

    Args:
        flat: The graph.

    Raises:
        Exception: What the compiler raises; without a C++ compiler nothing can be compiled for a CPU.
    """
    compiled = torch.compile(flat.module, fullgraph=True, dynamic=any(flat.varying))

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            return [leaf for leaf in pytree.tree_leaves(compiled(*inputs)) if isinstance(leaf, Tensor)]

    run(flat.sample)
    return flat.but_for_ones(run)
