"""Whether a call is only a call: what decides between a kernel of one's own and the plain layer or graph.

Nobody traces it, casts its arguments, counts its operators, maps over it or differentiates it forward, and no gradient
is recorded. torch has public names for parts of this only, so this file knows the private ones. Without them no call is
ordinary, which costs speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Made = TypeVar("Made")

try:
    from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack
    from torch._C._functorch import peek_interpreter_stack

    KNOWN = type(forward_ad._current_level) is int
except (ImportError, AttributeError):
    KNOWN = False

try:
    from torch._C import _len_torch_function_stack
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
except ImportError:
    _len_torch_function_stack = int  # there are none

below_autograd: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowADInplaceOrView", nullcontext
)
"""In it no operator asks whether a gradient is recorded, which it does even under `torch.no_grad()`.

A view made in it has a count of writes of its own, and what it writes to is not counted: nobody else may have either.
"""

ORDINARY: tuple[type, ...] = (Tensor, nn.Parameter)
"""The types of tensors whose values are where their pointer says."""


def ordinary_call() -> bool:
    """Whether nothing stands between a call and its kernels: no compiler, tracer, cast, mode, transform or tangent."""
    if torch.compiler.is_compiling() or not KNOWN or _len_torch_dispatch_stack() or _is_any_autocast_enabled():
        return False
    if _get_tracing_state() is not None or peek_interpreter_stack() is not None:
        return False
    return forward_ad._current_level < 0


def functions_are_seen() -> bool:
    """Whether a mode sees which functions of torch are called, and may do something else: not one that sets a device.

    Without torch's private names for these modes nobody looks.
    """
    if not _len_torch_function_stack():
        return False
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def records_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record what is done with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def copies_last(weight: Tensor) -> bool:
    """Whether a copy of a weight can be kept: whether torch counts what is written to the weight."""
    return type(weight) in ORDINARY and not weight.is_inference()


def outside_inference_mode(function: Callable[..., Made], *args: Tensor) -> Made:
    """What a function makes of tensors; of weights that were made in inference mode none could be trained later."""
    with torch.inference_mode(False), torch.no_grad():
        return function(*args)
