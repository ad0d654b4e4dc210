"""A model and one call of it through `torch.export`, and the graph module that comes of it."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from regraft.capture import caches, torch_private
from regraft.capture.as_it_runs import AsItRuns, TooInvolved, attention_asked, extremes_asked, lists_asked
from regraft.capture.decisions import Asked, flags_of
from regraft.capture.failures import decides_by_value, where
from regraft.capture.given_numbers import GivenNumbers
from regraft.capture.known_numbers import KnownNumbers, constants_of
from regraft.capture.layers_called import LayersCalled
from regraft.capture.layouts import Layouts, LayoutsRead
from regraft.capture.own_state import changed_meanwhile
from regraft.capture.random_numbers import others_drawn
from regraft.capture.shapes import Axes, enlarged
from regraft.capture.signature import Call

#: the name of the model inside of the module that is exported; export's names all begin with it
PREFIX = "model"

_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")

_LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, str, type(None))


class Seen:
    """What was seen of a model as it ran: an object of its own, because export puts back what a forward sets.

    Attributes:
        out_spec: the structure of its result.
        changed: what it replaced, by name.
        asked: what it read of its inputs; that which each was read of is a result of the program, after those of the
            model.
        drawn: whose generators, beside torch's, gave it numbers.
        otherwise: the modules that it set something of, and called so.
        layouts: how its inputs have to be laid in memory; None where it did not ask.
    """

    out_spec: Any = None
    changed: Set[str] = frozenset()
    asked: Sequence[Asked] = ()
    drawn: Set[str] = frozenset()
    otherwise: Set[nn.Module] = frozenset()
    layouts: Layouts | None = None


class Flat(nn.Module):
    """A model as a function of a flat list of tensors, with a flat list of results.

    Export then sees neither the model's signature nor its containers, which it treats in ways of its own.

    Args:
        model: the model.
        call: the call that it gets.
        seen: where to note what the model returns.
        quick: whether to give up where sizes are too involved.
        values: the tensors that it gets, where it may read numbers of them; what those were read of are its last
            results then.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        seen: Seen,
        quick: bool = False,
        values: Sequence[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.training = model.training
        self._modules[PREFIX] = model
        self.call = call
        self.seen = seen
        self.quick = quick
        self.values = values
        self.constants = constants_of(model)
        self.flags = [] if values is None else flags_of(model)
        self.__dict__["forward"] = _with_names(self._run, call.names)

    def _run(self, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = self.call.rebuild(leaves)
        model = self._modules[PREFIX]
        assert model is not None
        known = KnownNumbers(_standing(self.constants))
        values = None if self.values is None else chain(zip(leaves, self.values, strict=True), _standing(self.flags))
        given = GivenNumbers(known, values)
        layers = LayersCalled(model)
        with ExitStack() as stack:
            changed = stack.enter_context(changed_meanwhile(model))
            drawn = stack.enter_context(others_drawn())
            stack.enter_context(layers.watched())
            stack.enter_context(attention_asked(model))
            stack.enter_context(extremes_asked())
            if leaves:
                stack.enter_context(lists_asked(given, type(leaves[0])))
            stack.enter_context(AsItRuns(self.quick, known, given))
            layouts = stack.enter_context(LayoutsRead())
            result = model(*args, **kwargs)
        self.seen.changed = changed
        self.seen.asked = given.asked
        self.seen.drawn = drawn
        self.seen.otherwise = layers.otherwise
        self.seen.layouts = layouts.of(self.call.interface.labels, self.call.leaves)
        flat, spec = torch_private.tree_flatten(caches.unfold(result))
        self.seen.out_spec = spec
        for leaf in flat:
            if not isinstance(leaf, _LEAVES):
                raise TypeError(
                    f"the model returns a {type(leaf).__name__}, which pytree cannot take apart: unsupported output"
                )
        return (*flat, *(asked.tensor for asked in given.asked))


def _standing(tensors: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What export runs with in place of tensors of the model, and those."""
    return [(getattr(module, name), value) for module, name, value in tensors]


def _with_names(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    def forward(*leaves: Any) -> Any:
        return function(*leaves)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return forward


def without_prefix(path: str) -> str:
    """The model's own name for what export calls `path`.

    Args:
        path: a qualified name inside of `Flat`.
    """
    return path.removeprefix(PREFIX).removeprefix(".")


@dataclass
class Exported:
    """An exported program.

    Args:
        program: the program.
        enlarged: whether the sample had to be enlarged for it.
        seen: what was seen of the model meanwhile.
        way: which of the ways worked.
    """

    program: torch.export.ExportedProgram
    enlarged: bool
    seen: Seen
    way: int


def export(
    model: nn.Module,
    call: Call,
    axes: Axes,
    ways: Sequence[Callable[[], AbstractContextManager[Any]]],
    quick: bool = False,
    decided: bool = False,
    hasty: bool = False,
) -> Exported:
    """Export a model, in the first of some ways that works.

    Args:
        model: the model.
        call: an example of a call.
        axes: which axes of the tensors vary.
        ways: contexts to export in, the plain one first.
        quick: whether to give up where sizes are too involved.
        decided: whether what the model decides by the values of its inputs is decided as for these.
        hasty: whether to raise where it decides by them, before other samples and ways are tried.

    Raises:
        TooInvolved: they are.
        Exception: what torch raised in the first way that is no mere try, where none works.
    """
    leaves = _distinct(call.leaves)
    samples: list[list[torch.Tensor]] = []
    for leading_only in (False, True):
        larger = enlarged(leaves, axes, leading_only)
        if larger is not None and not any(_same_shapes(larger, sample) for sample in samples):
            samples.append(larger)
    samples.append(leaves)
    failure: Exception | None = None
    stops: set[str | None] = set()  # of the first way
    for place, way in enumerate(ways):
        for sample in samples:
            seen = Seen()
            flat = Flat(model, call, seen, quick, sample if decided else None)
            try:
                with way(), torch.inference_mode(False), torch.no_grad(), _quiet(), _unmarked(sample):
                    program = torch.export.export(flat, tuple(sample), strict=False, dynamic_shapes=_shapes(axes))
                _expect_plain_functions(program)
            except TooInvolved:
                raise
            except Exception as error:  # whatever a model raises when it meets sizes that it does not take
                if quick and _is_about_equations(error):
                    raise TooInvolved(str(error).strip()) from error
                if hasty and decides_by_value(error):
                    raise
                failure = error if failure is None or sample is leaves else failure
                stop = where(model, error) if decides_by_value(error) else None
                if place == 0:
                    stops.add(stop)
                elif stop is not None and stops == {stop}:
                    break  # neither the samples nor the way make a difference
            else:
                return Exported(program, sample is not leaves, seen, place)
    assert failure is not None
    raise failure


def _is_about_equations(error: BaseException) -> bool:
    """Whether sympy cannot solve what export asks it of sizes, which it does at the end, for any sample."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "sympy"


def _expect_plain_functions(program: torch.export.ExportedProgram) -> None:
    """A transformed function stands in an exported graph by calls whose effect is a state, not what they return."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in chain.from_iterable(graph.nodes for graph in graphs):
        if torch_private.transforms_functions(node.target):
            raise NotImplementedError("what torch.vmap and torch.func make of a function has no form in a graph")


@contextlib.contextmanager
def _unmarked(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Without the marks that export leaves on tensors where it fails.

    The next export would take axes to vary by them, and so would `torch.compile` with the caller's tensors.
    """
    were = [{key: set(value) if type(value) is set else value for key, value in vars(t).items()} for t in tensors]
    try:
        yield
    finally:
        for tensor, was in zip(tensors, were, strict=True):
            vars(tensor).clear()
            vars(tensor).update(was)


def _shapes(axes: Axes) -> Any:
    return tuple(axes) if any(axes) else None


def _same_shapes(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return [leaf.shape for leaf in left] == [leaf.shape for leaf in right]


def _distinct(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor given for two arguments would become one input of the graph."""
    seen: set[int] = set()
    distinct = []
    for leaf in leaves:
        if id(leaf) in seen:
            leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
        distinct.append(leaf)
    return distinct


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that are about the trace, and what torch writes to stderr and logs where it fails.

    What they warn of is put right afterwards, and a failure is told in a sentence.
    """
    silence = logging.Filter("nobody")  # which lets pass what comes from there
    _FAKE_TENSORS.addFilter(silence)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        _FAKE_TENSORS.removeFilter(silence)
