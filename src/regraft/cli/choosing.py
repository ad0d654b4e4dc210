"""From the names in a recipe to transformations."""

from __future__ import annotations

import inspect
import re
from typing import Any

from regraft.cli.failure import Failure, did_you_mean, first_line
from regraft.cli.importing import imported
from regraft.cli.recipe import Choice
from regraft.core.transformation import Transformation
from regraft.optimize import presets
from regraft.transformations import TRANSFORMATIONS


def command_line_name(cls: type) -> str:
    """The name of a class in the spelling of the command line.

    Args:
        cls: the class.

    >>> command_line_name(type("FuseBatchNorm2dInConv2d", (), {}))
    'fuse-batch-norm2d-in-conv2d'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def known() -> dict[str, type[Transformation]]:
    """The built-in transformations under their names on the command line."""
    return {command_line_name(cls): cls for cls in TRANSFORMATIONS}


def class_named(name: str) -> type[Transformation]:
    """The class that a name stands for: `merge-linears`, `MergeLinears`, `merge_linears` or `package.module:Class`.

    Args:
        name: the name.

    Raises:
        Failure: there is none; the message says what is near.
    """
    if ":" in name:
        found = imported(name)
        if isinstance(found, type) and issubclass(found, Transformation):
            return found
        raise Failure(f"{name} is a {type(found).__name__}, and not a subclass of regraft.Transformation")
    spelled = name.replace("_", "-") if not any(map(str.isupper, name)) else command_line_name(type(name, (), {}))
    names = known()
    if spelled not in names:
        raise Failure(f"there is no transformation {name}{did_you_mean(spelled, names)}")
    return names[spelled]


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The options of a transformation: the parameters of its class.

    Args:
        cls: the class.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(cls).parameters.items() if p.kind in named}


def made(choice: Choice) -> Transformation:
    """The transformation that a choice names.

    Args:
        choice: its name and options.

    Raises:
        Failure: the name, an option or a value is wrong.
    """
    cls = class_named(choice.name)
    options: dict[str, Any] = dict(choice.options)
    takes = parameters(cls)
    for name in options:
        if name not in takes:
            raise Failure(f"{choice.name} has no option {name!r}{did_you_mean(name, takes)}")
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise Failure(f"{choice.name} cannot be made: {first_line(error)}") from error


def chosen(choices: tuple[Choice, ...]) -> tuple[Transformation, ...]:
    """The transformations of a recipe.

    Args:
        choices: the choices.
    """
    return tuple(made(choice) for choice in choices)


def preset(name: str) -> tuple[Choice, ...]:
    """What a preset stands for.

    Args:
        name: of the preset.
    """
    return tuple(Choice(command_line_name(type(part)), {}) for part in presets.resolve(name))
