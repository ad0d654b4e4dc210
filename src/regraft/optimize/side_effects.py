"""What a forward leaves on its model for others to read: an attention map, an auxiliary loss, the sizes of its input.

A graph computes results alone. Such values are made further results of it, which its drop-in sets where the model does.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regraft.capture.own_state import Attribute, changed_meanwhile, set_meanwhile, spelled, used_meanwhile
from regraft.capture.untouched import untouched, values_kept
from regraft.dropin.model import KEY
from regraft.optimize.presets import LARGE
from regraft.verify.precise import inputs_in_precision
from regraft.verify.run import Inputs
from regraft.verify.tree import unsupported

_CONSTANTS = (bool, int, float, str, type(None))


def side_effects(model: nn.Module, inputs: Inputs) -> tuple[dict[Attribute, bool], list[str]]:
    """What every call leaves on a model.

    Args:
        model: The model, which is as it was afterwards.
        inputs: A call of it.

    Returns:
        The attributes that each call sets before it reads them, whatever they were, and whether each is a `torch.Size`;
        and the names of what else changes from one call to the next, which no graph can do. Nothing of a model that
        cannot be called, or has no memory for its weights.
    """
    try:
        return _found(model, inputs)
    except Exception:  # whatever a model raises; its capture says what is wrong
        return {}, []


def _found(model: nn.Module, inputs: Inputs) -> tuple[dict[Attribute, bool], list[str]]:
    with torch.no_grad(), untouched(model), values_kept(_weights(model)):
        with set_meanwhile(model) as assigned, changed_meanwhile(model) as changed:
            _call(model, inputs)
        if not assigned and not changed:
            return {}, []
        # once more: what is made on the first call, and kept, is there now
        with used_meanwhile(model, assigned) as used, changed_meanwhile(model) as changed:
            _call(model, inputs)
        values = {each: _value(model, each) for each in sorted(used) if used[each] == "set" and _can_return(model)}
    sets = {each: isinstance(value, torch.Size) for each, value in values.items() if _is_returnable(value)}
    known = {spelled(each) for each in sets} | {each for each in changed if each.rpartition(".")[2] == KEY}
    return sets, sorted(changed - known)


def returning(model: nn.Module, attributes: Collection[Attribute]) -> nn.Module:
    """A model whose forward returns what it has set as well: a pair of its result and a list of values.

    Args:
        model: The model; the other one has its layers and weights.
        attributes: What is set.
    """
    base = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        return with_values(self, attributes, base.forward(self, *args, **kwargs))

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "forward": functools.wraps(base.forward)(forward),
    }
    make_class: Any = type(base)
    other = copy.copy(model)
    other.__class__ = make_class(base.__name__, (base,), namespace)
    return other


def with_values(model: nn.Module, attributes: Collection[Attribute], result: Any) -> tuple[Any, list[Any]]:
    """The pair that the forward of `returning` returns.

    Args:
        model: The model, which has been called.
        attributes: What it sets.
        result: Its result.
    """
    values = [_value(model, attribute) for attribute in attributes]
    return result, [tuple(value) if isinstance(value, torch.Size) else value for value in values]


def _weights(model: nn.Module) -> list[Tensor]:
    """What a call may write to: buffers, and parameters, unless those are much to copy for what hardly a model does."""
    parameters = list(model.parameters())
    return [*model.buffers(), *(parameters if sum(p.nbytes for p in parameters) <= LARGE else [])]


def _call(model: nn.Module, inputs: Inputs) -> None:
    args, kwargs = inputs_in_precision(inputs, None)
    model(*args, **kwargs)


def _value(model: nn.Module, attribute: Attribute) -> Any:
    path, name = attribute
    return getattr(model.get_submodule(path), name)


def _is_returnable(value: Any) -> bool:
    return isinstance(value, torch.Size) or all(map(_is_leaf, pytree.tree_leaves(value)))


def _is_leaf(value: Any) -> bool:
    return unsupported(value) is None if isinstance(value, Tensor) else isinstance(value, _CONSTANTS)


def _can_return(model: nn.Module) -> bool:
    """Whether a call of a model gives what the forward of its class does."""
    return type(model).__call__ is nn.Module.__call__ and "forward" not in vars(model) and not model._forward_hooks
