"""Whether a module or a tensor is what `torch.nn` made it, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence

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
    for name in ("weight", "bias"):
        if isinstance(module.__dict__.get(name), Tensor):
            return f"{where}.{name} is computed by pruning or weight norm; make it permanent first (prune.remove)"
    if any(map(module.__dict__.get, _HOOKS)):
        return f"{where} has hooks, which would be lost; remove them, or wrap the module instead"
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        return f"{where} is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if "forward" in module.__dict__:
        return f"{where} has a forward of its own, set on the instance"
    return None


def unlike(where: str, module: nn.Module, exact: Sequence[type[nn.Module]]) -> str:
    """Why a module of another class is not taken for one of the `exact` classes, even where it derives from one."""
    kind = type(module)
    said = f"{where} is a {kind.__name__}"
    if parametrize.is_parametrized(module):
        return f"{said}, and so parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return f"{said}, whose weights are not made yet; run the model once before it is traced"
    if kind.__module__.startswith("regraft."):
        return f"{said}, {getattr(kind, 'made_how', 'which another rewrite has made')}"
    parent = next((base for base in kind.__mro__ if base in exact), None)
    if parent is not None and any("forward" in vars(base) for base in kind.__mro__[: kind.__mro__.index(parent)]):
        return f"{said}, whose forward is its own and not that of {parent.__name__}"
    names = ", ".join(base.__name__ for base in exact)
    return f"{said}; only torch.nn's own classes ({names}) are known to compute what they say"


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
