"""From a call of a model to a flat list of tensors, and back to the call."""

from __future__ import annotations

import inspect
import keyword
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regraft.capture import caches, torch_private, user_dicts
from regraft.capture.calling import Argument
from regraft.core.errors import CaptureError


@dataclass(frozen=True)
class Interface:
    """How a graph is to be called.

    Args:
        arguments: every parameter, in order, with the structure of its value.
        positional: how many of them can be given by position.
        labels: what a user calls each tensor.
        sources: how the guards of the exported program write each tensor.
    """

    arguments: list[Argument]
    positional: int
    labels: list[str]
    sources: list[str]


@dataclass
class Call:
    """One call of a model, taken apart.

    Args:
        arguments: every parameter of the forward, in its order, with the structure of what was given for it.
        positional: how many of them can be given by position.
        given: the names of those that were given; the others have their defaults.
        starred: how many positional arguments a `*args` of the forward took.
        leaves: the tensors, in order.
        labels: what a user calls each tensor.
        names: an identifier for each tensor.
        by_position_only: the parameters that take no keyword.
        collector: the name of the forward's `**kwargs`, where it has one.
    """

    arguments: list[Argument]
    positional: int
    given: set[str]
    starred: list[str]
    leaves: list[torch.Tensor]
    labels: list[str]
    names: list[str]
    by_position_only: set[str]
    collector: str | None = None

    @property
    def interface(self) -> Interface:
        """What of the call concerns the graph."""
        return Interface(self.arguments, self.positional, self.labels, [f"L['{name}']" for name in self.names])

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the model, with other tensors in the place of those it was taken from.

        Args:
            leaves: one for each of `leaves`.
        """
        tensors: Iterator[Any] = iter(leaves)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for index, argument in enumerate(self.arguments):
            flat = [next(tensors) if constant is None else constant[0] for constant in argument.leaves]
            if argument.name not in self.given:
                continue
            value = flat[0] if argument.spec is None else torch_private.tree_unflatten(flat, argument.spec)
            if argument.name in self.by_position_only or (self.starred and index < self.positional):
                args.append(value)
            else:
                kwargs[argument.name] = value
        return tuple(args), kwargs


def take_apart(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Read a call of a model.

    Args:
        model: the model.
        args: the positional arguments.
        kwargs: the keyword arguments.

    Raises:
        TypeError: the model's forward cannot be called like this.
        CaptureError: an argument is an object with tensors inside that pytree cannot take apart.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward cannot be called with these arguments: {error}") from None
    user_dicts.make_known()
    call = Call([], 0, set(), [], [], [], [], set())
    for name, parameter in signature.parameters.items():
        _take_parameter(call, name, parameter, bound.arguments)
    return call


def _take_parameter(call: Call, name: str, parameter: inspect.Parameter, bound: Mapping[str, Any]) -> None:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        for index, value in enumerate(bound.get(name, ())):
            call.starred.append(f"{name}_{index}")
            _take(call, f"{name}_{index}", value, given=True)
        call.positional = len(call.arguments)
        return
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        call.collector = name
        for key, value in bound.get(name, {}).items():
            _take(call, key, value, given=True)
        return
    default = None if parameter.default is inspect.Parameter.empty else parameter.default
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        call.by_position_only.add(name)
    _take(call, name, bound.get(name, default), given=name in bound)
    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        call.positional = len(call.arguments)


def _take(call: Call, name: str, value: Any, given: bool) -> None:
    if given:
        call.given.add(name)
    if isinstance(value, torch.Tensor):
        call.arguments.append(Argument(name, None, (None,)))
        _add_leaf(call, name, value)
        return
    value = caches.unfold(value)
    flat, spec = torch_private.tree_flatten(value)
    constant = torch_private.is_leaf(spec) or not any(isinstance(leaf, torch.Tensor) for leaf in flat)
    if constant and not isinstance(value, caches.State):  # an empty cache has no tensors yet, but is to be filled
        _refuse_opaque(name, value)
        call.arguments.append(Argument(name, None, ((value,),)))
        return
    leaves: list[tuple[Any, ...] | None] = []
    for path, leaf in torch_private.tensor_paths(value):
        leaves.append(None if isinstance(leaf, torch.Tensor) else (leaf,))
        if isinstance(leaf, torch.Tensor):
            _add_leaf(call, name + path, leaf)
        else:
            _refuse_opaque(name + path, leaf)
    call.arguments.append(Argument(name, spec, tuple(leaves)))


def _add_leaf(call: Call, label: str, tensor: torch.Tensor) -> None:
    wanted = re.sub(r"\W+", "_", label).strip("_") or "given"
    if keyword.iskeyword(wanted):  # an argument that is called `lambda_`
        wanted += "_"
    name, count = wanted, 0
    while name in call.names:
        count += 1
        name = f"{wanted}_{count}"
    call.leaves.append(tensor)
    call.labels.append(label)
    call.names.append(name)


def _refuse_opaque(name: str, value: Any) -> None:
    if _holds_tensors(value):
        raise CaptureError(
            f"the argument {name} is a {type(value).__name__}, an object with tensors inside that cannot be taken "
            f"apart; register its class, a dataclass with torch.export.register_dataclass({type(value).__name__}), any "
            "other with torch.utils._pytree.register_pytree_node, or pass the tensors themselves"
        )


def _holds_tensors(value: Any) -> bool:
    """Whether there are tensors in an object, be it within others: in a graph they would be what they were."""
    waiting, seen = [value], {id(value)}
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            return True
        if isinstance(each, (nn.Module, type, types.ModuleType, types.FunctionType)):
            continue
        parts = [*vars(each).values()] if hasattr(each, "__dict__") else []
        if isinstance(each, (list, tuple, set, frozenset, dict)):
            parts += each.values() if isinstance(each, dict) else each
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return False
