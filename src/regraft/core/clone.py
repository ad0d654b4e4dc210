"""Modules made after others: with their settings and weights, copies of these, or the shapes of their weights alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regraft.core.states import Changes, Key, Slot


def clone_module(module: nn.Module) -> nn.Module:
    """A new module with the same class, settings, parameters and buffers, and tables of its own."""
    clone = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        clone.__dict__[table] = module.__dict__[table].copy()
    return clone


def deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What `copy.deepcopy` makes of a model, with every module in the mode in which it is.

    A module that says itself what its state is, as the layers of einops do, comes back as it was made: training.

    Args:
        model: The model.
        memo: What has been copied already, by the `id` of what it stands for, as `copy.deepcopy` takes it; it is added
            to.

    Raises:
        Exception: Whatever a part that cannot be copied raises.
    """
    copied: nn.Module = copy.deepcopy(model, memo)
    for module in model.modules():
        twin = memo.get(id(module))
        if isinstance(twin, nn.Module) and twin.training != module.training:
            twin.training = module.training
    return copied


def set_modes(model: nn.Module, modes: Iterable[bool]) -> None:
    """Put every module of a model in training or in evaluation mode.

    Args:
        model: The model.
        modes: For each of its modules, in order, whether it trains.
    """
    for module, training in zip(model.modules(), modes):
        module.training = training


def consumed(changes: Changes) -> Changes:
    """The changes with the original weights let go: only their shapes, dtypes and settings stay."""
    slots: dict[Key, tuple[Slot | None, Slot | None]] = {}
    for key, (old, new) in changes.slots.items():
        if old is not None and isinstance(old.value, nn.Module):
            shell = clone_module(old.value)
            for table in (shell._parameters, shell._buffers):
                table.update({name: _shell(tensor) for name, tensor in table.items()})
            old = Slot(old.kind, shell, old.persistent)
        elif old is not None and isinstance(old.value, Tensor):
            old = Slot(old.kind, _shell(old.value), old.persistent)
        slots[key] = (old, new)
    return Changes(changes.nodes, slots, changes.anchors)


def _shell(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
