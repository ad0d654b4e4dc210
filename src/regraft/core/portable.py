"""Fake tensors, symbolic sizes and operators in a form that can be pickled.

A fake tensor is a shape without data. It belongs to a mode and its symbolic sizes to a shape environment, and neither
can be pickled. `portable` replaces each by a small record that, when it is unpickled, becomes a fake tensor again:
the same expressions over the same symbols, in one fresh mode for everything that was saved together.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ATOMS = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.layout)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
#: where a function that does not say its module is looked for
_HOMES = (
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C",
    "torch.Tensor",
    "torch._C._VariableFunctions",
    "torch.special",
    "torch.linalg",
    "torch.fft",
    "_operator",
    "builtins",
    "math",
)


class ShapeSpace:
    """A fresh shape environment and its fake mode, into which what was saved together is loaded.

    Args:
        symbols: the hint and the range of each symbol, as `SavedSpace` noted them.
    """

    def __init__(self, symbols: dict[Any, tuple[Any, Any]]) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        for symbol, (hint, bounds) in symbols.items():
            if hint is not None:
                _hints(self.env)[symbol] = hint
            if bounds is not None:
                self.env.var_to_range[symbol] = bounds

    def hint(self, expr: Any) -> Any:
        """The value of an expression at the sample's sizes, or None where a symbol has none."""
        value = expr.xreplace(_hints(self.env))
        return int(value) if getattr(value, "is_Integer", False) else None


class SavedSpace:
    """What is saved of a shape environment: the symbols that occur. It becomes a `ShapeSpace` when it is loaded."""

    def __init__(self) -> None:
        self.symbols: dict[Any, tuple[Any, Any]] = {}

    def note(self, env: Any, expr: Any) -> None:
        """Remember the hint and the range of every symbol of an expression; `portable` does so before pickling."""
        for symbol in getattr(expr, "free_symbols", ()):
            if symbol not in self.symbols:
                self.symbols[symbol] = (_hints(env).get(symbol), env.var_to_range.get(symbol))

    def __reduce__(self) -> tuple[Any, ...]:
        return ShapeSpace, (self.symbols,)


def _hints(env: ShapeEnv) -> dict[Any, Any]:
    table = getattr(env, "backed_var_to_val", None)  # torch 2.10 and later
    found: dict[Any, Any] = table if table is not None else env.var_to_val
    return found


#: by shape environment (by mode where that has none), weakly: one pickle must save one space once, whoever asks for it
_SPACES: weakref.WeakKeyDictionary[Any, SavedSpace] = weakref.WeakKeyDictionary()


def _space_of(owner: Any) -> SavedSpace:
    if owner not in _SPACES:
        _SPACES[owner] = SavedSpace()
    return _SPACES[owner]


class PortableSymbol:
    """A symbolic number on its way through pickle; it is a `torch.SymInt` (or float, or bool) again when loaded."""

    def __init__(self, value: Any) -> None:
        node = value.node
        self.space = _space_of(node.shape_env)
        self.expr = node.expr
        self.kind = type(value).__name__
        self.space.note(node.shape_env, self.expr)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_symbol, (self.space, self.expr, self.kind)


def load_symbol(space: ShapeSpace, expr: Any, kind: str) -> Any:
    """The inverse of `PortableSymbol`."""
    if kind == "SymBool":
        return space.env.create_symboolnode(expr)
    if kind == "SymFloat":
        return space.env.create_symfloatnode(expr, hint=space.hint(expr))
    return space.env.create_symintnode(expr, hint=space.hint(expr))


class PortableFake:
    """A fake tensor on its way through pickle; it is a fake tensor again when loaded."""

    def __init__(self, value: FakeTensor) -> None:
        mode = value.fake_mode
        self.space = _space_of(mode.shape_env if mode.shape_env is not None else mode)
        self.layout = tuple(
            [portable(part) for part in parts]
            for parts in (value.shape, value.stride() if value.layout == torch.strided else ())
        )
        self.rest = (value.dtype, str(value.device), value.requires_grad)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_fake, (self.space, *self.layout, *self.rest)


def load_fake(
    space: ShapeSpace, shape: list[Any], stride: list[Any], dtype: torch.dtype, device: str, requires_grad: bool
) -> torch.Tensor:
    """The inverse of `PortableFake`."""
    element = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(space.mode, element, torch.device(device)).requires_grad_(requires_grad)


class PortableCallable:
    """A function or an operator, by the path under which it is imported."""

    def __init__(self, value: Callable[..., Any]) -> None:
        self.path = import_path(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_callable, (self.path,)


class PortableFormat:
    """A `torch.memory_format` on its way through pickle; the protocol that `torch.save` uses can't save one."""

    def __init__(self, value: torch.memory_format) -> None:
        self.path = f"torch:{str(value).removeprefix('torch.')}"

    def __reduce__(self) -> tuple[Any, ...]:
        return load_callable, (self.path,)


def import_path(value: Any) -> str:
    """The `module:name` under which a function or an operator can be imported.

    Args:
        value: a function, a builtin, a class or an operator of `torch.ops`.

    Raises:
        ValueError: nothing under any importable name is this object (a lambda, a function inside a function).

    >>> import operator, torch
    >>> import_path(operator.add), import_path(torch.nn.functional.gelu), import_path(torch.ops.aten.add.Tensor)
    ('_operator:add', 'torch._C._nn:gelu', 'torch.ops:aten.add.Tensor')
    """
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops:{value}"
    if isinstance(value, torch._ops.OpOverloadPacket):
        return f"torch.ops:{value}"
    if isinstance(value, torch._ops.HigherOrderOperator):
        return f"torch.ops:higher_order.{value.name()}"
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    short = getattr(value, "__name__", None)
    for home in (getattr(value, "__module__", None), *_HOMES):
        for candidate in (name, short):
            if home and candidate and _found(f"{home}:{candidate}") is value:
                return f"{home}:{candidate}"
    raise ValueError(
        f"{value!r} cannot be imported by name, so it cannot be saved; define it at the top level of a module"
    )


def _found(path: str) -> Any:
    try:
        return load_callable(path)
    except (ImportError, AttributeError, ValueError):
        return None


def load_callable(path: str) -> Any:
    """What `import_path` named.

    >>> load_callable("torch.ops:aten.add.Tensor")
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    home, _, name = path.partition(":")
    owner: Any = _home(home)
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def _home(path: str) -> Any:
    if path == "torch.ops":
        return torch.ops
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        if not module:
            raise
        return getattr(importlib.import_module(module), name)


def portable(value: Any) -> Any:
    """A value in which nothing that torch cannot pickle is left, in nested lists, tuples, dicts and sets.

    Whoever keeps fake tensors, symbolic sizes or operators in an object of his own calls this in its `__getstate__`;
    nothing has to be undone in `__setstate__`. What needs no change is returned as it is, the same object.

    Args:
        value: anything; containers are looked into, other objects are left to their own way of being pickled.

    Raises:
        ValueError: an operator that cannot be imported by name.
        TypeError: a `torch.fx.Node`, which means nothing outside of its graph; keep its name.

    >>> import pickle, torch
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     fake = torch.empty(2, 3)
    >>> pickle.loads(pickle.dumps(portable({"val": fake})))["val"].shape
    torch.Size([2, 3])
    """
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, FakeTensor):
        return PortableFake(value)
    if isinstance(value, _SYMBOLIC):
        return PortableSymbol(value)
    if isinstance(value, _OPERATORS):
        return PortableCallable(value)
    if isinstance(value, torch.memory_format):
        return PortableFormat(value)
    if isinstance(value, Node):
        raise TypeError(f"the node {value.name} means nothing outside of its graph; keep its name instead")
    if type(value) in (list, set, frozenset):
        parts = [portable(part) for part in value]
        return value if _same(parts, value) else type(value)(parts)
    if isinstance(value, torch.Size):
        return value if all(isinstance(part, int) for part in value) else tuple(portable(part) for part in value)
    if isinstance(value, tuple):
        parts = [portable(part) for part in value]
        if _same(parts, value):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if type(value) is dict:
        entries = {portable(key): portable(entry) for key, entry in value.items()}
        return value if _same(entries.values(), value.values()) and _same(entries, value) else entries
    return value


def _same(left: Any, right: Any) -> bool:
    return all(a is b for a, b in zip(left, right, strict=True))
