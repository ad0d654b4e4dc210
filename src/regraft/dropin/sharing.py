"""A second object for one model: its own modules and settings, and the same memory for the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regraft.core.clone import deep_copy


def share(model: nn.Module) -> nn.Module:
    """A copy of a model that shares every weight's memory with it, and nothing else.

    What is done to the copy (`half()`, `to()`, `requires_grad_()`, a layer replaced, a hook registered) leaves the
    model as it is; what is written into a weight in place is written into both.

    Args:
        model: The model; it is not changed.

    Raises:
        TypeError: The model holds something that cannot be copied.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> twin = share(model)
        >>> twin.weight is model.weight, twin.weight.data_ptr() == model.weight.data_ptr()
        (False, True)
        >>> twin.half().weight.dtype, model.weight.dtype
        (torch.float16, torch.float32)
    """
    memo: dict[int, Any] = {id(tensor): _twin(tensor) for tensor in _registered(model)}
    memo.update({id(tensor): tensor for tensor in _attributes(model) if id(tensor) not in memo})
    try:
        return deep_copy(model, memo)
    except Exception as error:  # whatever an attribute raises that cannot be copied
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}), and its copy is what would be optimized; "
            "capture it yourself and give the graph: regraft.optimize(regraft.trace(model, args), args)"
        ) from error


def _registered(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that hang on modules without being registered: results of a weight norm, which deepcopy refuses."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _twin(tensor: Tensor) -> Tensor:
    """Another tensor object over the same memory, which also sees the same count of writes."""
    if tensor.layout is not torch.strided:
        return tensor  # a write gives it other memory, which a second object would not have
    if type(tensor) is nn.Parameter:
        with torch.inference_mode(tensor.is_inference()):  # such a tensor may want a gradient only there
            twin: Tensor = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    elif type(tensor) is torch.Tensor:
        twin = tensor.detach()
    else:  # parameters of a class of their own keep what their class keeps: there is no general way to a second one
        return tensor
    twin.__dict__.update(tensor.__dict__)
    return twin
