"""A program that goes when its engine goes. torch keeps the graphs of TorchScript modules, and the weights in them.

Each module that is traced or frozen leaves its graph in a list of the process, with the weights that are constants in
it. A function has a graph of its own, which nobody else keeps. Each that is traced leaves a class below `nn.Module`,
too, and those slow what sets a method of `nn.Module`, as tracing does. torch has no public way from a module to a
function, or to let go of either: where what is used here is missing, the module is run, and they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Program = Callable[..., Any]


def as_function(module: torch.jit.ScriptModule) -> Program:
    """What computes the same as a frozen module, or the module itself where there is no such function.

    Args:
        module: The module, which takes and gives tensors.
    """
    graph: Any = module.graph
    this = next(iter(graph.inputs()))
    if this.uses() or not hasattr(torch._C, "_create_function_from_graph") or not hasattr(graph, "eraseInput"):
        return module
    graph = graph.copy()
    graph.eraseInput(0)  # the module
    program: Program = torch._C._create_function_from_graph("program", graph)
    return program


def empty(module: torch.jit.ScriptModule) -> None:
    """Take everything out of the graph of a module that nobody calls any more, and let go of its class.

    Args:
        module: The module, which has no modules within it.
    """
    graph: Any = module.graph
    if hasattr(graph, "eraseOutput"):
        while list(graph.outputs()):
            graph.eraseOutput(0)
        for node in reversed(list(graph.nodes())):
            node.destroy()
    store = getattr(getattr(torch.jit, "_recursive", None), "concrete_type_store", None)
    types: set[Any] = getattr(store, "methods_compiled", set())
    types.discard(getattr(module, "_concrete_type", None))
