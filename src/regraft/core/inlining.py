"""Regions of a graph that export keeps as graphs of their own, for what torch does around them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from regraft.core.vocabulary import attribute


def inline_regions(gm: GraphModule) -> bool:
    """Put regions without autocast, or with or without gradients, into the graph around them.

    Where autocast is off and no gradients are recorded, as an engine runs, they compute there what they would alone.

    Args:
        gm: The graph, which is changed; the graphs inside of it are not.

    Returns:
        Whether there were any.
    """
    waiting = list(gm.graph.nodes)
    found = False
    while waiting:
        node = waiting.pop()
        region = _region(node, gm)
        if region is not None:
            waiting += _inlined(node, *region, gm)
            found = True
    return found


def _region(node: Node, gm: GraphModule) -> tuple[Node, GraphModule, tuple[Any, ...]] | None:
    """The region that a node runs, by its own node and itself, and its inputs; None where it has to stay as it is."""
    if node.op != "call_function" or any(user.target is not operator.getitem for user in node.users):
        return None
    if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2] is False:
        holder, *given = node.args[4:]
    elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        holder, *given = node.args[1:]
    else:
        return None
    region = attribute(gm, str(holder.target)) if isinstance(holder, Node) else None
    return (holder, region, tuple(given)) if isinstance(region, GraphModule) else None  # type: ignore[return-value]


def _inlined(node: Node, holder: Node, region: GraphModule, given: tuple[Any, ...], gm: GraphModule) -> list[Node]:
    """Put one region into the graph; the nodes that are new."""
    values: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), given, strict=True))
    found: list[Node] = []
    for inner in region.graph.nodes:
        if inner.op in ("placeholder", "output"):
            continue
        with gm.graph.inserting_before(node):
            values[inner] = copied = gm.graph.node_copy(inner, values.__getitem__)
        if inner.op in ("get_attr", "call_module"):
            copied.target = f"{holder.target}.{inner.target}"
        found.append(copied)
    results: Any = map_arg(region.graph.output_node().args[0], values.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not holder.users:
        gm.graph.erase_node(holder)
    return found
