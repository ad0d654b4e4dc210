"""What `optimize` is given, in one form: the calls, a graph for each, and the original to compare with."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from regraft.capture import lift, trace
from regraft.capture.codegen import decided_in
from regraft.capture.own_state import Attribute, set_meanwhile, spelled, used_meanwhile
from regraft.capture.sample_inputs import Unmakeable, example_call
from regraft.capture.signature import take_apart
from regraft.capture.trace import expect_python
from regraft.capture.transformers_adapter import generating_within, is_pretrained, main_inputs
from regraft.capture.untouched import untouched, values_kept
from regraft.core.errors import CaptureError
from regraft.core.expect import expect_call
from regraft.core.graph_module import GraphModule, adopt
from regraft.dropin import Entry, Reader, expect_counted, share
from regraft.dropin.contents import Contents
from regraft.optimize.axes import axes_of
from regraft.optimize.graphs import Graph
from regraft.optimize.observing import beyond_the_window, calls_of_generate
from regraft.optimize.side_effects import SideEffects, having, remarks, returning, side_effects
from regraft.verify.oracle import Oracle
from regraft.verify.run import Inputs

logger = logging.getLogger("regraft")


@dataclass
class Subject:
    """A model to optimize.

    Args:
        original: What the caller gave.
        twin: For a module, the object that is to become its drop-in.
        reader: For a module, what reads its calls.
        graphs: The graphs, that of the caller's own call first where it could be captured.
        call: The caller's own call of a module, by name.
        notes: What the caller should know.
        positional: The names of the arguments that the caller gave by position.
        evaluated: The original as it is to be run where no graph of it is: a module in eval mode.
    """

    original: nn.Module | ExportedProgram
    twin: nn.Module | None
    reader: Reader | None
    graphs: list[Graph]
    call: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    positional: tuple[str, ...] = ()
    evaluated: nn.Module | None = None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Put back, on leaving, what running the model and its graphs changes about them."""
        with ExitStack() as stack:
            for model in (self.evaluated, self.twin):
                if model is not None:
                    stack.enter_context(untouched(model))
            stack.enter_context(values_kept(buffer for graph in self.graphs for buffer in graph.written))
            yield


def subject_of(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    frozen: bool,
    say: Callable[[str], None],
) -> Subject:
    """Capture what is to be optimized.

    Args:
        model: A module, a graph module or an exported program.
        args: Positional arguments of an example call.
        kwargs: Keyword arguments of it.
        dynamic_shapes: As for `trace`.
        frozen: Whether the caller promises to leave the model as it is.
        say: Is told what is being done.

    Raises:
        TypeError: Something is not what it should be; the message shows the corrected call.
        ValueError: A weight was made in inference mode, and nobody promises to leave it as it is.
        CaptureError: The model cannot be captured.
    """
    inputs = _checked(model, args, kwargs)
    if isinstance(model, ExportedProgram):
        if not any(inputs):
            given: Any = model.example_inputs or ((), {})
            inputs = (tuple(given[0]), dict(given[1]))
        say("lifting the program")
        return Subject(model, None, None, [Graph("forward", lift(model), inputs, _oracle(model.module()))])
    if isinstance(model, fx.GraphModule):
        own = GraphModule.__copy__(model) if isinstance(model, GraphModule) else adopt(copy.copy(model))
        return Subject(model, None, None, [Graph("forward", own, inputs, _oracle(model))])
    return _module(model, inputs, dynamic_shapes, frozen, say)


def subject_again(model: nn.Module, call: Mapping[str, Any], dynamic_shapes: Any, frozen: bool) -> Subject:
    """Capture a model whose own layers are to be in the graphs, not those of a copy.

    Args:
        model: The model, which becomes a drop-in.
        call: An example of a call, by name.
        dynamic_shapes: As for `trace`.
        frozen: Whether the caller promises to leave the model as it is.

    Raises:
        CaptureError: The model cannot be captured.
        ValueError: A weight was made in inference mode, and nobody promises to leave it as it is.
    """
    return _module(model, Reader(model).apart(call), dynamic_shapes, frozen, lambda _: None, twin=model)


def _module(
    model: nn.Module,
    inputs: Inputs,
    dynamic_shapes: Any,
    frozen: bool,
    say: Callable[[str], None],
    twin: nn.Module | None = None,
) -> Subject:
    if not frozen:
        expect_counted(model)
    twin = share(model) if twin is None else twin
    notes: list[str] = []
    reference: nn.Module = model
    if any(module.training for module in model.modules()):
        notes.append("the model is in training mode, and what was made of it is in eval mode: call model.eval() first")
        logger.warning("%s", notes[-1])
        twin.eval()
        reference = share(model).eval()
    if path := generating_within(twin):
        notes.append(
            f"its generate calls {path}, a model of transformers, without the graphs of the whole: to speed that up, "
            f"optimize it by itself and put it there: model.{path} = regraft.optimize(model.{path}, ...).model"
        )
        logger.warning("%s", notes[-1])
    oracle = _oracle(reference)
    reader = Reader(twin)
    if not reader.star and len(inputs[0]) > len(reader.names):
        take_apart(model, *inputs)  # which raises, and says so
    call = reader.read(*inputs) if any(inputs) else _made(twin, reader, notes)
    call, *_ = reader.without_empty_cache(call)
    graphs: list[Graph] = []
    failures: dict[str, CaptureError] = {}
    with untouched(twin), set_meanwhile(twin) as own:
        generated = _of_generate(twin, reader, call) if is_pretrained(twin) else []
    kinds = chain([("forward", [call], None)], generated)
    for name, calls, like in kinds:
        if any(Entry(graph.name, graph.gm, graph.call).takes(calls[0]) for graph in graphs):
            continue
        say("capturing the model" + (f"'s {name}" if name != "forward" else ""))
        try:
            graphs.append(replace(_captured(name, twin, reader, oracle, calls, dynamic_shapes, own, notes), like=like))
        except CaptureError as error:
            failures[name] = error
    if not graphs:
        raise failures["forward"]
    for name, failure in failures.items():
        notes.append(f"{name} was not captured, so the original runs it: {failure}")
        logger.warning("%s", notes[-1])
    return Subject(model, twin, reader, graphs, call, notes, reader.names[: len(inputs[0])], reference)


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
    reader: Reader,
    oracle: Oracle,
    calls: list[dict[str, Any]],
    dynamic_shapes: Any,
    own: Set[Attribute],
    notes: list[str],
) -> Graph:
    """The graph of a call, and of those like it, which has been run once."""
    first = calls[0]
    inputs = reader.apart(first)
    shapes = axes_of(twin, first) if dynamic_shapes == "auto" and is_pretrained(twin) else dynamic_shapes
    sets, others, made, contents = side_effects(twin, inputs)
    reference: Any = oracle.reference
    if made:
        having(made, twin)
        reference = having(made, share(reference))
        oracle = _oracle(reference)
    with used_meanwhile(twin, own) as used:
        try:
            leaves = bool(sets or contents.filled)
            gm = trace(returning(twin, sets, contents) if leaves else twin, *inputs, dynamic_shapes=shapes)
        except CaptureError:
            if not leaves:
                raise
            gm = trace(twin, *inputs, dynamic_shapes=shapes)  # what it leaves is what no graph can return
            sets, others, contents = {}, sorted({*others, *map(spelled, sets)}), Contents()
    ignores = frozenset(own - used.keys()).union(sets)
    if sets or contents.filled:
        oracle = _oracle(returning(reference, sets, contents))
    notes += remarks(SideEffects(sets, others, made, contents))
    graph = Graph(name, gm, inputs, oracle, ignores=ignores, sets=sets, contents=contents, reader=reader)
    entry = Entry(name, gm, first)
    with untouched(twin), values_kept(graph.written):
        _expect_to_run(graph)
        seconds = _seconds_of(graph)
        again = not graph.written or entry.takes(first)  # which it may have counted
    if decided := decided_in(gm):
        if not again or (calls[1:] and not any(map(entry.takes, calls[1:]))):
            raise CaptureError(f"what it reads of its inputs and flags is not the same in each call: {decided}")
        if kept := sorted(map(spelled, used.keys() - sets.keys())):
            raise CaptureError(
                f"it reads of its inputs and flags, and sets {', '.join(kept)} for the next call: {decided}"
            )
        notes.append(f"the original runs {name} where it reads anything else of its inputs and flags than {decided}")
    return replace(graph, seconds=seconds, more=tuple(reader.apart(one) for one in calls[1:] if entry.takes(one)))


def _oracle(reference: nn.Module) -> Oracle:
    return Oracle(reference, float64=True, seed=0)


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


def _seconds_of(graph: Graph) -> float:
    """How long a call takes once the graph has run: the first may have to read the weights from a file."""
    start = time.perf_counter()
    with torch.no_grad():
        graph.runner(graph.gm)()
    return time.perf_counter() - start


def _made(model: nn.Module, reader: Reader, notes: list[str]) -> dict[str, Any]:
    """An example call of a model for which the caller gave none."""
    if is_pretrained(model):
        names = main_inputs(model)
        shown = "regraft.optimize(model, kwargs={" + ", ".join(f'"{name}": ...' for name in names) + "})"
        try:
            call = example_call(model)
        except Unmakeable as error:
            raise TypeError(f"optimize needs an example call, since {error}: {shown}") from None
        if missing := [name for name in names if name not in call]:
            notes.append(f"the example was made without {', '.join(missing)}; for calls that have them: {shown}")
        return call
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
    if isinstance(model, nn.Module):
        expect_python("optimize", model)
    return expect_call(args, kwargs, "regraft.optimize(model, {})")
