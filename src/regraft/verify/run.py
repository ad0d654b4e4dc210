"""One run of a model that leaves nothing behind: not in the model, the inputs, or the random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regraft.verify.precise import inputs_in_precision
from regraft.verify.tree import Tree, tree_of, unsupported

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """What one call gave back, and what it made of its inputs and of buffers.

    Args:
        output: What it returned.
        inputs: Its inputs, after it.
        random: Whether it drew random numbers.
        error: What it raised.
        written: The buffers that it wrote to, after it, by name.
        changed: The names of those of which the values are others than before.
        buffers: The names of all buffers that the model has; none of what is no module.
    """

    output: Tree
    inputs: Tree
    random: bool
    error: Exception | None = None
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    changed: Set[str] = frozenset()
    buffers: Set[str] = frozenset()


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
    with torch.no_grad(), _seeded(seed) as drawn, _buffers_kept(model) as own, _buffers_kept(beside) as others:
        try:
            with mode():
                value = model(*args, **kwargs)
        except Exception as error:  # anything a model may raise
            return Run(Tree(), Tree(), random=False, error=error)
        output = tree_of(value)
        _detach_from_buffers(output, model)
        both = [*others, *own]
        # What a call before has left may be what this one writes. By value as well: native batch norm writes its
        # statistics without raising the tensor's version.
        changed = frozenset(buffer.name for buffer in both if buffer.is_changed)
        written = {buffer.name: buffer.now.clone() for buffer in both if buffer.is_written or buffer.name in changed}
        names = frozenset(buffer.name for buffer in own)
        return Run(output, inputs_tree(args, kwargs), drawn(), None, written, changed, names)


def inputs_tree(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    """The leaves of a call's arguments, named `args[0]`, `kwargs['mask']` and so on."""
    tree = tree_of(args, "args")
    named = tree_of(kwargs, "kwargs")
    tree.leaves.update(named.leaves)
    tree.containers.update(named.containers)
    tree.empty.extend(named.empty)
    return tree


_APART = 0x72656772616674
"""What is mixed into a seed: a model that sets a small one itself is not to draw what a graph without it draws."""


@contextmanager
def _seeded(seed: int) -> Iterator[Callable[[], bool]]:
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python = random.getstate()
    with torch.random.fork_rng(devices=cuda):
        # torch.manual_seed would also seed devices that are not yet in use, in place of the user's own seed for them.
        torch.default_generator.manual_seed(_APART ^ seed)
        if cuda:
            torch.cuda.manual_seed_all(_APART ^ seed)
        random.seed(seed)
        before = _random_states(cuda)
        try:
            yield lambda: not all(torch.equal(a, b) for a, b in zip(before, _random_states(cuda), strict=True))
        finally:
            random.setstate(python)


def _random_states(cuda: list[int]) -> list[torch.Tensor]:
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in cuda)]


@dataclass(frozen=True)
class _Buffer:
    """A buffer, where it is, and the values that it had."""

    owner: nn.Module
    path: str
    key: str
    buffer: torch.Tensor
    values: torch.Tensor
    version: int | None

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def now(self) -> torch.Tensor:
        held = self.owner._buffers.get(self.key)
        return self.buffer if held is None else held

    @property
    def is_changed(self) -> bool:
        return not torch.equal(self.now, self.values)

    @property
    def is_written(self) -> bool:
        return _version(self.now) != self.version


@contextmanager
def _buffers_kept(model: Callable[..., Any] | None) -> Iterator[list[_Buffer]]:
    kept = [
        _Buffer(owner, path, key, buffer, buffer.clone(), _version(buffer))
        for path, owner in (model.named_modules() if isinstance(model, nn.Module) else ())
        for key, buffer in owner._buffers.items()
        if buffer is not None and unsupported(buffer) is None
    ]
    try:
        yield kept
    finally:
        for each in kept:
            each.owner._buffers[each.key] = each.buffer
            if each.is_written or each.is_changed:
                with torch.no_grad():
                    each.buffer.copy_(each.values)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


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
