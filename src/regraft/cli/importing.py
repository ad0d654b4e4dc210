"""`package.module:name`: what a user's own module holds."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from regraft.cli.failure import Failure, did_you_mean, first_line


def is_module(name: str) -> bool:
    """Whether there is a module of that name, on Python's path or in the current folder.

    Args:
        name: the name, without dots.
    """
    _look_here_too()
    return importlib.util.find_spec(name) is not None


def _look_here_too() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


def imported(reference: str) -> Any:
    """What `package.module:name` stands for; modules in the current folder are found too.

    Args:
        reference: the module and the name in it, which may have dots.

    Raises:
        Failure: there is no such module or name, or the module fails to import.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise Failure(f"{reference!r} is not package.module:name")
    _look_here_too()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise Failure(f"there is no module {error.name} (looked for {reference!r})") from error
        raise Failure(f"{module_name} cannot be imported: {first_line(error)}") from error
    except Exception as error:  # whatever somebody's module raises
        raise Failure(f"{module_name} cannot be imported: {first_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            near = did_you_mean(part, names)
            raise Failure(f"{module_name} has no {name!r}{near if 'did you mean' in near else ''}")
        found = getattr(found, part)
    return found
