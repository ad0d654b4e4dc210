"""What an operation is: its name, its arguments, and every way to write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

aten = torch.ops.aten

_WEIGHTS = ("weight", "bias", "running_mean", "running_var")
_KNOWN: set[str] = set()  # the argument names of all operations


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation and every way to write it.

    Args:
        name: What a user calls it.
        parameters: The argument names in order, as the functional form has them, separated by blanks.
        functions: The callables that take those arguments in that order.
        methods: The `Tensor` methods whose `self` is the first argument.
        modules: The exact `torch.nn` types that compute it; their attributes are the other arguments.
        relatives: Other types that a user takes for it, and that a rule refuses with a sentence, as it does subclasses.
        defaults: What an argument is where a call leaves it out.
        orders: The argument names of those functions that take them in another order.
        attributes: What a module calls those of its arguments that have another name there.
    """

    name: str
    parameters: str
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    orders: Mapping[Callable[..., Any], str] = field(default_factory=dict)
    relatives: tuple[type[nn.Module], ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _KNOWN.update(*(order.split() for order in (self.parameters, *self.orders.values())))

    def default(self, name: str) -> Any:
        """What an argument is where a call leaves it out.

        One that only other operations have is None: rules ask several operations alike.

        Raises:
            KeyError: if no operation has an argument of this name.
        """
        if name not in _KNOWN:
            raise KeyError(f"no operation has an argument {name}; {self} has {', '.join(self.names)}")
        return self.defaults.get(name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The argument names, in order."""
        return tuple(self.parameters.split())

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Those of the arguments that are weights of a layer."""
        return tuple(name for name in _WEIGHTS if name in self.names)

    def __repr__(self) -> str:
        return self.name


def overloads(*names: str) -> tuple[Callable[..., Any], ...]:
    """The ATen overloads of these names, each `name.overload`."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        found.append(getattr(getattr(aten, packet), overload))
    return tuple(found)
