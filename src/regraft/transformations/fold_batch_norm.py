"""`FoldBatchNorm`: a batch norm goes into the convolution or linear layer beside it."""

from __future__ import annotations

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import BATCH_NORM, CONV, LINEAR, TRANSPOSED_CONV
from regraft.transformations._batch_norm import fold


class FoldBatchNorm(Rewrite):
    """Fold a batch norm in evaluation mode into the layer before it, or the one behind it.

    With `s = gamma / sqrt(var + eps)` and `t = beta - mean s`: `s (W x + b) + t = (s W) x + ((b - mean) s + beta)` and
    `W (s x + t) + b = (W s) x + (b + W t)` (Ioffe and Szegedy 2015, arXiv:1502.03167). Convolutions and transposed
    convolutions of one, two and three axes, grouped ones too, and linear layers; through identities, eval-mode dropout
    and reshaped rows. A norm before a convolution is folded where no padding of zeros lies between.

    In half precision the weight is rounded once more. The norm of the error stays what it is; a value near zero, a sum
    whose terms cancel, may be several times further off than the original's, which rounds the sum and not its terms.

    Example:
        >>> import torch, regraft as rg
        >>> net = torch.nn.Sequential(torch.nn.ConvTranspose1d(3, 4, 2), torch.nn.BatchNorm1d(4)).eval()
        >>> gm = rg.FoldBatchNorm()(rg.trace(net, (torch.randn(2, 3, 5),)))
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['0']
    """

    preserves_computation = True
    pattern = Calls(BATCH_NORM)
    exhaustive = True

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        behind = ((LINEAR, True), (CONV, True), (TRANSPOSED_CONV, True))
        before = ((LINEAR, False), (CONV, False), (TRANSPOSED_CONV, False))
        return fold(match, edit, facts, behind + before, norms=(0, 1, 2, 3))
