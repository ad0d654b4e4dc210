"""The engine's own speed: time per site of each transformation and of its reversal, at growing sizes of graph.

    python benchmarks/engine.py [--nodes 1000 10000 100000]

Every graph is made anew of the same small layers, and rewritten by regraft and by what a user would take instead:
`optimum.fx.optimization` 2.3 where it is installed (`pip install --no-deps optimum==2.3.0`), and
`torch.fx.experimental.optimization.fuse` for batch norms. All lint and recompile. One run of each, side by side; a
ratio is regraft's time over the other's.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import operator
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.optimization import fuse

import regraft as rg

WIDTH = 4
SLOW_BEYOND = 10_000  # nodes; there some of the others' bookkeeping takes minutes


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


def seconds(function: Callable[[], Any]) -> float:
    """The time of one call, with the garbage collector out of the way."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    function()
    taken = time.perf_counter() - start
    gc.enable()
    return taken


def optimum_class(name: str) -> Any:
    """The same transformation of optimum, if it is installed."""
    try:
        return getattr(importlib.import_module("optimum.fx.optimization"), name)
    except ImportError:
        return None


def run(name: str, nodes: int) -> str:
    """One row of the table."""
    gm, sites = build(name, nodes)
    transformation = getattr(rg, name)()
    applied = seconds(lambda: transformation(gm))
    done = sum(len(step.applied) for step in rg.history(gm))
    if done != sites:
        raise SystemExit(f"{name}: {done} of {sites} sites applied")
    reversed_in = seconds(lambda: transformation(gm, reverse=True))
    row = [name, f"{nodes:,}", f"{sites:,}", f"{applied / sites * 1e6:.0f}", f"{reversed_in / sites * 1e6:.0f}"]
    return "| " + " | ".join(row + others(name, nodes, applied, reversed_in)) + " |"


def others(name: str, nodes: int, applied: float, reversed_in: float) -> list[str]:
    """The ratios to optimum (applying, reversing) and to torch.fx's own fusion."""
    ratios = ["–", "–", "–"]
    kind = optimum_class(name)
    if kind is not None and nodes <= SLOW_BEYOND:
        theirs, (gm, _) = kind(), build(name, nodes)
        ratios[0] = f"{applied / seconds(lambda: theirs(gm)):.2f}"
        if hasattr(theirs, "reverse"):
            ratios[1] = f"{reversed_in / seconds(lambda: theirs(gm, reverse=True)):.2f}"
    if name.startswith("FuseBatchNorm") and nodes <= SLOW_BEYOND:
        gm, _ = build(name, nodes)
        ratios[2] = f"{applied / seconds(lambda: fuse(gm)):.2f}"
    return ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="time per site of each transformation and of its reversal")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    options = parser.parse_args()
    logging.getLogger("regraft").setLevel(logging.ERROR)
    print("| transformation | nodes | sites | µs per site | reversed | of optimum's | reversed | of torch.fx's |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.only:
        for nodes in options.nodes:
            print(run(name, nodes), flush=True)


if __name__ == "__main__":
    main()
