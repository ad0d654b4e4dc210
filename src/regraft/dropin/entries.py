"""One captured call: the form that a call must have, and the graph that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from regraft.capture.codegen import CallingCodeGen
from regraft.core.fx_private import codegen_of
from regraft.dropin import caches

_Kind = tuple[torch.dtype, torch.device, int]


@dataclass(frozen=True)
class Slot:
    """What one argument is: its tensors' dtypes, devices and ranks, in order; empty for a constant.

    Args:
        name: The argument.
        kinds: For each tensor in it.
        single: Whether the argument is one tensor itself.
    """

    name: str
    kinds: tuple[_Kind, ...]
    single: bool


class Entry:
    """A graph, and the calls that it stands for.

    Sizes, constants and structure are the graph's own business: it raises a `TypeError` where they differ.

    Args:
        name: What to call it: `"forward"`, `"decode"`.
        gm: The graph module.
        sample: The call it was captured with, as `Reader.read` gives it.
    """

    def __init__(self, name: str, gm: GraphModule, sample: Mapping[str, Any]) -> None:
        self.name = name
        self.gm = gm
        self.form = tuple(_slot(name, value) for name, value in sample.items())
        self.engine: Any = None
        self.sizes = tuple(_sizes(gm, sample))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "engine": None}  # an engine belongs to a process; a copy runs the graph itself

    def matches(self, call: Mapping[str, Any]) -> bool:
        """Whether a call has the same arguments, and tensors of the same kinds in them.

        Args:
            call: What `Reader.read` returned.
        """
        if len(call) != len(self.form):
            return False
        for slot in self.form:
            value = call.get(slot.name)
            if value is None:
                return False
            if slot.single:
                if not isinstance(value, Tensor) or not _is(value, slot.kinds[0]):
                    return False
            elif slot.kinds and not _all_are(value, slot.kinds):
                return False
        return True

    def holds(self, call: Mapping[str, Any]) -> bool:
        """Whether the sizes of a matching call are among the graph's, as far as single sizes tell; for compilers.

        Args:
            call: A call that matches.
        """
        for name, axis, least, exact in self.sizes:
            size = call[name].shape[axis]
            if size != least if exact else size < least:
                return False
        return True

    def run(self, call: Mapping[str, Any]) -> Any:
        """Run the graph, or the engine that has taken it over.

        Args:
            call: A call that matches.

        Raises:
            TypeError: The graph does not hold for these sizes or constants.
        """
        if self.engine is not None and not torch.compiler.is_compiling():
            return self.engine(call)
        return self.gm.forward(**call)


def _slot(name: str, value: Any) -> Slot:
    if isinstance(value, Tensor):
        return Slot(name, (_kind(value),), True)
    return Slot(name, tuple(map(_kind, _tensors(value))), False)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _sizes(gm: GraphModule, sample: Mapping[str, Any]) -> Iterator[tuple[str, int, int, bool]]:
    """Argument, axis and size, and whether it must be that or is the least: what the graph asks of plain tensors."""
    codegen = codegen_of(gm.graph)
    constraints = codegen.calling.constraints if isinstance(codegen, CallingCodeGen) else None
    if constraints is None:
        return
    for name, shape in zip(constraints.names, constraints.shapes):
        if not isinstance(sample.get(name), Tensor):
            continue
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                yield name, axis, size, True
            elif size in constraints.ranges and constraints.ranges[size].lower > 0:
                yield name, axis, constraints.ranges[size].lower, False


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.device, tensor.dim()


def _is(tensor: Tensor, kind: _Kind) -> bool:
    return tensor.dtype is kind[0] and tensor.device == kind[1] and tensor.dim() == kind[2]


def _all_are(value: Any, kinds: tuple[_Kind, ...]) -> bool:
    tensors = caches.tensors(value) if caches.is_plain(value) else _tensors(value)
    return len(tensors) == len(kinds) and all(_is(tensor, kind) for tensor, kind in zip(tensors, kinds))
