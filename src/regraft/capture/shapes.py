"""Which axes of the inputs vary: the forms that `torch.export` takes, and `"auto"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from regraft.capture import caches, torch_private
from regraft.capture.signature import Call

#: for each tensor, what its axes are; None where none varies
Axes = list[dict[int, Any] | None]


def axes_of(call: Call, dynamic_shapes: Any, model: nn.Module, args: Any, kwargs: Any) -> Axes:
    """The axes that vary, for each tensor of a call.

    Args:
        call: the call, taken apart.
        dynamic_shapes: as for `trace`.
        model: the model that is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: `dynamic_shapes` has not the form of the arguments; the message names the argument.
    """
    if dynamic_shapes is None:
        return [None] * len(call.leaves)
    if isinstance(dynamic_shapes, str):
        if dynamic_shapes != "auto":
            raise TypeError(f'dynamic_shapes is "auto", None or a form of torch.export.export, not {dynamic_shapes!r}')
        return [{axis: Dim.AUTO for axis in range(leaf.dim()) if leaf.shape[axis] > 0} for leaf in call.leaves]
    if hasattr(dynamic_shapes, "dynamic_shapes"):  # torch.export.ShapesCollection and AdditionalInputs
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, tuple(args), dict(kwargs))
    by_name = _by_name(call, dynamic_shapes)
    tensors = iter(call.leaves)
    axes: Axes = []
    for argument in call.arguments:
        spec = by_name.pop(argument.name, None)
        own = [next(tensors) if constant is None else None for constant in argument.leaves]
        if argument.spec is None:
            axes += [_tensor_axes(argument.name, leaf, spec) for leaf in own if leaf is not None]
        else:
            value = torch_private.tree_unflatten(own, argument.spec)
            axes += list(_nested_axes(argument.name, value, spec))
    if by_name:
        known = ", ".join(argument.name for argument in call.arguments)
        raise TypeError(f"dynamic_shapes names {', '.join(by_name)}, but the model's forward has {known}")
    return axes


def _by_name(call: Call, dynamic_shapes: Any) -> dict[str, Any]:
    if isinstance(dynamic_shapes, Mapping):
        flat: dict[str, Any] = {}
        for name, spec in dynamic_shapes.items():
            if name == call.collector and isinstance(spec, Mapping):  # torch.export nests what `**kwargs` took
                flat.update({str(key): value for key, value in spec.items()})
            else:
                flat[str(name)] = spec
        return flat
    given = [argument.name for argument in call.arguments if argument.name in call.given]
    return dict(zip(given, dynamic_shapes))


def _nested_axes(name: str, value: Any, spec: Any) -> Iterator[dict[int, Any] | None]:
    if value is None or isinstance(value, (int, float, bool, str)):
        return
    if isinstance(value, torch.Tensor):
        yield _tensor_axes(name, value, spec)
        return
    children, _ = torch_private.children_of(caches.unfold(value))
    parts = list(spec.values()) if isinstance(spec, Mapping) else spec
    if parts is None:
        parts = [None] * len(children)
    if not isinstance(parts, Sequence) or len(parts) != len(children):
        raise TypeError(f"dynamic_shapes for {name} must have {len(children)} entries, one for each part of it")
    for index, (child, part) in enumerate(zip(children, parts)):
        yield from _nested_axes(f"{name}[{index}]", child, part)


def _tensor_axes(name: str, tensor: torch.Tensor, spec: Any) -> dict[int, Any] | None:
    if spec is None:
        return None
    pairs = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
    axes = {int(axis) % max(tensor.dim(), 1): dim for axis, dim in pairs if dim is not None}
    for axis, _ in spec.items() if isinstance(spec, Mapping) else ():
        if not -tensor.dim() <= axis < tensor.dim():
            raise TypeError(f"dynamic_shapes names axis {axis} of {name}, which has {tensor.dim()} axes")
    return axes or None


def enlarged(leaves: Sequence[torch.Tensor], axes: Axes, leading_only: bool) -> list[torch.Tensor] | None:
    """The sample with its axes of size one doubled where they are to vary; None where there is none.

    Export takes an axis of size one for a fixed one. Only the shape of what comes back matters.

    Args:
        leaves: the sample.
        axes: which axes vary.
        leading_only: whether to double the first axes only, which are the batch.
    """
    larger, changed = [], False
    for leaf, varying in zip(leaves, axes):
        for axis in varying or ():
            if leaf.shape[axis] == 1 and (axis == 0 or not leading_only):
                leaf, changed = torch.cat([leaf, leaf], dim=axis), True
        larger.append(leaf)
    return larger if changed else None
