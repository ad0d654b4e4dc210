"""What models of transformers call the caches that they are given and return."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

NAMES = ("cache", "past_key_values")
"""The name since transformers 5.24, and the one before."""
FORMER = ("past_key_values", "cache_params")
"""What callers may still call it where the model calls it by the first of those names."""


def name_in(names: Container[str]) -> str | None:
    """What the cache is called among some names of a model's arguments or of what it returns; None without one.

    Args:
        names: the names.

    Example:
        >>> name_in(["input_ids", "past_key_values"])
        'past_key_values'
    """
    for name in NAMES:
        if name in names:
            return name
    return None


def returned_in(result: Any) -> Any:
    """The cache in what a model returned; None without one.

    Args:
        result: what it returned.
    """
    fields = getattr(result, "__dict__", {})
    name = name_in(fields)
    return None if name is None else fields[name]
