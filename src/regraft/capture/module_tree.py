"""Which modules of a model stay whole in its graph, and the tree that holds them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MAKING = {"__init__", "reset_parameters", "extra_repr", "__repr__"}
"""What a class may define without computing anything else than its parent."""
_NOTES = {"__annotations__", "__doc__", "__firstlineno__", "__module__", "__qualname__", "__static_attributes__"}
"""What Python notes of a class."""


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of a module is one node: a layer of `torch.nn` without layers inside.

    A subclass defined elsewhere is one if it is only made otherwise, with settings of its own; any other is none,
    because it may compute anything. A parametrized layer is none: its class is made up at runtime, and torch refuses to
    save it. Nor is what makes its weight: as a part of the graph that is computed once.

    Args:
        module: any module.

    >>> import torch
    >>> is_leaf(torch.nn.Linear(1, 1)), is_leaf(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    (True, False)
    """
    return _layer_class(type(module)) is not None and not module._modules


def _layer_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of `torch.nn` as whose layers those of a class compute; None where that is not known."""
    for parent in kind.__mro__:
        if parent.__module__.startswith(("torch.nn.", "torch.ao.nn.")):
            makes_weights = parent.__module__.startswith("torch.nn.utils.")
            known = parent is not nn.Module and not issubclass(parent, _CONTAINERS) and not makes_weights
            return parent if known else None
        if vars(parent).keys() - _MAKING - _NOTES:
            return None
    return None


def _as_layer(module: nn.Module) -> nn.Module:
    """A module as a layer of `torch.nn`: itself, or one that shares all that it has, and is of the class known."""
    kind = _layer_class(type(module))
    if kind is None or kind is type(module):
        return module
    layer = kind.__new__(kind)
    layer.__dict__ = module.__dict__
    return layer


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
    for module in model.modules():
        if is_leaf(module):
            copies[id(module)] = _as_layer(module)
        elif id(module) in whole:
            copies[id(module)] = module
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
