"""Dictionaries that are classes of their own: `UserDict`, and what tokenizers and processors of transformers return.

A model may be given one, and a graph takes and returns the tensors in it, so pytree has to know them.
"""

from __future__ import annotations

import functools
import sys
from collections import UserDict
from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree

from regraft.capture import torch_private

_KINDS = (
    ("collections", "UserDict"),
    ("transformers.tokenization_utils_base", "BatchEncoding"),
    ("transformers.feature_extraction_utils", "BatchFeature"),
)
"""Those that are made of what is in them. What a tokenizer says beside it, of words and characters, no graph has."""


def make_known() -> None:
    """Make those of them known to pytree that have been imported."""
    for module, name in _KINDS:
        kind: Any = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and not torch_private.is_container(kind):
            pytree.register_pytree_node(
                kind,
                _flatten,
                functools.partial(_unflatten, kind),
                serialized_type_name=f"{module}.{name}",
                flatten_with_keys_fn=_flatten_with_keys,
            )


def _flatten(value: UserDict[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(value.data.values()), list(value.data)


def _flatten_with_keys(value: UserDict[Any, Any]) -> tuple[list[tuple[Any, Any]], list[Any]]:
    return [(pytree.MappingKey(key), part) for key, part in value.data.items()], list(value.data)


def _unflatten(kind: Any, parts: Iterable[Any], keys: list[Any]) -> Any:
    return kind(dict(zip(keys, parts)))
