"""One captured call: the form that a call must have, and the graph that runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from regraft.capture import caches
from regraft.capture.codegen import CallingCodeGen
from regraft.capture.own_state import Attribute, set_attribute
from regraft.core.fx_private import codegen_of
from regraft.core.values import tensors_in
from regraft.dropin.contents import Contents

_Kind = tuple[torch.dtype, torch.device, int]


@dataclass(frozen=True)
class Slot:
    """What one argument is: its tensors' dtypes, devices and ranks, in order; empty for a constant.

    Args:
        name: The argument.
        kinds: For each tensor in it.
        single: Whether the argument is one tensor itself.
        form: What it is beside its tensors, where it is a cache.
    """

    name: str
    kinds: tuple[_Kind, ...]
    single: bool
    form: caches.Form | None = None


class Entry:
    """A graph, and the calls that it stands for.

    Sizes, constants and structure are the graph's own business: it raises a `TypeError` where they differ.

    Args:
        name: What to call it: `"forward"`, `"decode"`.
        gm: The graph module.
        sample: The call it was captured with, as `Reader.read` gives it.
        ignores: Attributes that the model sets itself as it runs, and with which the graph has nothing to do.
        sets: Attributes that it sets and the graph returns, in a list beside the result, and whether each is a
            `torch.Size`, which a graph returns as a tuple.
        contents: What it puts into the lists and dictionaries that it is given, and the graph returns in that list.

    Attributes:
        fills: Whether a cache that is given can be filled from its result, as far as is known.
        finite: The arguments in which a NaN would be lost, and whether to look for infinities there, too.
    """

    def __init__(
        self,
        name: str,
        gm: GraphModule,
        sample: Mapping[str, Any],
        ignores: frozenset[Attribute] = frozenset(),
        sets: Mapping[Attribute, bool] | None = None,
        contents: Contents | None = None,
    ) -> None:
        self.name = name
        self.gm = gm
        self.ignores = ignores
        self.sets = dict(sets or {})
        self.contents = contents or Contents()
        self.form = tuple(_slot(name, value) for name, value in sample.items())
        self.names = tuple(slot.name for slot in self.form)
        self.engine: Any = None
        self.fills = True
        self.finite: Mapping[str, bool] = {}
        codegen = codegen_of(gm.graph)
        self._calling = codegen.calling if isinstance(codegen, CallingCodeGen) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "engine": None}  # an engine belongs to a process; a copy runs the graph itself

    def lend(self) -> None:
        """Say that somebody else has the graph now, whose changes to it an engine is to notice."""
        if self.engine is not None:
            self.engine.lent = True

    def matches(self, call: Mapping[str, Any]) -> bool:
        """Whether a call has the same arguments, and tensors of the same kinds in them.

        Args:
            call: What `Reader.read` returned.
        """
        if len(call) != len(self.form) or not all(map(call.__contains__, self.names)):
            return False
        return all(map(_fits, self.form, map(call.get, self.names)))

    def takes(self, call: Mapping[str, Any]) -> bool:
        """Whether a call, with whatever cache is in it, is one that the graph runs.

        Args:
            call: What `Reader.read` returned.
        """
        taken = {name: caches.state_of(value) or value for name, value in call.items()}
        return self.matches(taken) and self.holds(taken)

    def holds(self, call: Mapping[str, Any]) -> bool:
        """Whether the sizes and constants of a matching call are the graph's, asked so that a compiler can trace it.

        Args:
            call: A call that matches.
        """
        return self._calling is None or self._calling.covers(call)

    def run(self, call: Mapping[str, Any], unchanged: bool = False) -> Any:
        """Run the graph, or the engine that has taken it over; a compiler traces the graph itself.

        Args:
            call: A call that matches.
            unchanged: Whether the caller has asked the engine's watch.

        Raises:
            TypeError: The graph does not hold for these sizes or constants.
            ValueError: An argument is not finite that has to be.
        """
        for name, strictly in self.finite.items():
            for tensor in floats(call[name]):
                _expect_finite(name, tensor, strictly, self.engine is not None and self.engine.own_threads)
        return self.gm.forward(**call) if self.engine is None else self.engine(call, unchanged)

    def leave(self, model: nn.Module, call: Mapping[str, Any], result: Any) -> Any:
        """Set on a model what its forward sets, and put into what it is given what it puts there.

        Args:
            model: The model.
            call: The call.
            result: What the graph returned.

        Returns:
            The result of the model.

        Raises:
            NotCovered: One container was given twice.
        """
        if not self.sets and not self.contents.filled:
            return result
        result, values = result
        for (attribute, is_size), value in zip(self.sets.items(), values):
            set_attribute(model, attribute, torch.Size(value) if is_size else value)
        return self.contents.put(call, values[len(self.sets) :], result)


def floats(value: Any) -> Sequence[Tensor]:
    """The tensors of floating point in an argument.

    Args:
        value: The argument: a tensor, a container of some, or a cache, taken apart or not.
    """
    if isinstance(value, Tensor):
        return (value,) if value.is_floating_point() else ()
    state = value if type(value) is caches.State else caches.state_of(value)
    leaves = pytree.tree_leaves(value) if state is None else state.leaves
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


_SERIAL = (1 << 15) - 1
"""So many elements torch sums without waking its other threads."""


def _expect_finite(name: str, value: Tensor, strictly: bool, alone: bool) -> None:
    """Refuse what is not finite; on this thread alone, where an engine's threads would wait for those of torch."""
    if _seems_finite(value, strictly, alone):
        return
    if value.isnan().any() or (strictly and not value.isfinite().all()):
        broken = "a NaN or an infinity" if strictly else "a NaN"
        raise ValueError(f"{name} has {broken}, which a kernel of the graph would turn into a number")


def _seems_finite(value: Tensor, strictly: bool, alone: bool) -> bool:
    """Whether an argument is certainly what it has to be, by as few passes over its memory as there can be."""
    if not alone or value.numel() <= _SERIAL:
        return math.isfinite(value.sum().item())  # seldom infinite where nothing in it is
    if value.dtype is torch.float32:  # NumPy has no threads, and whoever runs such an engine has NumPy
        array = value.numpy(force=True)
        least = array.min()  # a NaN where there is one
        return math.isfinite(least) and math.isfinite(array.max()) if strictly else not math.isnan(least)
    axes = sorted(range(value.ndim), key=value.stride, reverse=True)  # as they lie in memory: there is nothing to copy
    return all(math.isfinite(part.sum().item()) for part in value.permute(axes).flatten().split(_SERIAL))


def _slot(name: str, value: Any) -> Slot:
    if isinstance(value, Tensor):
        return Slot(name, (_kind(value),), True)
    state = caches.state_of(value)
    if state is not None:
        return Slot(name, tuple(map(_kind, state.leaves)), False, state.form)
    return Slot(name, tuple(map(_kind, tensors_in(value))), False)


def _fits(slot: Slot, value: Any) -> bool:
    if slot.single:
        return isinstance(value, Tensor) and _is(value, slot.kinds[0])
    if slot.form is not None:
        return type(value) is caches.State and value.form == slot.form and all(map(_is, value.leaves, slot.kinds))
    tensors = tensors_in(value)
    return len(tensors) == len(slot.kinds) and all(map(_is, tensors, slot.kinds))


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.device, tensor.dim()


def _is(tensor: Tensor, kind: _Kind) -> bool:
    return tensor.dtype is kind[0] and tensor.device == kind[1] and tensor.dim() == kind[2]
