"""Linear layers that torch or MKL compute faster here than a kernel of oneDNN Graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from regraft.core.vocabulary import LINEAR, Call, read
from regraft.optimize.engines.onednn_fusions import goes_inside
from regraft.optimize.engines.onednn_single import Env
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations._activations import NONE, Activation, activation_of
from regraft.transformations._packed_linear import MKL, PLAIN, way_in_program


@dataclass(frozen=True)
class OwnLayer:
    """A linear layer by MKL's product, or of one row by torch's of a matrix and a vector, as was the fastest here.

    Args:
        given: What it is given.
        weight: (out_features, in_features).
        bias: (out_features,), or None.
        packed: The weight as MKL has it for so many rows; None for torch.
        rows: Of how many rows the input is.
    """

    given: Node
    weight: Tensor
    bias: Tensor | None
    packed: Tensor | None
    rows: int

    @classmethod
    def of(
        cls, call: Call | None, env: Env, steady: Mapping[Node, Tensor], packs: dict[Any, Tensor]
    ) -> OwnLayer | None:
        """A call of a layer as such; None where it is none, or oneDNN is as fast.

        Args:
            call: The call.
            env: The values of the nodes in the sample.
            steady: Those that are the same in each call.
            packs: What was packed before: a weight may be several layers'.
        """
        layer = layer_of(call, env, steady)
        if call is None or layer is None:
            return None
        x, weight, bias = layer
        rows = x.numel() // weight.shape[1]
        way = way_in_program(x, weight, bias, *_followed_by(call))
        if way == MKL:
            key = weight.data_ptr(), weight.shape, weight.stride(), rows
            if key not in packs:
                packs[key] = mkldnn.pack_sgemm(weight, rows)
            return cls(call.input, weight, bias, packs[key], rows)
        return cls(call.input, weight, bias, None, rows) if way == PLAIN else None

    def compute(self, env: Env, packed: Tensor | None) -> Tensor:
        """Its result.

        Args:
            env: The values of the nodes.
            packed: `packed`, as the program has it.
        """
        x: Tensor = env[self.given]
        if packed is not None:
            return mkldnn.sgemm(x, packed, self.weight, self.bias, self.rows)
        vector = x.reshape(-1)
        product = torch.mv(self.weight, vector)
        product = product if self.bias is None else product + self.bias
        return product.view(*x.shape[:-1], len(product))


def layer_of(call: Call | None, env: Env, steady: Mapping[Node, Tensor]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The input, the weight and the bias of a linear layer whose weights are the same in each call; None for others.

    Args:
        call: A call.
        env: The values of the nodes in the sample.
        steady: Those that are the same in each call.
    """
    if call is None or call.operation is not LINEAR:
        return None
    given = (call["weight"], call["bias"])
    weight, bias = (steady.get(each) if isinstance(each, Node) else each for each in given)
    if not isinstance(weight, Tensor) or (bias is None and call["bias"] is not None):
        return None
    x = env[call.input]
    if not x.is_cpu or x.dtype is not weight.dtype or weight.ndim != 2 or min(weight.shape) < 2 or not x.numel():
        return None
    return x, weight.detach(), None if bias is None else bias.detach()


def _followed_by(call: Call) -> tuple[Activation, bool]:
    """The activation that oneDNN would compute in the same kernel, and whether it would join another tensor there."""
    if len(call.node.users) != 1:
        return NONE, False
    (user,) = call.node.users
    activation = activation_of(read(user, call.owner))
    return activation or NONE, activation is None and goes_inside(user, call.node, call.owner)
