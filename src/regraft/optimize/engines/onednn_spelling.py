"""Calls that oneDNN Graph cannot compile, or takes for others, in a spelling that it computes rightly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from regraft.core.vocabulary import BATCH_NORM, GELU, LAYER_NORM, Call

Env = Mapping[Node, Any]


def respelled(call: Call, env: Env) -> Callable[[Env], Tensor] | None:
    """Another spelling of a call, from the values of the nodes; None where it can stay as it is.

    Args:
        call: The call.
        env: The values of the nodes, in the sample.
    """
    if call.operation is GELU and call["approximate"] == "tanh":
        return partial(_gelu_by_tanh, call.input)
    if call.operation in (LAYER_NORM, BATCH_NORM) and (call["weight"] is None or call["bias"] is None):
        return _norm(call, env)
    return None


def _gelu_by_tanh(given: Node, env: Env) -> Tensor:
    """`x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    It is taken for the exact one, which is off by up to 5e-4. In float32, as torch computes it.
    """
    x: Tensor = env[given]
    y = x.float()
    return (0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)))).to(x.dtype)


def _norm(call: Call, env: Env) -> Callable[[Env], Tensor] | None:
    """A norm with a weight and a bias: one that lacks either cannot be compiled."""
    given, shape = call.input, call["normalized_shape"]
    if call.operation is BATCH_NORM:
        mean = _value(call["running_mean"], env)
        if call["training"] or mean is None:
            return None
        shape = tuple(mean.shape)
    shape = map_arg(shape, env.__getitem__)  # sizes are fixed in a program
    there = [_value(call[name], env) for name in ("weight", "bias")]
    dtype = next((tensor.dtype for tensor in there if tensor is not None), env[given].dtype)
    plain = tuple(torch.full(shape, value, dtype=dtype, device=env[given].device) for value in (1.0, 0.0))

    def compute(env: Env) -> Tensor:
        weight, bias = (
            other if call[name] is None else _value(call[name], env)
            for name, other in zip(("weight", "bias"), plain, strict=True)
        )
        if call.operation is LAYER_NORM:
            return F.layer_norm(env[given], shape, weight, bias, call["eps"])
        mean, variance = (_value(call[name], env) for name in ("running_mean", "running_var"))
        return F.batch_norm(env[given], mean, variance, weight, bias, eps=call["eps"])

    return compute


def as_linear(node: Node, steady: Env) -> Callable[[Env], Tensor] | None:
    """A product and a sum as a linear layer: a constant that is added to a product cannot be compiled.

    Args:
        node: A call of `addmm`.
        steady: The values that are the same in each call.

    Returns:
        The layer, from the values of the nodes; None where it is none.
    """
    if node.kwargs or len(node.args) != 3:
        return None
    bias, given, weight = (value for value in node.args if isinstance(value, Node))
    if bias not in steady or weight not in steady or steady[bias].ndim != 1:
        return None
    return lambda env: F.linear(env[given], steady[weight].t().contiguous(), steady[bias])


def joined(node: Node, env: Env, dtype: torch.dtype) -> Callable[[Env], Tensor] | None:
    """Tensors joined without those that have no elements, which cannot be compiled.

    Args:
        node: A call of `cat`.
        env: The values of the nodes, in the sample.
        dtype: The type of its result there.

    Returns:
        The others joined, from the values of the nodes; None where the call can stay as it is.
    """
    nodes: Any = node.args[0] if node.args else None
    if not isinstance(nodes, (list, tuple)):
        return None
    full = [each for each in nodes if env[each].numel()]
    if not full or len(full) == len(nodes):
        return None
    return lambda env: torch.cat([env[each].to(dtype) for each in full], *node.args[1:], **node.kwargs)  # type: ignore[arg-type]


def _value(value: Any, env: Env) -> Any:
    return env[value] if isinstance(value, Node) else value
