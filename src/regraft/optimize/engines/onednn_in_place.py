"""What writes into its argument, as what makes a new tensor: how such a tensor lies in memory is what a trace has seen.

TorchScript takes such writes out as well, but forgets then in which order the result lies, and oneDNN Graph gives it in
another one than the graph was traced with.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from regraft.core.flow import draws
from regraft.core.mutation import is_own, read_later, writes
from regraft.core.vocabulary import attribute


def out_of_place(gm: GraphModule) -> dict[Node, tuple[Node, Callable[..., Any]]]:
    """For each node that writes into memory that nobody reads later but through it: its argument, and what to call.

    That takes the arguments of the node. Its result may be of another size or type than what would be written to.

    Args:
        gm: The graph.
    """
    found: dict[Node, tuple[Node, Callable[..., Any]]] = {}
    for node in gm.graph.nodes:
        written = writes(node, gm)
        if len(written) != 1 or draws(node, gm):
            continue
        if is_own(written[0], gm, found) and read_later(written[0], node, gm) is None:
            instead = _instead(node, gm)
            if callable(instead):
                found[node] = written[0], instead
    return found


def _instead(node: Node, gm: GraphModule) -> object:
    target: Any = node.target
    if node.op == "call_module":
        layer = attribute(gm, target)
        if layer.__dict__.get("inplace") is not True:  # a layer of which nothing is known
            return None
        layer = copy.copy(layer)
        layer.inplace = False
        return layer
    if node.kwargs.get("inplace") is True:
        return lambda *args, **kwargs: target(*args, **{**kwargs, "inplace": False})
    if node.op == "call_method":
        return getattr(Tensor, target.removesuffix("_"), None)
    name = getattr(target, "__name__", "")
    if isinstance(target, OpOverload):
        name, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.aten, name[:-1], None), overload, None)
    for library, plain in ((operator, name[1:]), (torch, name[:-1]), (F, name[:-1])):
        if getattr(library, name, None) is target:
            return getattr(library, plain, None)
    return None
