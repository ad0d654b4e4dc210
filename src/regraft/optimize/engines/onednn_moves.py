"""Rows that several copies move, moved by one: Swin rolls an image, and cuts it into windows.

torch rolls along one axis after the other, by joining two parts, on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from regraft.optimize.engines.onednn_fusions import called

_LAYING = {"view", "reshape", "flatten", "unflatten", "permute", "transpose", "contiguous", "clone"}
_NARROW = 16
"""Rows of fewer elements may take longer one by one than they do in a roll."""


def chains(gm: GraphModule) -> dict[Node, list[Node]]:
    """Calls in a row that lay the elements of a value otherwise, of which at least one rolls: by their last one.

    Args:
        gm: The graph.
    """
    found: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if called(node, gm) in {"roll", *_LAYING} and node.args and isinstance(node.args[0], Node):
            before = found.pop(node.args[0], []) if len(node.args[0].users) == 1 else []
            found[node] = [*before, node]
    return {last: chain for last, chain in found.items() if any(called(node, gm) == "roll" for node in chain)}


def moved_at_once(
    chain: list[Node], gm: GraphModule, size: torch.Size, numbers: Mapping[Node, float]
) -> dict[Node, Callable[[Mapping[Node, Any]], Tensor]]:
    """Such calls, as functions of the values of the nodes; nothing where they do not move whole rows.

    Args:
        chain: The calls, the last of which gives a dense tensor.
        gm: The graph.
        size: The size of what is moved, which is dense, too.
        numbers: The numbers that are made of sizes.
    """
    sizes = {other for node in chain for other in node.all_input_nodes[1:]}
    width = size[-1] if size.numel() else 0
    if width < _NARROW or not sizes <= numbers.keys():
        return {}
    run = Interpreter(gm)
    elements = torch.arange(size.numel()).view(size)
    for node in chain:
        args, kwargs = map_arg((node.args[1:], node.kwargs), numbers.__getitem__)
        elements = getattr(run, node.op)(node.target, (elements, *args), kwargs)
    rows = elements.reshape(-1, width)
    places = rows[:, 0] // width
    if not torch.equal(rows, places[:, None] * width + torch.arange(width)):
        return {}
    found = {node: partial(_as_given, node) for node in chain}
    return {**found, chain[-1]: partial(_moved, chain[-1], width, places, elements.shape)}


def _as_given(node: Node, env: Mapping[Node, Any]) -> Tensor:
    given: Tensor = env[node.all_input_nodes[0]]
    return given


def _moved(node: Node, width: int, places: Tensor, size: torch.Size, env: Mapping[Node, Any]) -> Tensor:
    return _as_given(node, env).reshape(-1, width).index_select(0, places).view(size)
