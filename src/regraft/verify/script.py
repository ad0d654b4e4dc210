"""The script that reproduces what bisection found."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from regraft.verify.bisect import Culprit


def reproduction(culprit: Culprit, data: str) -> str:
    """The text of a script that loads `data` and shows the result right before the culprit and wrong after it."""
    docstring = culprit.name.replace("\\", "\\\\").replace('"', "'")
    lines = [
        f'"""Reproduces: {docstring}."""',
        "",
        "from pathlib import Path",
        "",
        "import torch",
        "",
        "import regraft",
        "",
        f'case = torch.load(Path(__file__).with_name("{data}"), weights_only=False)',
        'reference, gm = case["reference"], case["gm"]',
        'args, kwargs, options = case["args"], case["kwargs"], case["options"]',
        "",
        "wrong = regraft.verify(reference, gm, args, kwargs, **options)",
        "print(wrong)",
        "assert not wrong.ok",
    ]
    if culprit.step is not None:
        undo = f"regraft.undo(gm, {culprit.step})"
        if culprit._parts.get("site") is not None:
            undo = f"regraft.undo(gm, {culprit.step}, site={culprit._parts['site']!r})"
        lines += [
            "",
            f"# {culprit.sentence or culprit.name}",
            f"{undo}",
            "right = regraft.verify(reference, gm, args, kwargs, **options)",
            "print(right)",
            "assert right.ok",
        ]
    return "\n".join(lines) + "\n"


def save(parts: Mapping[str, Any], path: Path) -> None:
    """Save the models and inputs of a reproduction.

    Raises:
        TypeError: naming what cannot be pickled; nothing is left at `path`.
    """
    try:
        torch.save(dict(parts), path)
    except Exception as error:  # pickling raises whatever a foreign class raises
        path.unlink(missing_ok=True)
        name = next((name for name, part in parts.items() if not _pickles(part)), "culprit")
        raise TypeError(
            f"the {name} cannot be saved ({type(error).__name__}: {error}); classes have to be importable, not "
            "defined in a function or a notebook cell. Culprit.script shows the steps to repeat by hand"
        ) from error


def _pickles(part: Any) -> bool:
    try:
        pickle.dumps(part)
    except Exception:  # as above
        return False
    return True
