"""One call and the graph that was captured for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from regraft.capture import caches, filling
from regraft.capture.cache_names import name_in
from regraft.capture.own_state import Attribute
from regraft.core.mutation import Mutations, weights_written
from regraft.dropin import Reader
from regraft.dropin.contents import Contents, Given, with_own_containers
from regraft.optimize.presets import LARGE, OTHER_KERNELS
from regraft.optimize.shorter import shorter_call
from regraft.optimize.side_effects import with_values
from regraft.verify import verify
from regraft.verify.oracle import Oracle
from regraft.verify.precise import inputs_in_precision
from regraft.verify.run import Inputs

SMALL = 1 << 20
"""Bytes of buffers that are put back before each timed call: a mean that grew to infinity, or a count beyond the end of
a table, would be no call of the model's. Of keys and values, which are more, each call writes the same places anew."""

TWICE = (
    "the original is kept: called as a whole, the drop-in gives something else; what a hook or a __call__ of the model "
    "does is in its graph and would be done again: register hooks on the drop-in instead"
)


@dataclass
class Graph:
    """One call and the graph that was captured for it.

    Args:
        name: `"forward"`, or `"prefill"` and `"decode"` for what a decoder's `generate` calls.
        gm: The graph module.
        inputs: The call.
        oracle: The original, which is called likewise, and its float64 copy, made once for all graphs of a model.
        more: Further calls of the same form, to verify with.
        ignores: Attributes that the model sets itself as it runs, and with which the graph has nothing to do.
        sets: Attributes that the model sets itself as it runs, and that the graph returns; see `Entry`.
        contents: What the model puts into what it is given, and the graph returns.
        like: The graph of the same layers whose rewrites this one gets, unmeasured; None for one of its own.
        reader: Reads its calls for a drop-in and its engines; None where they are not of a module.
        seconds: How long the call takes.
        whole: The graph with the steps, too, that were taken back because they make no difference to it: to an engine
            they may. None where there are none.
    """

    name: str
    gm: fx.GraphModule
    inputs: Inputs
    oracle: Oracle
    more: tuple[Inputs, ...] = ()
    ignores: frozenset[Attribute] = frozenset()
    sets: dict[Attribute, bool] = field(default_factory=dict)
    contents: Contents = field(default_factory=Contents)
    like: str | None = None
    reader: Reader | None = None
    seconds: float = 0.0
    whole: fx.GraphModule | None = None

    @property
    def reference(self) -> Callable[..., Any]:
        """The original."""
        return self.oracle.reference

    @cached_property
    def shorter(self) -> Inputs | None:
        """A shorter call, to time steps with; None where the call itself is short, or has a cache."""
        return shorter_call(self.gm, self.reference, self.inputs, self.seconds) if self.cache is None else None

    @property
    def large(self) -> bool:
        """Whether another copy of the weights, packed say, is too much to be made unasked."""
        return sum(tensor.nbytes for tensor in self.gm.parameters()) > LARGE

    @property
    def call(self) -> dict[str, Any]:
        """The call by name."""
        return self.named(*self.inputs[0], **self.inputs[1])

    def named(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A call by name.

        Args:
            *args: Its positional arguments, where the model's have no names.
            **kwargs: Its keyword arguments.
        """
        return self.reader.read(args, kwargs) if args and self.reader is not None else kwargs

    @property
    def written(self) -> list[Tensor]:
        """The buffers that the model writes to as it runs."""
        return weights_written(self.gm)

    @cached_property
    def _before(self) -> list[tuple[Tensor, Tensor]]:
        """Those buffers, and what is in them when the call is first timed; none where that is much."""
        return [(b, b.clone()) for b in self.written] if sum(b.nbytes for b in self.written) <= SMALL else []

    @property
    def cache_name(self) -> str | None:
        """What the cache of keys and values in the call is called, or None."""
        name = name_in(self.call)
        return name if name is not None and caches.state_of(self.call[name]) is not None else None

    @property
    def cache(self) -> Any:
        """The cache of keys and values in the call, or None."""
        return None if self.cache_name is None else self.call[self.cache_name]

    @cached_property
    def writes_inputs(self) -> bool:
        """Whether the model may write to the tensors that it is given."""
        mutations = Mutations(self.gm)
        return any(mutations.of(node) for node in self.gm.graph.find_nodes(op="placeholder"))

    def runner(self, program: Callable[..., Any], shorter: bool = False) -> Callable[[], object]:
        """The call as something to be timed: each time with a cache, and what else is written to, as it was.

        Args:
            program: What to call.
            shorter: Whether a shorter call will do.
        """
        args, kwargs = inputs = (shorter and self.shorter) or self.inputs
        name = self.cache_name
        if name is not None:
            return lambda: program(*args, **{**kwargs, name: filling.twin(self.cache)})
        if self.writes_inputs or self._before or self.contents.filled:
            return lambda: self._run_as_first(program, inputs)
        return lambda: program(*args, **kwargs)

    def _run_as_first(self, program: Callable[..., Any], inputs: Inputs) -> object:
        args, kwargs = inputs_in_precision(inputs, None) if self.writes_inputs else with_own_containers(inputs)
        for buffer, value in self._before:
            if not torch.equal(buffer, value):  # it may be a weight of the caller's, which is only taken for written
                buffer.copy_(value)
        return program(*args, **kwargs)

    def answers_alike(self) -> bool:
        """Whether the original, which may keep something where nobody looks, still gives what it gave at first."""
        args, kwargs = self.inputs
        return verify(self.oracle, self.reference, args, kwargs, vary_sizes=False, vary_values=False).ok

    def is_right_in(self, dropin: nn.Module | None, bound: Mapping[str, Any]) -> bool:
        """Whether the drop-in gives what the original does: hooks of the whole may be in the graph, and run around it.

        Args:
            dropin: The drop-in, which runs the graph; None where there is none.
            bound: How far off the graph may be, as `verify` takes it, where that is not as far as the original itself.
        """
        if dropin is None:
            return True

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.sets and not self.contents.filled:
                return dropin(*args, **kwargs)
            args, kwargs = with_own_containers((args, kwargs))
            given = Given(self.named(*args, **kwargs))
            return with_values(dropin, self.sets, self.contents, given, dropin(*args, **kwargs))

        bound = {"factor": OTHER_KERNELS, **bound}  # an engine may run it
        return verify(self.oracle, called, *self.inputs, vary_sizes=False, vary_values=False, **bound).ok

    def candidate(self) -> Callable[..., Any]:
        """The graph as the original is called: a cache that is given is filled."""
        name = self.cache_name
        return self.gm if name is None else lambda **kwargs: filling.fill(kwargs[name], self.gm(**kwargs))
