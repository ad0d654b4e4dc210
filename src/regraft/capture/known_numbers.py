"""Tensors that hold numbers of the model itself, which a forward may read as it runs though export has no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from regraft.capture import torch_private

Maker = Callable[[], Any]

#: what reads the one number of a tensor
READING: frozenset[Any] = frozenset(
    [Tensor.item, Tensor.__int__, Tensor.__index__, Tensor.__bool__, Tensor.__float__]
    + [Tensor.is_nonzero, torch.is_nonzero]
)
_TAKEN_APART = Tensor.unbind  # by `tolist`, too
_BOTH = ["add", "sub", "mul", "div", "neg", "abs", "remainder", "ceil", "floor", "maximum", "minimum"]
_COMPARING = ["eq", "ne", "lt", "le", "gt", "ge"]
_METHODS = ["__rsub__", "__rdiv__", "__floordiv__", "__rfloordiv__", "__rmod__", "__eq__", "to", "int", "long", "float"]
_ARITHMETIC: frozenset[Any] = frozenset(
    [getattr(torch, name) for name in _BOTH + _COMPARING]
    + [getattr(Tensor, name) for name in _BOTH + _COMPARING + _METHODS]
)
"""What numbers are computed by: of their values alone, without drawing any or writing to any."""
_JOINING: frozenset[Any] = frozenset([torch.cat, torch.stack])
_MADE_OF_NUMBERS: frozenset[Any] = frozenset([torch.arange, torch.tensor])


def constants_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Whole numbers that a model keeps in buffers, of which each is given as its module, its name and itself.

    Those that are in no checkpoint alone: what a checkpoint may replace is no number of the model.

    Args:
        model: the model.
    """
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and buffer is not None and _is_whole(buffer)
    ]


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or tensor.dim() > 1)


class KnownNumbers:
    """The tensors of one run under export whose values no input decides.

    They are `torch.arange` and `torch.tensor` of whole numbers, constants of the model, and what is computed of such
    and of sizes that do not vary. Most are never read, so a value is computed where it is.

    Args:
        constants: what export runs with in place of tensors of the model, and those tensors.
    """

    def __init__(self, constants: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._makers: Any = WeakTensorKeyDictionary()  # of each what makes its value, and how often it was written to
        for constant, value in constants:
            self._note(constant, lambda value=value: value)  # type: ignore[misc]

    def read(self, function: Any, args: Any) -> Any:
        """The number that a function reads, where it reads one that is known; else None.

        Args:
            function: what is called.
            args: its positional arguments.
        """
        if function not in READING or (maker := self.maker(args[0])) is None:
            return None
        with torch_private.outside_of_modes():
            return function(maker())

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a call has made of known numbers.

        Args:
            function: what was called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what came of it.
        """
        if function in _MADE_OF_NUMBERS and _is_whole(result):
            self._note_computed(result, function, args, {**kwargs, "device": "cpu"})
        elif function is _TAKEN_APART and (maker := self.maker(args[0])) is not None:
            for index, one in enumerate(result):
                self._note(one, lambda index=index: maker().unbind(*args[1:], **kwargs)[index])  # type: ignore[misc]
        elif function in _JOINING or (function in _ARITHMETIC and any(isinstance(arg, Tensor) for arg in args)):
            self._note_computed(result, function, args, kwargs)

    def _note_computed(self, result: Tensor, function: Any, args: Any, kwargs: Any) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        makers = [self.maker(leaf) if isinstance(leaf, Tensor) else plain(leaf) for leaf in leaves]
        if None in makers or kwargs.get("out") is not None:
            return

        def maker() -> Any:
            given, named = pytree.tree_unflatten([maker() for maker in makers if maker], spec)
            return function(*given, **named)

        self._note(result, maker)

    def _note(self, tensor: Tensor, maker: Maker) -> None:
        self._makers[tensor] = maker, tensor._version

    def maker(self, tensor: Any) -> Maker | None:
        """What makes the value of a tensor that is known; None for any other.

        Args:
            tensor: the tensor.
        """
        maker, version = self._makers.get(tensor, (None, 0)) if isinstance(tensor, Tensor) else (None, 0)
        return maker if maker is not None and tensor._version == version else None


def plain(argument: Any) -> Maker | None:
    """What makes an argument that is no tensor; None where another call may have another.

    Args:
        argument: the argument.
    """
    varies = isinstance(argument, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return None if varies or hasattr(argument, "__array__") else lambda: argument  # those of NumPy may be written to
