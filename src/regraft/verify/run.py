"""One run of a model that leaves nothing behind: not in the model, the inputs, or the random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regraft.verify.precise import inputs_in_precision
from regraft.verify.tree import Tree, tree_of, unsupported

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """What one call gave back, and what it made of its inputs."""

    output: Tree
    inputs: Tree
    random: bool
    error: Exception | None = None


def run(
    model: Callable[..., Any],
    inputs: Inputs,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    beside: Callable[..., Any] | None = None,
) -> Run:
    """Call a model once on a copy of its inputs, without gradients and from a fixed seed.

    Buffers that the call changes (the statistics of a batch norm in training) are put back, and so is the state of
    every random generator. An exception of the model's is part of the result.

    Args:
        model: Any callable.
        inputs: Its positional and keyword arguments.
        seed: For the random generators.
        dtype: Convert floating-point inputs to this dtype.
        mode: A context to run in.
        beside: Another model that the call may reach, whose buffers are put back too: a candidate often calls the
            reference's own layers.

    >>> torch.manual_seed(3).initial_seed()
    3
    >>> run(torch.nn.Dropout(), ((torch.ones(2),), {})).random
    True
    """
    args, kwargs = inputs_in_precision(inputs, dtype)
    with torch.no_grad(), _seeded(seed) as drawn, _buffers_kept(model), _buffers_kept(beside):
        try:
            with mode():
                value = model(*args, **kwargs)
        except Exception as error:  # anything a model may raise
            return Run(Tree(), Tree(), random=False, error=error)
        output = tree_of(value)
        _detach_from_buffers(output, model)
        return Run(output, inputs_tree(args, kwargs), random=drawn())


def inputs_tree(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    """The leaves of a call's arguments, named `args[0]`, `kwargs['mask']` and so on."""
    tree = tree_of(args, "args")
    named = tree_of(kwargs, "kwargs")
    tree.leaves.update(named.leaves)
    tree.containers.update(named.containers)
    return tree


@contextmanager
def _seeded(seed: int) -> Iterator[Callable[[], bool]]:
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python = random.getstate()
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        random.seed(seed)
        before = _random_states(cuda)
        try:
            yield lambda: not all(torch.equal(a, b) for a, b in zip(before, _random_states(cuda), strict=True))
        finally:
            random.setstate(python)


def _random_states(cuda: list[int]) -> list[torch.Tensor]:
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in cuda)]


@contextmanager
def _buffers_kept(model: Callable[..., Any] | None) -> Iterator[None]:
    if not isinstance(model, nn.Module):
        yield
        return
    kept = [
        (owner, name, buffer, buffer.clone())
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and unsupported(buffer) is None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, values in kept:
            owner._buffers[name] = buffer
            # By value: native batch norm writes its statistics without raising the tensor's version.
            if not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)


def _detach_from_buffers(output: Tree, model: Callable[..., Any]) -> None:
    # Buffers are put back after the run, and an output may be one of them, or share its storage.
    if not isinstance(model, nn.Module):
        return
    buffers = {_storage(buffer) for buffer in model.buffers() if unsupported(buffer) is None}
    for name, tensor in list(output.tensors()):
        if unsupported(tensor) is None and _storage(tensor) in buffers:
            output.leaves[name] = tensor.clone()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
