"""`LintAndRecompile`: checks the graph and compiles its code."""

from __future__ import annotations

from torch.fx import GraphModule

from regraft.core.history import lint_and_recompile
from regraft.core.transformation import ReversibleTransformation


class LintAndRecompile(ReversibleTransformation):
    """Lint the graph and recompile the code: for the end of a chain run with `lint_and_recompile=False`.

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.symbolic_trace(torch.nn.Linear(2, 2))
        >>> rg.LintAndRecompile()(gm) is gm
        True
    """

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Lint and recompile."""
        lint_and_recompile(graph_module)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """There is nothing to take back."""
        return graph_module
