"""Images of a single pixel, which squeeze-and-excitation makes of larger ones (Hu et al. 2018, arXiv:1709.01507)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from regraft.core.vocabulary import CONV, Call

Env = Mapping[Node, Any]
Spelling = Callable[[Env], Tensor]
TYPES = (torch.float32, torch.bfloat16)
"""The types that its kernels know."""
_MEANS = {"adaptive_avg_pool2d", "adaptiveavgpool2d", "mean"}
_OF_PARTS: Any = getattr(torch.ops.aten, "_adaptive_avg_pool2d", None)  # where torch has it no more, all stays as it is
_PADS_NOTHING = (0, (0, 0), [0, 0], "valid", "same")  # a kernel of one pixel


def of_single_pixels(node: Node, name: str, call: Call | None, result: Tensor, env: Env) -> Spelling | None:
    """Another spelling of a call that makes such an image, from the values of the nodes; None where it stays as it is.

    Args:
        node: The call.
        name: The name of the function, method or layer.
        call: What is known of it.
        result: Its result in the sample.
        env: The values of the nodes there.
    """
    if call is not None and call.operation is CONV:
        return _product(call, env)
    if name in _MEANS and node.all_input_nodes:
        return _mean(node, result, env)
    return None


def _product(call: Call, env: Env) -> Spelling | None:
    """A convolution of one pixel as the product with a vector: a kernel of oneDNN Graph takes longer to begin."""
    given, weight = env[call.input], from_env(call["weight"], env)
    if given.ndim != 4 or given.shape[:1].numel() != 1 or given.shape[2:].numel() != 1 or given.dtype != torch.float32:
        return None
    if weight.shape[2:].numel() != 1 or call["groups"] != 1 or call["padding"] not in _PADS_NOTHING:
        return None

    def compute(env: Env) -> Tensor:
        weight, bias = (from_env(call[name], env) for name in ("weight", "bias"))
        x, matrix = env[call.input].flatten(), weight.flatten(1)
        product = torch.mv(matrix, x) if bias is None else torch.addmv(bias, matrix, x)
        return product.view(1, -1, 1, 1)

    return compute


def _mean(node: Node, result: Tensor, env: Env) -> Spelling | None:
    """The mean of an image of halves by the kernel for means of its parts: torch makes float32 of it all otherwise."""
    image = env[node.all_input_nodes[0]]
    size = (*image.shape[:2], 1, 1)
    if _OF_PARTS is None or image.dtype != torch.bfloat16 or result.dtype != image.dtype or result.shape != size:
        return None

    def compute(env: Env) -> Tensor:
        found: Tensor = _OF_PARTS(env[node.all_input_nodes[0]], [1, 1])
        return found

    return compute


def from_env(value: Any, env: Env) -> Any:
    """An argument of a call: the value of a node, or what is no node, as it is.

    Args:
        value: The argument.
        env: The values of the nodes.
    """
    return env[value] if isinstance(value, Node) else value
