"""Which modules of a model stay whole in its graph, and the tree that holds them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of a module is one node: a layer of `torch.nn` without layers inside.

    A subclass defined elsewhere is no leaf, because it may compute anything. A parametrized layer is none: its class is
    made up at runtime, and torch refuses to save it.

    Args:
        module: any module.

    >>> import torch
    >>> is_leaf(torch.nn.Linear(1, 1)), is_leaf(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    (True, False)
    """
    if (
        type(module) is nn.Module
        or isinstance(module, _CONTAINERS)
        or not type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    ):
        return False
    return not module._modules


def first_names(model: nn.Module) -> dict[int, str]:
    """The qualified name under which each module of a model is registered first, by the module's `id`.

    Args:
        model: the model.
    """
    return {id(module): name for name, module in model.named_modules()}


def graft_tree(model: nn.Module, onto: nn.Module, whole: Collection[int] = ()) -> None:
    """Give `onto` the parameters, buffers and children of a model: its layers themselves, in bare containers.

    The `state_dict`, its order, ties, buffers that are not saved and training flags are then those of the model.

    Args:
        model: where from; it is not changed.
        onto: where to; what it had is replaced.
        whole: the `id` of each further module that is to be taken as it is.
    """
    copies: dict[int, nn.Module] = {}
    copies.update({id(module): module for module in model.modules() if id(module) in whole or is_leaf(module)})
    copies[id(model)] = onto
    _fill(onto, model, copies)


def _fill(container: nn.Module, module: nn.Module, copies: dict[int, nn.Module]) -> None:
    container.__dict__["_parameters"] = dict(module._parameters)
    container.__dict__["_buffers"] = dict(module._buffers)
    container.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    container.training = module.training
    container.__dict__["_modules"] = {
        name: None if child is None else _held(child, copies) for name, child in module._modules.items()
    }


def _held(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in copies:
        copies[id(module)] = container = nn.Module()
        _fill(container, module, copies)
    return copies[id(module)]


def attribute(root: nn.Module, path: str) -> Any:
    """The object at a dotted path below a module, or None.

    Args:
        root: the module.
        path: the path.
    """
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def place_tensor(root: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Put a constant tensor into a tree: where the model has it as an attribute, or as a buffer that is not saved.

    Args:
        root: the tree.
        path: the qualified name; missing containers are made.
        tensor: the tensor.
    """
    *prefix, name = path.split(".")
    for part in prefix:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    if hasattr(root, name):
        return
    root.register_buffer(name, tensor, persistent=False)
