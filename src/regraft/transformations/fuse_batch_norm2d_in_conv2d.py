"""`FuseBatchNorm2dInConv2d`: conv2d followed by a batch norm becomes conv2d."""

from __future__ import annotations

from torch import nn

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import BATCH_NORM, CONV
from regraft.transformations._batch_norm import fold


class FuseBatchNorm2dInConv2d(Rewrite):
    """Fuse a two-dimensional batch norm into the convolution before it, if nothing else reads that convolution.

    With `s = gamma / sqrt(var + eps)`: `W' = s W`, `b' = (b - mean) s + beta`. `FoldBatchNorm` is the general form.

    Example:
        >>> import torch, regraft as rg
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1, bias=False), torch.nn.BatchNorm2d(4)).eval()
        >>> gm = rg.FuseBatchNorm2dInConv2d()(rg.symbolic_trace(net))
        >>> print(gm.get_submodule("0"))
        Conv2d(3, 4, kernel_size=(1, 1), stride=(1, 1))
    """

    preserves_computation = True
    pattern = Calls(BATCH_NORM, modules=(nn.BatchNorm2d,))
    exhaustive = True

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        return fold(match, edit, facts, ((CONV, True),), norms=(2,))
