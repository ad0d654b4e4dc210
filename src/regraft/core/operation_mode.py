"""A mode that sees each operation that a model runs: those of compiled parts and of the branches of torch.cond, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _NothingCompiled:
    """Has torch.compile run as written what it is asked for, while a mode is entered in any thread.

    It passes by a function that runs under a mode, and does so for good: a compiled part of a model would be slow ever
    after, and torch.cond, which is compiled at its first call, would raise. The stance is the process's, so the first
    to enter sets it, and the last to leave puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._entered = threading.Lock(), 0
        self._leave: Callable[[], object] = lambda: None

    def enter(self) -> None:
        with self._lock:
            if not self._entered:
                stance = torch.compiler.set_stance("force_eager")
                self._leave = lambda: stance.__exit__(None, None, None)
            self._entered += 1

    def leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._leave()


_NOTHING_COMPILED = _NothingCompiled()


class OperationMode(TorchDispatchMode):
    """The base of modes that look at the operations of a user's model, or change them."""

    supports_higher_order_operators = True

    def __enter__(self) -> Self:
        """See `TorchDispatchMode`."""
        _NOTHING_COMPILED.enter()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """See `TorchDispatchMode`."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        _NOTHING_COMPILED.leave()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, which takes tensors and plain values.

        Args:
            func: The operation, an `OpOverload`.
            args: Its positional arguments.
            kwargs: Its arguments by name.
        """
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*pytree.tree_map(self._within, args), **pytree.tree_map(self._within, kwargs or {}))
        return self.operation(func, args, kwargs or {})

    def _within(self, value: Any) -> Any:
        """What runs in this mode as well, of a higher-order operation: a branch of a conditional, say."""
        if not callable(value) or isinstance(value, torch._ops.OperatorBase):
            return value

        def branch(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return branch
