"""`FuseBiasInLinear`: the bias becomes a column of the weight, against a column of ones in the input."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import LINEAR
from regraft.core.weights import Concatenate


class FuseBiasInLinear(Rewrite):
    """Fuse the bias of a linear layer into its weight.

    `x W^T + b = [x, 1] [W, b]^T`. It serves engines without a biased product; on torch itself it is slower.

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.FuseBiasInLinear()(rg.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 3))))
        >>> gm.get_submodule("0")
        Linear(in_features=5, out_features=3, bias=False)
    """

    preserves_computation = True
    pattern = Calls(LINEAR)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        require(facts.plain(call))
        weight, bias = call.weight("weight"), call.weight("bias")
        assert weight is not None
        require(that(bias is not None, f"{call.where} has no bias"))
        assert bias is not None
        require(
            facts.alone(call),
            facts.agree([(weight.name, weight.tensor), (bias.name, bias.tensor)]),
            that(weight.tensor.ndim == 2, f"{call.where}: the weight is not a matrix"),
        )

        rows, columns = weight.tensor.shape
        parts = ((rows, columns), (rows, 1))
        derived = Concatenate(1, parts, (False, False), ((rows, columns), tuple(bias.tensor.shape))), [weight, bias]
        name = call.where if call.module is not None else edit.free_name("linear")
        like = call.module or nn.Linear(1, 1, device="meta")
        edit.put_module(name, like, {"weight": derived, "bias": None}, in_features=columns + 1, out_features=rows)
        padded = edit.insert(call.node, F.pad, call.input, (0, 1), value=1.0)
        edit.replace_with_module(call.node, name, padded)
        edit.discard(call)
        return "fused the bias into the weight"
