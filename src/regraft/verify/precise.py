"""A model run in another floating-point precision than its own, without changing it.

The float64 run is what both sides of a verification are measured against.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regraft.core.clone import deep_copy
from regraft.core.operation_mode import OperationMode
from regraft.verify.tree import tree_of

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class InPrecision(OperationMode):
    """Runs every floating-point operation in one dtype, also where the code asks for another by name.

    `softmax(x, dtype=torch.float32)`, `x.float()` and constants that are neither parameter nor buffer would
    otherwise put float32's rounding back into a float64 run, or stop it with a dtype mismatch.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Run in `dtype`, which is float64 or float32."""
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.dtype = dtype

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation in the wanted dtype."""
        schema = func._schema
        bits = func is torch.ops.aten.view.dtype  # reads the bits as another type: nothing to convert
        written = {i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write}
        names = {schema.arguments[i].name for i in written}
        args = tuple(a if bits or i in written else self._convert(a) for i, a in enumerate(args))
        kwargs = {k: v if bits or k in names else self._convert(v) for k, v in kwargs.items()}
        if func is torch.ops.aten._grouped_mm.default and self.dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        result = func(*args, **kwargs)
        if bits or any(r.alias_info is not None for r in schema.returns):
            return result
        return self._convert(result)

    def _convert(self, value: Any) -> Any:
        return pytree.tree_map(self.convert_one, value)

    def convert_one(self, value: Any) -> Any:
        """A tensor or a dtype in the wanted dtype; anything else as it is."""
        if isinstance(value, torch.dtype):
            return target(value, self.dtype)
        if isinstance(value, torch.Tensor) and target(value.dtype, self.dtype) != value.dtype:
            return value.to(target(value.dtype, self.dtype))
        return value


class InFewBits(InPrecision):
    """Runs every operation in float64 and keeps 22 of the 53 bits of what it gives: about float32, without its range.

    A float32 run of a float64 model overflows where a value leaves float32's range, and says nothing of rounding there.
    Two bits fewer than float32 has stand for the roundings inside of a sum, which this cannot reach.
    """

    def __init__(self) -> None:
        """Run in float64."""
        super().__init__(torch.float64)

    def convert_one(self, value: Any) -> Any:
        """As in `InPrecision`, in few bits."""
        value = super().convert_one(value)
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        if value.is_complex():
            return torch.view_as_complex(_in_22_bits(torch.view_as_real(value.resolve_conj())))
        return _in_22_bits(value)


def _in_22_bits(tensor: torch.Tensor) -> torch.Tensor:
    # Veltkamp's splitting (1968); near the end of float64's range it overflows, and the value stays as it is
    scaled = tensor * (2.0**31 + 1)
    rounded = scaled - (scaled - tensor)
    return torch.where(rounded.isfinite(), rounded, tensor)


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The experts' matrix product, which torch has no float64 kernel for: rows up to `offs[i]` meet matrix i."""
    if offs is None or left.dim() != 2 or right.dim() != 3 or bias is not None:
        return torch._grouped_mm(left, right, offs=offs, bias=bias, out_dtype=out_dtype)
    result = left.new_zeros(left.shape[0], right.shape[-1])  # rows beyond the last group belong to no expert
    start = 0
    for end, matrix in zip(offs.tolist(), right, strict=True):
        result[start:end] = left[start:end] @ matrix
        start = end
    return result


def target(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """What a dtype becomes in a run of the given precision; integers and booleans stay."""
    if dtype.is_floating_point:
        return precision
    return _COMPLEX[precision] if dtype.is_complex else dtype


def in_precision(model: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A copy of a model in another precision; a callable that is not a module stays as it is.

    Args:
        model: The model, which is not changed.
        dtype: float64 or float32.

    Raises:
        Exception: whatever a model that cannot be copied or converted raises.

    >>> linear = torch.nn.Linear(2, 2)
    >>> in_precision(linear, torch.float64).weight.dtype, linear.weight.dtype
    (torch.float64, torch.float32)
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: compiled code is for its own dtype
    if not isinstance(model, nn.Module):
        return model
    weights = chain(model.parameters(), model.buffers())
    memo = {id(tensor): _weight(tensor, dtype) for tensor in weights if type(tensor) in (Tensor, nn.Parameter)}
    converted: nn.Module = deep_copy(model, memo)._apply(lambda t: t.to(target(t.dtype, dtype)))
    return converted


def _weight(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another precision; deepcopy by itself would copy the weight as it is first."""
    copied = tensor.detach().to(target(tensor.dtype, dtype), copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def inputs_in_precision(inputs: Any, dtype: torch.dtype | None) -> Any:
    """A deep copy of a model's inputs, in another precision unless `dtype` is None.

    Works through any object, a cache say, since `deepcopy` itself puts the converted tensors in.
    """
    memo: dict[int, Any] = {}
    for _, tensor in tree_of(inputs).tensors():
        wanted = tensor.dtype if dtype is None else target(tensor.dtype, dtype)
        if wanted != tensor.dtype:
            memo[id(tensor)] = tensor.detach().to(wanted)
        elif not tensor.is_leaf:
            memo[id(tensor)] = tensor.detach().clone()  # deepcopy refuses what autograd computed
    return copy.deepcopy(inputs, memo)
