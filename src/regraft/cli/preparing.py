"""What every command on a model begins with: the recipe, the model, its inputs, its graph."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

import regraft as rg
from regraft.capture import transformers_adapter
from regraft.cli.choosing import chosen, preset
from regraft.cli.failure import Failure
from regraft.cli.fitting import expect_fit, failing
from regraft.cli.inputs import Inputs, converted_inputs, make_inputs
from regraft.cli.loading import Model, converted, load_model
from regraft.cli.recipe import Recipe
from regraft.core.expect import expect_number
from regraft.core.transformation import Transformation
from regraft.report import text


@dataclass(frozen=True)
class Job:
    """One command's work.

    Attributes:
        recipe: All settings.
        model: The model, as it was loaded.
        inputs: The arguments of an example call.
        transformations: What the recipe names, or its preset.
        notes: What the user should know.
    """

    recipe: Recipe
    model: Model
    inputs: Inputs
    transformations: tuple[Transformation, ...]
    notes: tuple[str, ...]

    @property
    def reference(self) -> Callable[..., Any]:
        """The model as something to call."""
        return self.model.module() if isinstance(self.model, ExportedProgram) else self.model

    def fault(self) -> str | None:
        """Why the model itself cannot be called with the inputs; None where it can, and an error is somebody else's."""
        return failing(self.reference, self.inputs, self.recipe.inputs)

    def graph(self) -> torch.fx.GraphModule:
        """The model's graph, which may be rewritten: it is not the model."""
        return captured(self.model, self.inputs, self.recipe)

    def explained(self) -> rg.Report:
        """What would be rewritten and what not."""
        return rg.compose(*self.transformations).explain(self.graph())

    def rewritten(self) -> torch.fx.GraphModule:
        """The model's graph, rewritten."""
        gm = self.graph()
        # What was rewritten and what not is in the graph's history, and every command tells it in its own way.
        logging.getLogger("regraft").setLevel(logging.ERROR)
        return rg.compose(*self.transformations)(gm)

    def plan(self, verb: str) -> dict[str, Any]:
        """What a dry run tells.

        Args:
            verb: what would be done.
        """
        args, kwargs = self.inputs
        shown = {**{f"args[{i}]": value for i, value in enumerate(args)}, **kwargs}
        return {
            "dry_run": True,
            "would": verb,
            **self.recipe.to_dict(),
            "example": {name: _described(value) for name, value in shown.items()},
            "notes": list(self.notes),
        }


def prepared(arguments: argparse.Namespace) -> Job:
    """Read the recipe, load the model, make the inputs.

    Args:
        arguments: the command line.

    Raises:
        Failure: one of them cannot be.
    """
    recipe = Recipe.of(arguments)
    if not recipe.model:
        raise Failure("name a model: package.module:factory, a transformers folder or a .pt2 file")
    _expect_numbers(recipe, arguments)
    # Before the model is loaded, which may take long.
    if recipe.transformations is None:
        recipe = dataclasses.replace(recipe, transformations=preset(recipe.preset))
    transformations = chosen(recipe.transformations or ())
    with text.working(f"loading {recipe.model}"):
        model, notes = load_model(str(recipe.model), recipe.seed)
        model = converted(model, recipe.dtype, recipe.device)
        inputs = converted_inputs(make_inputs(model, recipe.inputs, recipe.seed), recipe.dtype, recipe.device)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not isinstance(model, ExportedProgram):
        expect_fit(model, inputs, recipe.inputs)
    job = Job(recipe, model, inputs, transformations, notes)
    arguments.job = job  # `main` asks it whose fault an error is
    return job


def _expect_numbers(recipe: Recipe, arguments: argparse.Namespace) -> None:
    bounds = {name: getattr(arguments, name, None) for name in ("rtol", "atol", "max_ratio")}
    try:
        expect_number(recipe.seconds, "seconds", "--seconds 0.5", zero=False)
        for name, bound in bounds.items():
            if bound is not None:
                expect_number(bound, name, f"--{name.replace('_', '-')} {0.9 if name == 'max_ratio' else 0.001}")
    except ValueError as error:
        raise Failure(str(error)) from error
    if not -(2**63) <= recipe.seed < 2**64:
        raise Failure(f"seed is {recipe.seed}, but torch takes whole numbers of 64 bits: --seed 0")


def captured(model: Model, inputs: Inputs, recipe: Recipe) -> torch.fx.GraphModule:
    """A graph of a model, which shares its weights and can be rewritten without changing it.

    Args:
        model: the model.
        inputs: an example of its call.
        recipe: the settings.

    Raises:
        CaptureError: it cannot be captured.
    """
    # It logs the stack of an operation that fails, whose error is told.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with text.working("capturing the model"):
        if isinstance(model, ExportedProgram):
            return rg.lift(model)
        if isinstance(model, torch.fx.GraphModule):
            return copy.copy(rg.trace(model))
        if recipe.inputs is None and recipe.dynamic_shapes == "auto" and transformers_adapter.is_pretrained(model):
            return rg.symbolic_trace(model)
        shapes = "auto" if recipe.dynamic_shapes == "auto" else None
        return rg.trace(model, *inputs, dynamic_shapes=shapes)


def planned(arguments: argparse.Namespace, job: Job, verb: str) -> int:
    """Print what a dry run tells.

    Args:
        arguments: the command line.
        job: the work.
        verb: what would be done.
    """
    plan = job.plan(verb)
    if arguments.json:
        print_json(plan)
        return 0
    names = ", ".join(choice.name for choice in job.recipe.transformations or ())
    rows = [(key, str(value)) for key, value in job.recipe.to_dict().items() if key != "transformations"]
    rows += [("transformations", names), *((f"input {name}", what) for name, what in plan["example"].items())]
    text.show(text.Table(f"dry run: would {verb}", ("setting", "value"), tuple(rows)))
    return 0


def print_json(data: Any) -> None:
    """Print one JSON value; NaN and infinities become strings, as JSON has none.

    Args:
        data: the value.
    """
    print(json.dumps(_plain(data), indent=2, allow_nan=False, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__ if not isinstance(value, (int, float, str, bool, type(None))) else repr(value)
