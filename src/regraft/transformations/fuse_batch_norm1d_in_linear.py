"""`FuseBatchNorm1dInLinear`: a batch norm behind or before a linear layer becomes part of it."""

from __future__ import annotations

from torch import nn

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import BATCH_NORM, LINEAR
from regraft.transformations._batch_norm import fold


class FuseBatchNorm1dInLinear(Rewrite):
    """Fuse a one-dimensional batch norm into the linear layer before it, or the one behind it.

    With `s = gamma / sqrt(var + eps)` and `t = beta - mean s`: behind the layer `W' = s W`, `b' = (b - mean) s + beta`;
    before it `W' = W s`, `b' = b + W t`. `FoldBatchNorm` is the general form.

    Example:
        >>> import torch, regraft as rg
        >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).eval()
        >>> gm = rg.FuseBatchNorm1dInLinear()(rg.trace(net, (torch.randn(4, 3),)))
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['1']
    """

    preserves_computation = True
    pattern = Calls(BATCH_NORM, modules=(nn.BatchNorm1d,))
    exhaustive = True

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        return fold(match, edit, facts, ((LINEAR, True), (LINEAR, False)), norms=(0, 1))
