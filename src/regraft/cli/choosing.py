"""From the names in a recipe to transformations."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from regraft.cli.failure import Failure, did_you_mean, first_line
from regraft.cli.importing import imported, is_module
from regraft.cli.recipe import Choice
from regraft.core.transformation import Transformation
from regraft.optimize import presets
from regraft.transformations import TRANSFORMATIONS

_TEXTUAL = re.compile(r"\b(str|int|float|bool|list|dict|tuple|dtype)\b")  # in an annotation


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
    owner, colon, option = name.rpartition(":")
    if ":" in owner or (colon and _spelled(owner) in known() and not is_module(owner)):
        raise _no_option(owner, class_named(owner), option)
    if colon:
        found = imported(name)
        if isinstance(found, type) and issubclass(found, Transformation):
            return found
        raise Failure(f"{name} is a {type(found).__name__}, and not a subclass of regraft.Transformation")
    spelled, names = _spelled(name), known()
    if spelled not in names:
        raise Failure(f"there is no transformation {name}{did_you_mean(spelled, names)}")
    return names[spelled]


def _spelled(name: str) -> str:
    return name.replace("_", "-") if not any(map(str.isupper, name)) else command_line_name(type(name, (), {}))


def _no_option(name: str, cls: type, option: str) -> Failure:
    takes = parameters(cls)
    line = f"{option!r} behind {name} is not OPTION=VALUE; "
    if not takes:
        return Failure(f"{line}{name} has no options: -t {name}")
    first, parameter = next(iter(takes.items()))
    value = "package.module:name" if _named(parameter) else "VALUE"
    value = parameter.default if isinstance(parameter.default, str) else value
    return Failure(f"{line}the options of {name} are {', '.join(takes)}: -t {name}:{first}={value}")


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
    takes = parameters(cls)
    for name in choice.options:
        if name not in takes:
            raise Failure(f"{choice.name} has no option {name!r}{did_you_mean(name, takes)}")
    options = {name: _meant(value, takes[name]) for name, value in choice.options.items()}
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        named = next((name for name in options if _named(takes[name])), None)
        hint = f"; what has no textual form is named: -t {choice.name}:{named}=package.module:name" if named else ""
        raise Failure(f"{choice.name} cannot be made: {first_line(error)}{hint}") from error


def _meant(value: Any, parameter: inspect.Parameter) -> Any:
    """What the text of an option stands for, where its parameter takes something that TOML has no value for."""
    if not isinstance(value, str):
        return value
    if re.search(r"\bdtype\b", str(parameter.annotation)):
        found = getattr(torch, value.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else value
    return imported(value) if _named(parameter) and re.fullmatch(r"[\w.]+:[\w.]+", value) else value


def _named(parameter: inspect.Parameter) -> bool:
    """Whether a parameter takes what has no textual form, a mapping of classes say, so that a user's own is named."""
    annotation = str(parameter.annotation)
    return parameter.annotation is not parameter.empty and _TEXTUAL.search(annotation) is None


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
    parts = [type(part) for part in presets.resolve(name)]
    return tuple(Choice(command_line_name(cls), presets.SETTINGS.get(cls.__name__, {})) for cls in parts)
