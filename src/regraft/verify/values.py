"""The sample's inputs with other values in them: what was taken from the sample for what it always is shows there."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from regraft.verify.run import Inputs, inputs_tree
from regraft.verify.tree import computable, unsupported

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def revalued(inputs: Inputs, generator: torch.Generator) -> Inputs | None:
    """The sample at its own sizes with other values; None where there are none to take.

    Floating-point inputs are drawn at random from the sample's own values. Integers that tell more than yes or no, such
    as token ids, change places along the last axis, the same places in every row and every such input of that length,
    and only where all masks have the same: so they stay valid, stay with their masks, and a row has as many of each as
    before. Masks, positions in ascending order and constants stay.

    Args:
        inputs: The sample, which is not changed.
        generator: For the draws.
    """
    tensors = [tensor for _, tensor in inputs_tree(*inputs).tensors() if unsupported(tensor) is None]
    places: dict[int, Tensor] = {}
    memo: dict[int, Tensor] = {}
    changed = False
    for tensor in tensors:
        new = tensor.detach()
        if is_rich(tensor):
            new = drawn(tensor, tuple(tensor.shape), generator)
        elif _tells(tensor):
            length = tensor.shape[-1]
            if length not in places:
                masks = [other for other in tensors if 0 < other.ndim < 3 and other.shape[-1] == length]
                masks = [mask.detach() for mask in masks if not is_rich(mask) and _is_mask(mask)]
                places[length] = _shuffled(masks, length, generator)
            new = new.index_select(-1, places[length].to(new.device))
        changed = changed or not torch.equal(new, tensor.detach())
        memo[id(tensor)] = new
    if not changed:
        return None
    args, kwargs = copy.deepcopy(inputs, memo)
    return args, kwargs


def drawn(tensor: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of some shape, of values drawn from those of another.

    Args:
        tensor: The other, which has some.
        shape: The shape.
        generator: For the draws.
    """
    pick = torch.randint(tensor.numel(), shape, generator=generator).to(tensor.device)
    return tensor.detach().flatten()[pick]


def is_rich(tensor: Tensor) -> bool:
    """Whether a tensor holds more than whole numbers: masks hold 0, 1, -inf, -1e9 or the dtype's lowest number.

    Args:
        tensor: The tensor.
    """
    if not tensor.dtype.is_floating_point:
        return False
    values = computable(tensor.detach())
    return bool(((values != values.round()) & values.isfinite()).any())


def _tells(tensor: Tensor) -> bool:
    """Whether it is of integers that are neither masks nor positions."""
    if tensor.dtype not in _INTEGERS or _is_mask(tensor):
        return False
    return bool((tensor[..., 1:] < tensor[..., :-1]).any())


def _is_mask(tensor: Tensor) -> bool:
    return len(tensor.detach().unique()) <= 2


def _shuffled(masks: list[Tensor], length: int, generator: torch.Generator) -> Tensor:
    """An order of the places along an axis, where each gets what was at one with the same masks."""
    columns = [mask.reshape(-1, length).double().cpu() for mask in masks]
    kinds = torch.cat([torch.zeros(1, length, dtype=torch.float64), *columns]).unique(dim=1, return_inverse=True)[1]
    noise = torch.rand(length, generator=generator, dtype=torch.float64)
    order = torch.empty(length, dtype=torch.long)
    order[kinds.argsort(stable=True)] = (kinds + noise).argsort()
    return order
