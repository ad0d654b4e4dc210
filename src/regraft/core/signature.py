"""What makes two transformations the same: their class and their arguments, spelled out as text.

The text, and so its digest, is the same in every process; nothing is hashed with `hash()`, and nothing is changed.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping, Set
from typing import Any

import torch


def signature_of(obj: Any) -> str:
    """A digest of the class of `obj` and of its instance attributes."""
    text = f"{_class_name(type(obj))}{spell(vars(obj))}"
    return hashlib.sha256(text.encode()).hexdigest()


def arguments_of(obj: Any) -> str:
    """The instance attributes of `obj` for people: `max_size=3, mode='a'`."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(vars(obj).items()) if not name.startswith("_"))


def spell(value: Any, seen: tuple[int, ...] = ()) -> str:
    """`value` as text that tells it from every other value of any type; cycles are cut."""
    if id(value) in seen:
        return f"<cycle {seen.index(id(value))}>"
    inside = (*seen, id(value))
    if isinstance(value, Mapping):
        items = sorted((spell(k, inside), spell(v, inside)) for k, v in value.items())
        return f"{_class_name(type(value))}{{{','.join(f'{k}:{v}' for k, v in items)}}}"
    if isinstance(value, (list, tuple)):
        return f"{_class_name(type(value))}[{','.join(spell(v, inside) for v in value)}]"
    if isinstance(value, Set):
        return f"{_class_name(type(value))}<{','.join(sorted(spell(v, inside) for v in value))}>"
    if isinstance(value, torch.Tensor):
        return f"tensor({value.dtype},{tuple(value.shape)},{_digest(value)})"
    if isinstance(value, type):
        return f"class {_class_name(value)}"
    if isinstance(value, types.FunctionType):
        return f"function {value.__module__}.{value.__qualname__}{_body(value, inside)}"
    if isinstance(value, (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return (
            f"function {value}"
            if not hasattr(value, "__qualname__")
            else f"function {value.__module__}.{value.__qualname__}"
        )
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        return f"{_class_name(type(value))}:{value!r}"
    if isinstance(value, torch.nn.Module):
        return f"{_class_name(type(value))}{spell(dict(value.state_dict()), inside)}{value.extra_repr()}"
    return f"{_class_name(type(value))}{spell(_attributes(value), inside)}"


def _attributes(value: Any) -> dict[str, Any]:
    """What an object of an unknown class is made of."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    if attributes or "__repr__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        return attributes
    return {"repr": repr(value)}


def _body(function: types.FunctionType, seen: tuple[int, ...]) -> str:
    """Lambdas and closures share a name, so what they do and hold counts too."""
    code = function.__code__
    constants = tuple(c for c in code.co_consts if not isinstance(c, types.CodeType))
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = spell((constants, code.co_names, cells, function.__defaults__), seen)
    return f"({code.co_code.hex()},{held})"


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.sha256(bytes(data.tolist())).hexdigest()
