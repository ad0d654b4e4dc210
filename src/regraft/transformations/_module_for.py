"""The module that a functional layer would be: what a rewrite puts in its place when it makes its weights anew."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regraft.core.edit import Edit
from regraft.core.vocabulary import CONV, LINEAR, Call


def place_of(layer: Call, weight: Tensor, edit: Edit) -> tuple[str, nn.Module]:
    """Where the new module of a layer goes, and a module with its settings; without a module of its own, a free name.

    Args:
        layer: A linear layer or a convolution, transposed or not.
        weight: Its weight.
        edit: The site's transaction.
    """
    if layer.module is not None:
        return layer.where, layer.module
    return edit.free_name(layer.operation.name.replace(" ", "_")), module_for(layer, weight)


def module_for(layer: Call, weight: Tensor) -> nn.Module:
    """A module with the settings of a functional call; its weights are put in afterwards."""
    rows, columns = weight.shape[0], weight.shape[1]
    if layer.operation is LINEAR:
        return nn.Linear(columns, rows, device="meta").eval()
    groups, kernel = int(layer["groups"]), tuple(weight.shape[2:])
    settings = {key: layer[key] for key in layer.operation.names[3:] if layer[key] is not None}
    kinds = {CONV: (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    kind: Any = kinds.get(layer.operation, transposed)[weight.ndim - 3]
    inputs, outputs = (columns * groups, rows) if layer.operation is CONV else (rows, columns * groups)
    module: nn.Module = kind(inputs, outputs, kernel, device="meta", **settings)
    return module.eval()
