"""`verify`, `bisect`, `bench`: is it right, what broke it, is it faster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

import regraft as rg
from regraft.cli.failure import Failure, first_line
from regraft.cli.fitting import origin
from regraft.cli.loading import blamed, converted, load_model
from regraft.cli.preparing import Job, planned, prepared, print_json
from regraft.cli.writing import file_for
from regraft.report import text
from regraft.verify import Culprit, compare_speed


def verify(arguments: argparse.Namespace) -> int:
    """Compare a candidate, or the rewritten model, with the model."""
    job = prepared(arguments)
    if arguments.dry_run:
        return planned(arguments, job, "verify")
    reference, candidate = job.reference, _candidate(job, arguments.candidate)
    with text.working("verifying"):
        result = rg.verify(reference, candidate, *job.inputs, **_bounds(arguments))
    if arguments.json:
        print_json({**result.to_dict(), "model": job.recipe.model, "candidate": arguments.candidate})
    else:
        text.show(text.verification(result))
    return 0 if result.ok else 1


def bisect(arguments: argparse.Namespace) -> int:
    """Find the rewrite that breaks the result."""
    script = file_for("--script", arguments.script)
    job = prepared(arguments)
    if arguments.dry_run:
        return planned(arguments, job, "bisect")
    gm = job.rewritten()
    options = _bounds(arguments)
    with text.working("verifying"):
        result = rg.verify(job.reference, gm, *job.inputs, **options)
    if result.ok:
        sites = sum(len(step.applied) for step in rg.history(gm))
        if arguments.json:
            print_json({"culprit": None, "sites": sites, "verification": result.to_dict()})
        else:
            text.show(f"there is no culprit: the result verifies with all of its {sites} rewritten sites")
        return 0
    with text.working("looking for the culprit"):
        culprit = rg.bisect(job.reference, gm, *job.inputs, **options)
    if script is not None:
        try:
            culprit.write(script)
        except TypeError as error:
            raise Failure(f"the script cannot be written: {first_line(error)}") from error
    if arguments.json:
        print_json(_told(culprit))
    else:
        text.show(str(culprit))
    return 1


def bench(arguments: argparse.Namespace) -> int:
    """Time the model against a candidate, or against itself rewritten."""
    job = prepared(arguments)
    if arguments.dry_run:
        return planned(arguments, job, "bench")
    args, kwargs = job.inputs
    reference, candidate = job.reference, _candidate(job, arguments.candidate)
    reference(*args, **kwargs)
    with blamed(f"the candidate fails on {origin(job.recipe.inputs)}"):
        candidate(*args, **kwargs)
    with text.working("measuring"):
        result = compare_speed(
            lambda: reference(*args, **kwargs), lambda: candidate(*args, **kwargs), min_seconds=job.recipe.seconds
        )
    if arguments.json:
        print_json({**result.to_dict(), "threads": torch.get_num_threads(), "model": job.recipe.model})
    else:
        text.show(text.comparison(result))
    return 1 if arguments.max_ratio is not None and not result.high <= arguments.max_ratio else 0


def _candidate(job: Job, spec: str | None) -> Callable[..., Any]:
    """The second model, or the first one rewritten."""
    if spec is None:
        gm = job.rewritten()
        applied, refused = (sum(len(getattr(s, kind)) for s in rg.history(gm)) for kind in ("applied", "refused"))
        print(f"note: rewrote {applied} sites and refused {refused}", file=sys.stderr)
        return gm
    model = converted(load_model(spec, job.recipe.seed)[0], job.recipe.dtype, job.recipe.device)
    return model.module() if isinstance(model, ExportedProgram) else model


def _bounds(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"rtol": arguments.rtol, "atol": arguments.atol}
    return {name: value for name, value in given.items() if value is not None}


def _told(culprit: Culprit) -> dict[str, Any]:
    return {
        "culprit": culprit.name,
        "step": culprit.step,
        "transformation": culprit.transformation,
        "site": culprit.where,
        "sentence": culprit.sentence,
        "alone": culprit.alone,
        "runs": culprit.runs,
        "note": culprit.note,
        "verification": culprit.verification.to_dict(),
    }
