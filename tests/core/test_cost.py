"""What the engine costs: linear in the graph, whatever is done. Calls are counted, the same on every machine."""

from __future__ import annotations

import cProfile
import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import regraft as rg


class DropModules(rg.Transformation):
    """A user's own: every activation layer becomes a function, and the module goes."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.op == "call_module" and isinstance(graph_module.get_submodule(node.target), nn.ReLU):
                block, _, name = node.target.rpartition(".")
                delattr(graph_module.get_submodule(block), name)
                node.op, node.target = "call_function", torch.relu
        return graph_module


def chain(blocks: int) -> GraphModule:
    root, graph = nn.Module(), Graph()
    value = graph.placeholder("x")
    for i in range(blocks):
        block = nn.Module()
        block.q, block.k, block.conv = nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv2d(2, 2, 1)
        block.norm, block.relu = nn.BatchNorm2d(2), nn.ReLU()
        root.add_module(f"block{i}", block)
        both = [graph.call_module(f"block{i}.{name}", (value,)) for name in ("q", "k")]
        value = graph.call_function(operator.truediv, (graph.call_function(operator.add, tuple(both)), 3.0))
        for name in ("conv", "norm", "relu"):
            value = graph.call_module(f"block{i}.{name}", (value,))
    graph.output(value)
    return GraphModule(root, graph).eval()


def calls(function: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    with profile:
        function()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    "transformation",
    [
        rg.MergeLinears(),
        rg.FuseBiasInLinear(),
        rg.ChangeTrueDivToMulByInverse(),
        rg.FuseBatchNorm2dInConv2d(),
        rg.compose(rg.MergeLinears(), rg.ChangeTrueDivToMulByInverse()),
        DropModules(),
    ],
    ids=lambda transformation: type(transformation).__name__,
)
def test_linear_in_the_graph(transformation: rg.Transformation) -> None:
    each = []
    for blocks in (20, 160):
        gm = chain(blocks)
        each.append([calls(lambda gm=gm: transformation(gm)) / blocks, calls(lambda gm=gm: rg.undo(gm)) / blocks])
    for small, large in zip(*each, strict=True):
        assert large < 1.1 * small


def test_the_engines_own_calls_for_a_site() -> None:
    """Those of its own functions, which do not depend on torch; a tenth above what they were when this was written."""
    blocks = 100
    gm = chain(blocks)
    for function, most in ((lambda: rg.FuseBatchNorm2dInConv2d()(gm), 476), (lambda: rg.undo(gm), 184)):
        profile = cProfile.Profile()
        with profile:
            function()
        own = [entry for entry in profile.getstats() if "regraft" in getattr(entry.code, "co_filename", "")]
        assert sum(entry.callcount for entry in own) / blocks < most
