"""Which engine runs a graph: each is tried, verified and measured."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from regraft.capture import filling
from regraft.core.errors import ReversalConflict
from regraft.core.history import history, undo
from regraft.core.modules import graph_modules
from regraft.core.mutation import Mutations
from regraft.dropin import Entry
from regraft.optimize.engines.flat import Engine, Flat
from regraft.optimize.engines.wanted import ENGINES, OF_TORCH, engines_of
from regraft.optimize.graphs import Graph
from regraft.optimize.presets import FOR_TORCH, OTHER_KERNELS, PACKING
from regraft.optimize.step_result import worst_sentence
from regraft.optimize.steps import clock
from regraft.verify import Comparison, compare_speed, verify

logger = logging.getLogger("regraft")

#: seconds until the threads of an engine outside of torch no longer spin, which may double the time of what runs next
PAUSE = 0.03
#: how many times as long as a step an engine is measured where that does not tell: nothing makes more of a difference
LONGER = 3
#: so many pairs are enough at least: the lower median is the better guess even where the difference is not certain
PAIRS = 4
#: what an engine has to take at most, relative to what runs otherwise: it holds the weights once more
WORTH = 0.98
#: relative to the fastest: a slower engine is not built again on the graph as it was captured, to be compared with that
REACH = 1.25


@dataclass(frozen=True)
class EngineResult:
    """What was tried to run a graph, and which was taken.

    Args:
        engine: The engine that runs it.
        tried: For each engine that was tried, what came of it as a sentence.
        comparisons: For each that is right, its time against that of the rewritten graph without an engine.
        rewriting: What the rewrites add to an engine: its time on the rewritten graph against its time on the graph as
            it was captured. For the one that was asked for, or with `"auto"` for each that is right and not far behind
            the fastest; for none where nothing was rewritten, or where all is kept that is right.
    """

    engine: str
    tried: dict[str, str]
    comparisons: dict[str, Comparison]
    rewriting: dict[str, Comparison] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        found = {name: comparison.to_dict() for name, comparison in self.comparisons.items()}
        added = {name: comparison.to_dict() for name, comparison in self.rewriting.items()}
        return {"engine": self.engine, "tried": self.tried, "comparisons": found, "rewriting": added}

    def __str__(self) -> str:
        added = [f"regraft + {name} against {name} alone: {found.reason}" for name, found in self.rewriting.items()]
        return "; ".join([f"run by {self.engine}", *(f"{name}: {said}" for name, said in self.tried.items()), *added])


def pause_after(name: str) -> float:
    """How long to wait, in seconds, after calls of an engine before anything else is timed.

    Args:
        name: The engine.
    """
    return PAUSE if _is_foreign(name) else 0.0


def _is_foreign(name: str) -> bool:
    """Whether an engine has threads and kernels of its own, which come with a package of its own."""
    return name in ENGINES and bool(ENGINES[name][1])


def adopt_engine(
    wanted: Sequence[str], graph: Graph, entry: Entry, seconds: float, measured: bool, bound: Mapping[str, Any]
) -> EngineResult:
    """Let an engine run a graph, where it is right and, if that is measured, likely faster.

    It is given the graph with all steps that preserve the computation, those included that make no difference by
    themselves: it may not know a form that one of them takes away. One with kernels of its own is not given what pays
    with torch's alone, unless all is kept. Where rewriting makes one slower that was asked for by its name alone, or
    with `"auto"`, it is given the graph as it was captured.

    Args:
        wanted: Names: of engines, the fastest of which is taken, `"auto"` alone for those that are installed, `"torch"`
            for what torch has in it.
        graph: The graph.
        entry: What the drop-in runs; its engine is set.
        seconds: How long to measure each.
        measured: Whether one that is not faster is left.
        bound: What the graph itself is held to, where that is not its own error, as `verify` takes it.
    """

    def timed(name: str, baseline: Callable[..., Any], candidate: Engine) -> Comparison:
        for long in (seconds, LONGER * seconds):
            settings = clock(long, max(pause_after(name), pause_after(taken)), graph.seconds)
            both = graph.runner(baseline), graph.runner(_Called(graph, candidate))
            found = compare_speed(*both, min_pairs=PAIRS, **settings)
            spent = found.calls * sum(map(sum, found.times))  # of slow calls a few take that long
            if found.slower or (found.faster and found.ratio < WORTH) or spent > LONGER * seconds:
                break
        return found

    tried: dict[str, str] = {}
    comparisons: dict[str, Comparison] = {}
    rewriting: dict[str, Comparison] = {}
    wanted, taken = tuple(wanted), "torch"
    for name in engines_of(wanted):
        if wanted == ("torch",) and graph.large:
            tried[name] = "not tried unasked: it would take the gigabytes of the weights once more"
            continue
        engine, remark = None, ""
        gone = FOR_TORCH if measured and _is_foreign(name) else PACKING
        if graph.whole is not None:
            engine = _built(name, graph, _without(graph.whole, gone), bound, tried)
            remark = ", with the steps that make no difference without it" if engine is not None else ""
        engine = engine or _built(name, graph, _without(graph.gm, gone), bound, tried)
        if engine is None:
            continue
        found = timed(name, graph.gm.forward, engine)
        tried[name], comparisons[name] = _said(found) + remark, found
        # the same engine without the rewrites, unless that could not change anything, or nobody waits to learn it
        fastest = min(1.0, *(comparison.ratio for comparison in comparisons.values()))
        near = wanted == (name,) or (wanted == ("auto",) and found.ratio < REACH * fastest)
        again = measured and near and history(graph.gm)
        alone = _built(name, graph, _without(graph.gm, None), bound, {}) if again else None
        if alone is not None:
            added = timed(name, _Called(graph, alone), engine)
            rewriting[name] = added
            if added.slower:
                engine = alone
                found = timed(name, graph.gm.forward, engine)
                tried[name], comparisons[name] = f"{_said(found)}, on the graph as it was captured", found
        wins = found.ratio < WORTH
        if wins and entry.engine is not None:
            best = comparisons[taken]
            wins = found.high < best.low
            if not wins and found.low < best.high:  # either may be the faster: a common third does not tell
                duel = timed(name, _Called(graph, entry.engine), engine)
                tried[name] += f"; {duel.describe()} of {taken}"
                wins = duel.ratio < 1
        if wins or (wanted == (name,) and not measured):
            taken, entry.engine = name, engine
    logger.info("%s is run by %s: %s", graph.name, taken, tried)
    return EngineResult(taken, tried, comparisons, rewriting)


def let_go(found: EngineResult, entry: Entry) -> EngineResult:
    """Let torch run a graph after all: its engine was right when it was chosen, and was not in a later call.

    Args:
        found: Which engine was taken.
        entry: What the drop-in runs; it has no engine from now on.
    """
    entry.engine = None
    said = f"{found.tried[found.engine]}; but it was not right in a later call"
    return replace(found, engine="torch", tried={**found.tried, found.engine: said})


def _said(found: Comparison) -> str:
    if found.faster and found.ratio >= WORTH:
        return f"{found.reason}, but by less than the memory of its weights is worth"
    if found.ratio < WORTH and not found.faster:
        return f"likely faster: {found.describe()}, an interval that contains 1"
    return found.reason


def _built(name: str, graph: Graph, gm: GraphModule, bound: Mapping[str, Any], tried: dict[str, str]) -> Engine | None:
    """The engine for a graph, if it can be had and is right."""
    obstacle = _obstacle(gm)
    if obstacle is not None:
        tried[name] = f"not tried: {obstacle}"
        return None
    try:
        flat = Flat(gm, graph.call)
        adapter = importlib.import_module(f"regraft.optimize.engines.{ENGINES[name][0]}")
        engine = Engine(flat, adapter.build(flat), graph.gm, own_threads=_is_foreign(name))
    except Exception as error:  # whatever an engine raises that has no form for a graph
        text = (str(error).strip().splitlines() or [""])[0]
        tried[name] = f"cannot run it ({type(error).__name__}: {text[:160]})"
        return None
    bound = {"factor": OTHER_KERNELS, **bound}
    sizes = name not in OF_TORCH  # a program is of one size; at others the graph runs, which is right by now
    found = verify(
        graph.oracle, _candidate(graph, engine), *graph.inputs, extra_inputs=graph.more, vary_sizes=sizes, **bound
    )
    if not found.ok:
        tried[name] = f"is not right: {worst_sentence(found)}"
        return None
    return engine


def _obstacle(gm: GraphModule) -> str | None:
    """What a graph does beside giving its results, which an engine would not do."""
    for part in graph_modules(gm).values():
        called = [str(node.target) for node in part.graph.find_nodes(op="call_module")]
        for name, module in (("the graph module", part), *((name, part.get_submodule(name)) for name in called)):
            if module._forward_hooks or module._forward_pre_hooks:
                return f"{name} has a hook, which an engine would not call"
        mutations = Mutations(part)
        for node in part.graph.nodes:
            if node.op in ("placeholder", "get_attr") and mutations.of(node):
                return f"the graph writes to {node.target}"
    return None


def _without(gm: GraphModule, transformations: Collection[str] | None) -> GraphModule:
    """The graph without what some transformations did, such as to pack layers for torch's own kernels; None for all."""
    gone = [step for step in history(gm) if transformations is None or step.transformation in transformations]
    if not gone:
        return gm
    twin = copy.copy(gm)
    for step in reversed(gone):
        with contextlib.suppress(ReversalConflict):  # something else stands on it: it stays
            undo(twin, step)
    return twin


class _Called:
    """An engine, called as the original is; its graph tells which sizes may vary."""

    def __init__(self, graph: Graph, engine: Engine) -> None:
        self.graph = graph.gm.graph
        self._named, self._engine = graph.named, engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(self._named(*args, **kwargs))


def _candidate(graph: Graph, engine: Engine) -> Callable[..., Any]:
    name = graph.cache_name
    return _Called(graph, engine) if name is None else lambda **kwargs: filling.fill(kwargs[name], engine(kwargs))
