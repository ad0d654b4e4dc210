"""Modules made after others: with their settings and weights, or with the shapes of their weights alone."""

from __future__ import annotations

import copy
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
