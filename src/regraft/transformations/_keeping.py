"""`keep=`: the names of modules that a transformation leaves as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from regraft.core.query import that


def keeping(keep: Sequence[str], transformation: str) -> tuple[str, ...]:
    """The patterns that a caller gives as `keep`.

    Args:
        keep: Names of modules, with `*` and `?`.
        transformation: The name of the class, for the error.

    Raises:
        TypeError: It is one string, whose letters would each be taken for a name, or no names.
    """
    if isinstance(keep, str):
        raise TypeError(f"keep={keep!r} is one name; the call is {transformation}(keep=[{keep!r}])")
    given: Any = keep
    names = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f'keep={keep!r}, but takes names of modules: {transformation}(keep=["lm_head"])')
    return names


def not_kept(where: str, keep: tuple[str, ...], how: str) -> str | None:
    """None, or the sentence for a module that one of the patterns names, for `require`.

    Args:
        where: The module.
        keep: The patterns.
        how: What it is left as: `"stays in float32"`.
    """
    named = next((pattern for pattern in keep if fnmatchcase(where, pattern)), None)
    return that(named is None, f"{where} {how}, by keep={named!r}")
