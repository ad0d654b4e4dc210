"""What `optimize` is given, in one form: the calls, a graph for each, and the original to compare with."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from regraft.capture import caches, lift, trace
from regraft.capture.sample_inputs import SampleMaker
from regraft.capture.sample_makers import VISUAL
from regraft.capture.transformers_adapter import is_pretrained, main_inputs
from regraft.core.errors import CaptureError
from regraft.core.graph_module import GraphModule, adopt
from regraft.dropin import Entry, Reader, share
from regraft.optimize.observing import beyond_the_window, calls_of_generate
from regraft.verify.oracle import Oracle

logger = logging.getLogger("regraft")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

LARGE = 2 << 30
"""Bytes of weights beyond which nothing is done unasked that takes room for the weights once more."""


@dataclass
class Graph:
    """One call and the graph that was captured for it.

    Args:
        name: `"forward"`, or `"prefill"` and `"decode"` for what a decoder's `generate` calls.
        gm: The graph module.
        inputs: The call.
        reference: The original, which is called likewise.
        more: Further calls of the same form, to verify with.
        like: The graph of the same layers whose rewrites this one gets, unmeasured; None for one of its own.
        whole: The graph with the steps, too, that were taken back because they make no difference to it: to an engine
            they may. None where there are none.
    """

    name: str
    gm: fx.GraphModule
    inputs: Inputs
    reference: Callable[..., Any]
    more: tuple[Inputs, ...] = ()
    like: str | None = None
    whole: fx.GraphModule | None = None

    @cached_property
    def oracle(self) -> Oracle:
        """The original and its float64 copy, made once for all verifications."""
        return Oracle(self.reference, float64=True, seed=0)

    @property
    def large(self) -> bool:
        """Whether another copy of the weights, packed say, is too much to be made unasked."""
        return sum(tensor.nbytes for tensor in self.gm.parameters()) > LARGE

    @property
    def cache(self) -> Any:
        """The cache of keys and values in the call, or None."""
        cache = self.inputs[1].get("past_key_values")
        return None if caches.state_of(cache) is None else cache

    def runner(self, program: Callable[..., Any]) -> Callable[[], object]:
        """The call as something to be timed: each time with a cache that is as it was.

        Args:
            program: What to call.
        """
        args, kwargs = self.inputs
        if self.cache is None:
            return lambda: program(*args, **kwargs)
        return lambda: program(*args, **{**kwargs, "past_key_values": caches.twin(self.cache)})

    def candidate(self) -> Callable[..., Any]:
        """The graph as the original is called: a cache that is given is filled."""
        if self.cache is None:
            return self.gm
        return lambda **kwargs: caches.fill(kwargs["past_key_values"], self.gm(**kwargs))


@dataclass
class Subject:
    """A model to optimize.

    Args:
        original: What the caller gave.
        twin: For a module, the object that is to become its drop-in.
        reader: For a module, what reads its calls.
        graphs: The graphs, that of the caller's own call first.
        notes: What the caller should know.
        positional: The names of the arguments that the caller gave by position.
    """

    original: nn.Module | ExportedProgram
    twin: nn.Module | None
    reader: Reader | None
    graphs: list[Graph]
    notes: list[str] = field(default_factory=list)
    positional: tuple[str, ...] = ()


def subject_of(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any, say: Callable[[str], None]
) -> Subject:
    """Capture what is to be optimized.

    Args:
        model: A module, a graph module or an exported program.
        args: Positional arguments of an example call.
        kwargs: Keyword arguments of it.
        dynamic_shapes: As for `trace`.
        say: Is told what is being done.

    Raises:
        TypeError: Something is not what it should be; the message shows the corrected call.
        CaptureError: The model cannot be captured.
    """
    inputs = _checked(model, args, kwargs)
    if isinstance(model, ExportedProgram):
        if not any(inputs):
            given: Any = model.example_inputs or ((), {})
            inputs = (tuple(given[0]), dict(given[1]))
        say("lifting the program")
        return Subject(model, None, None, [Graph("forward", lift(model), inputs, model.module())])
    if isinstance(model, fx.GraphModule):
        own = GraphModule.__copy__(model) if isinstance(model, GraphModule) else adopt(copy.copy(model))
        return Subject(model, None, None, [Graph("forward", own, inputs, model)])
    return _module(model, inputs, dynamic_shapes, say)


def subject_again(model: nn.Module, call: Mapping[str, Any], dynamic_shapes: Any) -> Subject:
    """Capture a model whose own layers are to be in the graphs, not those of a copy.

    Args:
        model: The model, which becomes a drop-in.
        call: An example of a call, by name.
        dynamic_shapes: As for `trace`.

    Raises:
        CaptureError: The model cannot be captured.
    """
    return _module(model, ((), dict(call)), dynamic_shapes, lambda _: None, twin=model)


def _module(
    model: nn.Module, inputs: Inputs, dynamic_shapes: Any, say: Callable[[str], None], twin: nn.Module | None = None
) -> Subject:
    twin = share(model) if twin is None else twin
    notes: list[str] = []
    reference: nn.Module = model
    if any(module.training for module in model.modules()):
        notes.append("the model is in training mode, and what was made of it is in eval mode: call model.eval() first")
        logger.warning("%s", notes[-1])
        twin.eval()
        reference = share(model).eval()
    reader = Reader(twin)
    call = reader.read(*inputs) if any(inputs) else _made(twin, reader)
    call, *_ = reader.without_empty_cache(call)
    say("capturing the model")
    shapes = _sizes(twin, call) if dynamic_shapes == "auto" and is_pretrained(twin) else dynamic_shapes
    first = Graph("forward", trace(twin, (), call, dynamic_shapes=shapes), ((), call), reference)
    _expect_to_run(first)
    graphs = [first]
    if is_pretrained(twin):
        for name, calls, like in _of_generate(twin, reader, call):
            if not any(Entry(graph.name, graph.gm, graph.inputs[1]).takes(calls[0]) for graph in graphs):
                found = _captured(name, twin, reference, calls, dynamic_shapes, say, notes)
                graphs += [replace(graph, like=like) for graph in found]
    return Subject(model, twin, reader, graphs, notes, reader.names[: len(inputs[0])])


def _of_generate(
    twin: nn.Module, reader: Reader, call: Mapping[str, Any]
) -> Iterator[tuple[str, list[dict[str, Any]], str | None]]:
    """The kinds of calls that `generate` makes: a name, calls, and the name of the kind that is rewritten alike."""
    prefills, decodes = calls_of_generate(twin, reader, call)
    found: list[tuple[str, list[dict[str, Any]], str | None]] = [("prefill", prefills, None), ("decode", decodes, None)]
    found.append(("decode past the window", beyond_the_window(decodes), "decode"))
    if prefills and "attention_mask" in prefills[0]:
        without = {name: value for name, value in call.items() if name != "attention_mask"}
        prefills, decodes = calls_of_generate(twin, reader, without)
        found += [("unpadded prefill", prefills, "prefill"), ("unpadded decode", decodes, "decode")]
    elif prefills:
        prefills, decodes = calls_of_generate(twin, reader, call, padded=True)
        found += [("padded prefill", prefills, "prefill"), ("padded decode", decodes, "decode")]
        found.append(("padded decode past the window", beyond_the_window(decodes), "decode"))
    return ((name, calls, like) for name, calls, like in found if calls)


def _captured(
    name: str,
    twin: nn.Module,
    reference: nn.Module,
    calls: list[dict[str, Any]],
    dynamic_shapes: Any,
    say: Callable[[str], None],
    notes: list[str],
) -> list[Graph]:
    """The graph of a call that `generate` makes; none where it cannot be captured, and the original runs it then."""
    say(f"capturing the model's {name}")
    first = calls[0]
    try:
        shapes = _one_token_at_a_time(first) if dynamic_shapes == "auto" and _is_one_token(first) else dynamic_shapes
        gm = trace(twin, (), copy.deepcopy(first), dynamic_shapes=shapes)
        _expect_to_run(Graph(name, gm, ((), first), reference))
    except CaptureError as error:
        notes.append(f"{name} was not captured, so the original runs it: {error}")
        logger.warning("%s", notes[-1])
        return []
    entry = Entry(name, gm, first)
    more = tuple(((), one) for one in calls[1:] if entry.takes(one))
    return [Graph(name, gm, ((), first), reference, more)]


def _sizes(model: nn.Module, call: Mapping[str, Any]) -> Any:
    """Which axes vary: not the sides of images where the config names them, since to leave those open takes minutes."""
    if not any(name in VISUAL for name in call) or not all(isinstance(value, Tensor) for value in call.values()):
        return "auto"
    if not SampleMaker.variants(model, list(call))[0].narrow:
        return "auto"
    axes = {name: range(1 if name in VISUAL else value.dim()) for name, value in call.items()}
    return {name: dict.fromkeys(those, Dim.AUTO) for name, those in axes.items()}


def _expect_to_run(graph: Graph) -> None:
    try:
        with torch.no_grad():
            graph.runner(graph.gm)()
    except Exception as error:  # whatever torch exports and cannot run
        said = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{type(graph.reference).__name__} was captured, but its graph does not run: {type(error).__name__}: "
            f"{said}; capture the parts of the model that do, with regraft.trace"
        ) from error


def _one_token_at_a_time(call: Mapping[str, Any]) -> dict[str, Any]:
    """Which axes vary: all but the length of what is new, since a model that sees one token needs no causal mask."""

    def varying(tensor: Tensor) -> dict[int, Any]:
        return {axis: Dim.AUTO for axis in range(tensor.dim()) if axis == 0 or tensor.shape[axis] != 1}

    shapes: dict[str, Any] = {}
    for name, value in call.items():
        if isinstance(value, Tensor):
            shapes[name] = varying(value)
        elif (state := caches.state_of(value)) is not None:
            # the batch and the length so far; heads and their width are the model's
            shapes[name] = [{axis: Dim.AUTO for axis in (0, 2) if axis < leaf.dim()} for leaf in state.leaves]
        elif leaves := [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]:
            shapes[name] = [varying(leaf) for leaf in leaves]
    return shapes


def _is_one_token(call: Mapping[str, Any]) -> bool:
    tokens = call.get("decoder_input_ids", call.get("input_ids"))
    return isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] == 1


def _made(model: nn.Module, reader: Reader) -> dict[str, Any]:
    """An example call of a model for which the caller gave none."""
    if is_pretrained(model):
        names = main_inputs(model)
        return SampleMaker.variants(model, names)[0].make(names)
    if any(p.default is p.empty for p in inspect.signature(model.forward).parameters.values() if p.kind < 2):
        listed = ", ".join(reader.names)
        raise TypeError(
            f"optimize needs an example call of {type(model).__name__}, which takes {listed}: "
            f"regraft.optimize(model, ({listed}{',' * (len(reader.names) == 1)}))"
        )
    return {}


def _checked(model: Any, args: Any, kwargs: Any) -> Inputs:
    if not isinstance(model, (nn.Module, ExportedProgram)):
        raise TypeError(
            f"optimize takes a torch.nn.Module, a GraphModule or an ExportedProgram, not a {type(model).__name__}"
        )
    if isinstance(args, Mapping):
        raise TypeError("args is a mapping, but takes a tuple; the call is regraft.optimize(model, kwargs=inputs)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a {type(args).__name__}, but takes a tuple: regraft.optimize(model, (x,))")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a {type(kwargs).__name__}, but takes a dictionary: kwargs={{'mask': mask}}")
    return tuple(args), dict(kwargs or {})
