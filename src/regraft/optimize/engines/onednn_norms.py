"""Norms in a spelling that oneDNN Graph compiles, or that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from regraft.core.vocabulary import BATCH_NORM, INSTANCE_NORM, LAYER_NORM, RMS_NORM, Call, Operation, read
from regraft.optimize.engines.onednn_layouts import anew
from regraft.optimize.engines.onednn_single import TYPES, Env, Spelling, from_env

_FEW = {torch.float32: 1 << 17, torch.bfloat16: 1 << 14}
"""Layer norms of fewer elements take torch less time than a kernel takes to begin."""
_AXES: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
"""Those of a batch: what has fewer is no batch, and its first axis is that of the channels."""


def _norm(call: Call, env: Env) -> Spelling | None:
    """A norm with a weight and a bias: one that lacks either cannot be compiled.

    A layer norm of halves has these in float32: with weights in halves it is left to torch, which takes up to twice as
    long. A batch norm in float32 is a product and a sum, as torch computes it, in half the time or less.
    """
    given, shape = call.input, call["normalized_shape"]
    if call.operation is LAYER_NORM and env[given].numel() < _FEW.get(env[given].dtype, 0):
        return _by_torch(call)
    bare = call["weight"] is None or call["bias"] is None
    halves = call.operation is LAYER_NORM and env[given].dtype is torch.bfloat16
    if not bare and not halves and (call.operation is LAYER_NORM or env[given].dtype is not torch.float32):
        return None
    if call.operation is BATCH_NORM:
        mean = from_env(call["running_mean"], env)
        if call["training"] or mean is None:
            return None
        shape = tuple(mean.shape)
    shape = map_arg(shape, env.__getitem__)  # sizes are fixed in a program
    there = [from_env(call[name], env) for name in ("weight", "bias")]
    dtype = next((tensor.dtype for tensor in there if tensor is not None), env[given].dtype)
    plain = tuple(torch.full(shape, value, dtype=dtype, device=env[given].device) for value in (1.0, 0.0))

    def compute(env: Env) -> Tensor:
        weight, bias = (
            other if call[name] is None else from_env(call[name], env)
            for name, other in zip(("weight", "bias"), plain, strict=True)
        )
        if call.operation is LAYER_NORM:
            weight, bias = (weight.float(), bias.float()) if halves else (weight, bias)
            return F.layer_norm(env[given], shape, weight, bias, call["eps"])
        mean, variance = (from_env(call[name], env) for name in ("running_mean", "running_var"))
        if env[given].dtype is torch.float32:
            factor = weight / torch.sqrt(variance + call["eps"])
            around = (1, -1, *(1,) * (env[given].ndim - 2))
            return torch.addcmul((bias - mean * factor).view(around), env[given], factor.view(around))
        return F.batch_norm(env[given], mean, variance, weight, bias, eps=call["eps"])

    return compute


def rectified(call: Call, env: Env) -> Spelling | None:
    """The ReLU of a batch norm that torch computes, written into the norm's memory; None where others read that.

    `relu_` would not do: TorchScript gives its result memory of its own again, but leaves this function as it is.

    Args:
        call: The ReLU.
        env: The values of the nodes.
    """
    given = call.input
    norm = read(given, call.owner)
    if norm is None or norm.operation is not BATCH_NORM or len(given.users) != 1:
        return None
    if norm["training"] or norm["running_mean"] is None or env[given].dtype is not torch.float32:
        return None
    return lambda env: torch.clamp_min_(env[given], 0)


def _by_torch(call: Call) -> Spelling:
    """A layer norm by the function that torch's own calls, and that it does not know."""

    def compute(env: Env) -> Tensor:
        weight, bias = (from_env(call[name], env) for name in ("weight", "bias"))
        shape = map_arg(call["normalized_shape"], env.__getitem__)
        return torch.native_layer_norm(env[call.input], shape, weight, bias, call["eps"])[0]

    return compute


def _rms_norm(call: Call, env: Env) -> Spelling | None:
    """`x / sqrt(mean(x^2) + eps)`, without torch's power and mean, for which a product and a sum will do."""
    given, shape, eps = call.input, map_arg(call["normalized_shape"], env.__getitem__), call["eps"]
    axes, count = tuple(range(-len(shape), 0)), math.prod(shape)
    if not isinstance(eps, float) or env[given].dtype not in TYPES or not count:
        return None
    least, one = (torch.full((1,) * env[given].ndim, number, device=env[given].device) for number in (eps, 1.0))

    def compute(env: Env) -> Tensor:
        value, x = env[given], env[given].float()
        if value.dtype == torch.float32:
            factors = (x * x).sum(axes, keepdim=True), one
        else:  # this one reads the halves themselves; of float32 it makes a little more error, and gains little
            factors = (torch.linalg.vector_norm(value, dim=axes, keepdim=True, dtype=torch.float32),) * 2
        squares = torch.addcmul(least, *factors, value=1 / count)
        weight = from_env(call["weight"], env)
        normed = x * squares.rsqrt()
        # looked at anew, for two factors, of which one has one element in each row, are the reference kernel's, and a
        # factor is taken for the beginning of the product that reads it
        normed = normed if weight is None else anew(normed) * weight
        return anew(normed.to(value.dtype))

    return compute


def _instance_norm(call: Call, env: Env) -> Spelling | None:
    """Each channel of each image by its own mean and variance: torch copies images whose channels lie last, twice.

    The variance is that of the differences from the mean, as torch's is. A mean of squares would be one pass less, and
    wrong where the mean is large. Of a single image it is a batch norm in training, whose sums over channels that lie
    last are ten times less exact than others in float32; of halves that is nothing beside the rounding of the result.
    """
    given, ndim, eps = call.input, env[call.input].ndim, call["eps"]
    batched = ndim > 2 if call.module is None else ndim == _AXES[type(call.module)]
    halves = env[given].dtype == torch.bfloat16 and len(env[given]) == 1
    if not batched or not isinstance(eps, float) or not (halves or env[given].dtype == torch.float32):
        return None
    if call["running_mean"] is not None:
        return None
    axes, channels = tuple(range(2, ndim)), (1, -1, *(1,) * (ndim - 2))

    def compute(env: Env) -> Tensor:
        x: Tensor = env[given]
        weight, bias = (from_env(call[name], env) for name in ("weight", "bias"))
        if halves:
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
        apart = x - x.mean(axes, keepdim=True)
        factor = torch.rsqrt((apart * apart).mean(axes, keepdim=True) + eps)
        factor = factor if weight is None else factor * weight.view(channels)
        return apart * factor if bias is None else torch.addcmul(bias.view(channels), apart, factor)

    return compute


NORMS: dict[Operation, Callable[[Call, Env], Spelling | None]] = {
    LAYER_NORM: _norm,
    BATCH_NORM: _norm,
    RMS_NORM: _rms_norm,
    INSTANCE_NORM: _instance_norm,
}
"""What gives the spelling of each norm from its call and the values of the nodes; None where it stays as it is."""
