"""Batches of matrix products, in a form that oneDNN Graph compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.core.vocabulary import Call
from regraft.optimize.engines.onednn_fusions import goes_inside
from regraft.optimize.engines.onednn_layouts import begins_oddly, begun_anew
from regraft.optimize.engines.onednn_single import TYPES, Env, Spelling

_SMALL = 1 << 21
"""So many multiplications take less time than a kernel takes to begin."""
_FEW = 1 << 15
"""So few results of a matrix take less time in torch, in float32, where the second matrix is a transposed one."""


def product(call: Call, env: Env) -> Spelling | None:
    """A batch of products as one that it compiles; None where it can stay as it is.

    Of three axes it compiles `bmm`, and that only if something follows in the same kernel; of four axes `matmul`.

    Args:
        call: The product.
        env: The values of the nodes.
    """
    first: Tensor = env[call.input]
    second: Tensor = env[call["other"]]
    if first.ndim != 3 or second.ndim != 3 or len(first) != len(second) or first.dtype not in TYPES:
        return None
    (rows, inner), columns = first.shape[1:], second.shape[2]
    few = first.dtype == torch.float32 and second.stride(2) != 1 and rows * columns < _FEW
    if min(rows, inner, columns) < 2 or first.numel() * columns < _SMALL or few:
        return None  # of single rows it has gone wrong
    if any(goes_inside(user, call.node, call.owner) for user in call.node.users):
        return lambda env: torch.bmm(env[call.input], env[call["other"]])
    return lambda env: torch.matmul(_batch(env[call.input]), _batch(env[call["other"]])).squeeze(0)


def _batch(matrices: Tensor) -> Tensor:
    batch = matrices.unsqueeze(0)
    return begun_anew(batch) if begins_oddly(batch) else batch
