"""What the user has to change: the model's name, a file, an option. One line on stderr and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Failure(Exception):
    """The command cannot be carried out; the message is the line that the user sees."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a sentence on a name that there is not.

    Args:
        given: the name.
        known: those there are.

    >>> did_you_mean("merge-linear", ["merge-linears", "deep-copy"])
    '; did you mean merge-linears?'
    >>> did_you_mean("x", ["merge-linears", "deep-copy"])
    '; there are deep-copy, merge-linears'
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names) or 'none'}"


def first_line(error: BaseException) -> str:
    """An error in one line: its class and the first line of its message.

    Args:
        error: the error.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
