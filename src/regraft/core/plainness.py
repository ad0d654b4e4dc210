"""Whether a module or a tensor is what `torch.nn` made it, and nothing more."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def plain_module(where: str, module: nn.Module) -> str | None:
    """None for a module that only computes what its class says; else what it does besides."""
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return f"{where} has hooks, which would be lost; remove them, or wrap the module instead"
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        return f"{where} is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if "forward" in module.__dict__:
        return f"{where} has a forward of its own, set on the instance"
    for name in ("weight", "bias"):
        if isinstance(module.__dict__.get(name), Tensor):
            return f"{where}.{name} is computed by pruning or weight norm; make it permanent first (prune.remove)"
    return None


def plain_tensor(name: str, tensor: Tensor) -> str | None:
    """None for an ordinary dense floating-point tensor; else what it is."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"{name} is a {type(tensor).__name__}, not an ordinary tensor"
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return f"{name} has hooks on its gradient, which would be lost; remove them"
    if tensor.layout is not torch.strided:
        return f"{name} is {str(tensor.layout).removeprefix('torch.')}, not dense"
    if not tensor.dtype.is_floating_point:
        return f"{name} is {dtype_name(tensor)}, not floating point"
    return None


def dtype_name(tensor: Tensor) -> str:
    """`float32` for `torch.float32`."""
    return str(tensor.dtype).removeprefix("torch.")
