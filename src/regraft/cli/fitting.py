"""Whether a model takes the example of its call: asked before the work, and again where the work fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

import torch

from regraft.cli.failure import Failure, did_you_mean, first_line
from regraft.cli.inputs import Inputs
from regraft.verify.call import described

_MOST = 6  # parameters of a forward that are shown; those of transformers have twenty


def expect_fit(model: Callable[..., Any], inputs: Inputs, spec: str | None) -> None:
    """Refuse arguments that the model's forward does not take.

    Args:
        model: whose call it is.
        inputs: its arguments.
        spec: where they are from, as `--inputs` names it; None where they were made from the model.

    Raises:
        Failure: they do not fit; the message shows those that do.
    """
    args, kwargs = inputs
    name = f"{type(model).__name__}.forward"
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except ValueError:  # of torch.jit.trace: it has none to read
        return
    parameters = signature.parameters
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = next((key for key in kwargs if key not in parameters), "")
        near = did_you_mean(unknown, parameters) if unknown else ""
        shown = [str(p.replace(annotation=p.empty)) for p in parameters.values()]
        shown = [*shown[:_MOST], "..."] if len(shown) > _MOST else shown
        raise Failure(
            f"{origin(spec)} does not fit {name}({', '.join(shown)}): {error}{near if 'did you mean' in near else ''}; "
            f"let it give {_example(parameters, kwargs)}: --inputs {spec or 'FILE'}"
        ) from error


def failing(model: Callable[..., Any], inputs: Inputs, spec: str | None) -> str | None:
    """What the model itself raises on its inputs, in a sentence; None where it runs on them.

    Args:
        model: the model.
        inputs: its arguments.
        spec: as in `expect_fit`.
    """
    args, kwargs = inputs
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:  # whatever a model raises
        return (
            f"the model itself fails on {origin(spec)}, which gives {described(inputs) or 'nothing'}: "
            f"{first_line(error)}; give an example of a call that it runs: --inputs FILE"
        )
    return None


def origin(spec: str | None) -> str:
    """Where inputs are from, in a sentence.

    Args:
        spec: as in `expect_fit`.
    """
    return f"--inputs {spec}" if spec is not None else "the example that was made from the model"


def _example(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> str:
    """What fits, in the form of a .json file: by name where that is possible, or else by position."""
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind is not Parameter.VAR_KEYWORD]
    if any(p.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL) for p in needed):
        return f'{{"args": [{", ".join("..." for _ in needed)}]}}'
    names = [n for n, p in parameters.items() if p in needed or n in given] or [*parameters][:1]
    return "{" + ", ".join(f'"{name}": ...' for name in names) + "}"
