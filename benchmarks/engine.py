"""The engine's own speed: time per site of each transformation and of its reversal, at growing sizes of graph.

    python benchmarks/engine.py [--nodes 1000 10000 100000]

Every graph is made anew of the same small layers, and rewritten by regraft and by what a user would take instead:
`optimum.fx.optimization` 2.3 where it is installed (`pip install --no-deps optimum==2.3.0`), and
`torch.fx.experimental.optimization.fuse` for batch norms. All lint and recompile. The time is the process's own (so
run it with `OMP_NUM_THREADS=1`), the least of a few rounds in which everybody has a turn; a ratio is regraft's over the
other's. In brackets, what linting and compiling alone are of the other's time: no engine that does both gets below it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import operator
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.optimization import fuse

import regraft as rg

WIDTH = 4
ROUNDS = {1_000: 5, 10_000: 3}  # one where the graph is larger


def layer(root: nn.Module, block: str, name: str, module: nn.Module) -> str:
    """Register a layer inside a block (optimum fails on layers of the model itself); returns its name."""
    if not hasattr(root, block):
        root.add_module(block, nn.Module())
    root.get_submodule(block).add_module(name, module)
    return f"{block}.{name}"


def three_linears(root: nn.Module, graph: Graph, x: Any, i: int) -> Any:
    """Query, key and value of one attention: 5 nodes, one site."""
    outputs = []
    for name in ("q", "k", "v"):
        outputs.append(graph.call_module(layer(root, f"block{i}", name, nn.Linear(WIDTH, WIDTH)), (x,)))
    return graph.call_function(operator.add, (graph.call_function(operator.add, tuple(outputs[:2])), outputs[2]))


def division(_root: nn.Module, graph: Graph, x: Any, _i: int) -> Any:
    """A division and an addition: 2 nodes, one site."""
    return graph.call_function(operator.add, (graph.call_function(operator.truediv, (x, 8.0)), x))


def one_linear(root: nn.Module, graph: Graph, x: Any, i: int) -> Any:
    """A linear layer and an activation: 2 nodes, one site."""
    linear = layer(root, f"block{i}", "linear", nn.Linear(WIDTH, WIDTH))
    return graph.call_function(torch.relu, (graph.call_module(linear, (x,)),))


def conv_and_norm(root: nn.Module, graph: Graph, x: Any, i: int) -> Any:
    """A convolution, a batch norm and an activation: 3 nodes, one site."""
    conv = layer(root, f"block{i}", "conv", nn.Conv2d(WIDTH, WIDTH, 1))
    norm = graph.call_module(layer(root, f"block{i}", "norm", nn.BatchNorm2d(WIDTH)), (graph.call_module(conv, (x,)),))
    return graph.call_function(torch.relu, (norm,))


BLOCKS: dict[str, tuple[Callable[..., Any], int]] = {
    "MergeLinears": (three_linears, 5),
    "FuseBiasInLinear": (one_linear, 2),
    "ChangeTrueDivToMulByInverse": (division, 2),
    "FuseBatchNorm2dInConv2d": (conv_and_norm, 3),
}


def build(name: str, nodes: int) -> tuple[GraphModule, int]:
    """A chain of blocks with about `nodes` nodes, and its number of sites."""
    block, size = BLOCKS[name]
    root, graph = nn.Module(), Graph()
    value = graph.placeholder("x")
    sites = nodes // size
    for i in range(sites):
        value = block(root, graph, value, i)
    graph.output(value)
    return GraphModule(root, graph).eval(), sites


def seconds(function: Callable[[], Any], limit: float = 0.0) -> float:
    """The time of one call, with the garbage collector out of the way; infinite where it takes longer than `limit`."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        function()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        return time.process_time() - start
    except TimeoutError:
        return float("inf")
    finally:
        gc.enable()


def give_up(*_: Any) -> None:
    """What happens at the limit."""
    raise TimeoutError


def optimum_class(name: str) -> Any:
    """The same transformation of optimum, if it is installed."""
    try:
        return getattr(importlib.import_module("optimum.fx.optimization"), name)
    except ImportError:
        return None


def ours(name: str, nodes: int) -> dict[str, float]:
    """One round of regraft: the seconds of each part."""
    gm, sites = build(name, nodes)
    transformation = getattr(rg, name)()
    times = {"applied": seconds(lambda: transformation(gm))}
    done = sum(len(step.applied) for step in rg.history(gm))
    if done != sites:
        raise SystemExit(f"{name}: {done} of {sites} sites applied")
    times["compiled"] = seconds(lambda: (gm.graph.lint(), gm.recompile()))
    times["reversed"] = seconds(lambda: transformation(gm, reverse=True))
    times["compiled again"] = seconds(lambda: (gm.graph.lint(), gm.recompile()))
    return times


def others(name: str, nodes: int, limit: float) -> dict[str, float]:
    """One round of the others."""
    times: dict[str, float] = {}
    kind = optimum_class(name)
    if kind is not None:
        theirs, (gm, _) = kind(), build(name, nodes)
        times["optimum"] = seconds(lambda: theirs(gm), limit)
        if hasattr(theirs, "reverse") and times["optimum"] < limit:
            times["optimum reversed"] = seconds(lambda: theirs(gm, reverse=True), limit)
    if name.startswith("FuseBatchNorm"):
        gm, _ = build(name, nodes)
        times["torch.fx"] = seconds(lambda: fuse(gm), limit)
    return times


def run(name: str, nodes: int, limit: float) -> str:
    """One row of the table."""
    sites = nodes // BLOCKS[name][1]
    best: dict[str, float] = {}
    for _ in range(ROUNDS.get(nodes, 1)):
        for part, taken in (ours(name, nodes) | others(name, nodes, limit)).items():
            best[part] = min(taken, best.get(part, taken))
    each = [f"{best[part] / sites * 1e6:.0f}" for part in ("applied", "reversed")]

    def ratio(part: str, compiled: str, other: str) -> str:
        if other not in best:
            return "–"
        if best[other] == float("inf"):
            return f"< {best[part] / limit:.2f}"
        return f"{best[part] / best[other]:.2f} ({best[compiled] / best[other]:.2f})"

    optimum = ratio("applied", "compiled", "optimum"), ratio("reversed", "compiled again", "optimum reversed")
    row = (name, f"{nodes:,}", f"{sites:,}", *each, *optimum, ratio("applied", "compiled", "torch.fx"))
    return f"| {' | '.join(row)} |"


def walk(nodes: int) -> float:
    """Seconds per node of a walk that does nothing but look at nodes and weights: what memory alone costs."""
    gm, _ = build("FuseBiasInLinear", nodes)

    def look() -> None:
        for node in gm.graph.nodes:
            _ = node.args, node.meta, len(node.users)
            if node.op == "call_module":
                _ = gm.get_submodule(str(node.target)).weight

    return min(seconds(look) for _ in range(max(5, 30_000 // nodes))) / nodes


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="time per site of each transformation and of its reversal")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that the others may take for one call")
    options = parser.parse_args()
    signal.signal(signal.SIGVTALRM, give_up)
    logging.getLogger("regraft").setLevel(logging.ERROR)
    print("| transformation | nodes | sites | µs per site | reversed | of optimum's | reversed | of torch.fx's |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.only:
        for nodes in options.nodes:
            print(run(name, nodes, options.limit), flush=True)
    print("\n| nodes | ns per node of a walk that only looks |\n|---|---|")
    for nodes in options.nodes:
        print(f"| {nodes:,} | {walk(nodes) * 1e9:.0f} |", flush=True)


if __name__ == "__main__":
    main()
