"""Any Python value as named leaves, so that two results can be laid side by side."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, slice)
_OPAQUE = (
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    torch.Generator,
)


@dataclass(frozen=True)
class Opaque:
    """A value that has no content verify could compare; two of one class count as equal."""

    cls: type


@dataclass
class Tree:
    """What a value holds: its leaves and its containers, by a name such as `output.logits` or `output[0]`.

    Those of the containers that are empty, and so are behind no leaf's name, it names again.
    """

    leaves: dict[str, object] = field(default_factory=dict)
    containers: dict[str, type] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The leaves that are tensors, with their names."""
        for name, leaf in self.leaves.items():
            if isinstance(leaf, torch.Tensor):
                yield name, leaf


def tree_of(value: object, name: str = "output") -> Tree:
    """Take a value apart.

    Goes into mappings, sequences, data classes, pytree nodes and any other object with attributes, a
    `transformers` cache among them, whether or not anyone registered its class with pytree.

    Args:
        value: Anything a model may take or return.
        name: What the root is called.

    Returns:
        The leaves and containers, in order.

    >>> sorted(tree_of({"a": 1, "b": (2, 3)}).leaves)
    ["output['a']", "output['b'][0]", "output['b'][1]"]
    """
    tree = Tree()
    _walk(value, name, tree, set())
    return tree


def _walk(value: object, name: str, tree: Tree, above: set[int]) -> None:
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        tree.leaves[name] = value
        return
    if isinstance(value, _OPAQUE) or id(value) in above:
        tree.leaves[name] = Opaque(type(value))
        return
    children = _children(value)
    if children is None:
        tree.leaves[name] = Opaque(type(value))
        return
    tree.containers[name] = type(value)
    if not children:
        tree.empty.append(name)
    for suffix, child in children:
        _walk(child, name + suffix, tree, above | {id(value)})


def _children(value: object) -> list[tuple[str, object]] | None:
    if isinstance(value, Mapping):
        return [(_key(value, key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{key}", getattr(value, key)) for key in value._fields]
    if isinstance(value, Set):
        return None if len(value) else []
    if isinstance(value, Sequence):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if hasattr(value, "__dict__"):
        return [(f".{key}", child) for key, child in vars(value).items()]
    if type(value) in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return [(f"<{i}>", child) for i, child in enumerate(children)]
    return None


def _key(mapping: Mapping[object, object], key: object) -> str:
    # A transformers output is a mapping whose entries are attributes too; people write the attribute.
    if isinstance(key, str) and key.isidentifier() and key in vars_of(mapping):
        return f".{key}"
    return f"[{key!r}]"


def vars_of(value: object) -> dict[str, object]:
    """The attributes of an object; none where it keeps no dictionary of them."""
    return getattr(value, "__dict__", {})


def same_class(one: type, other: type) -> bool:
    """Whether two classes are one class, also where a module was imported twice."""
    return one is other or (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, in float32 where it has a type of floating point of eight bits, for which torch has hardly a kernel.

    >>> computable(torch.ones(1).to(torch.float8_e5m2)), computable(torch.ones(1, dtype=torch.bfloat16))
    (tensor([1.]), tensor([1.], dtype=torch.bfloat16))
    """
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def unsupported(tensor: torch.Tensor) -> str | None:
    """Why verify cannot compare this tensor, as the end of a sentence, or None if it can."""
    if tensor.is_nested:
        return "is a nested tensor; pad it: torch.nested.to_padded_tensor(t, 0.0)"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; make it dense: t.to_dense()"
    if tensor.is_quantized:
        return "is quantized; compare t.dequantize()"
    if tensor.is_meta or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        return "holds no values (meta device); give the model real weights and inputs: model.to_empty(device='cpu')"
    return None
