"""Capture runs the model's code on stand-ins for tensors; afterwards the model is as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from regraft.capture.holders import holders


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back, on leaving, everything that running a model can change about it: attributes, buffers, random state.

    So do its classes, and the containers and objects that hang on it, as far as `holders` looks.

    Args:
        model: the model.
    """
    saved = holders(model)
    cpu_state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        for holder in saved:
            holder.restore()
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


@contextlib.contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back, on leaving, what was written to tensors: for a run on real ones.

    Sparse ones, which hardly an operation writes to and torch cannot compare, are left alone.

    Args:
        tensors: buffers of a model.

    Example:
        >>> with values_kept([buffer := torch.zeros(1)]):
        ...     buffer.add_(1).item()
        1.0
        >>> buffer.item()
        0.0
    """
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.layout is torch.strided]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
