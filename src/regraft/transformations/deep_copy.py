"""`DeepCopy`: a deep copy of the graph module."""

from __future__ import annotations

import copy

from torch.fx import GraphModule

from regraft.core.transformation import ReversibleTransformation


class DeepCopy(ReversibleTransformation):
    """Go on with a deep copy of the graph module, its marks and history included; the original stays as it is.

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.symbolic_trace(torch.nn.Linear(2, 2))
        >>> rg.DeepCopy()(gm) is gm
        False
    """

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """The copy."""
        return copy.deepcopy(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """A copy is as good as its original: the graph module itself."""
        return graph_module
