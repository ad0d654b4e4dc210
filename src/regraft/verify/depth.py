"""Where along a graph does the error grow? The values inside, before and after the rewrites, against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from regraft.core.fx_private import codegen_of
from regraft.core.history import history, undo_steps
from regraft.verify.precise import InPrecision, in_precision, inputs_in_precision

_SAME = 64.0  # roundings between two float64 runs of one formula, one of them on weights that were rounded
_FAR = 0.05  # and never as much as this, however coarse the rounding


@dataclass(frozen=True)
class Depth:
    """One value inside the graph, and how far off it is.

    Args:
        node: The node's name.
        where: The module that it is in, or the node's own name.
        position: Its place among the values of the graph, from 0 to 1.
        reference_error: Root mean square of the difference to float64 over that of the value, before the rewrites.
        candidate_error: The same after them.
    """

    node: str
    where: str
    position: float
    reference_error: float
    candidate_error: float


def error_by_depth(
    gm: fx.GraphModule, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, points: int = 48
) -> tuple[Depth, ...]:
    """The error of the values inside a rewritten graph, and of the same values before it was rewritten.

    A node that a rewrite touched counts where it computes the same as before, which two float64 runs tell: a
    convolution with a batch norm folded into it does not.

    Args:
        gm: The graph, with its history; it is not changed.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of it.
        points: At most so many values, evenly spaced.

    Returns:
        The values in the order of the graph; none where it has none that can be compared.

    Raises:
        ReversalConflict: The graph cannot be taken back to what it was.
        Exception: Whatever the graph raises on this call.

    >>> import regraft as rg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    >>> gm = rg.FuseBiasInLinear()(rg.trace(model, (torch.randn(3, 4),)))
    >>> [depth.node for depth in error_by_depth(gm, (torch.randn(3, 4),))]
    ['_0', '_1', '_2']
    """
    inputs = (args, dict(kwargs or {}))
    original = copy.copy(gm)
    undo_steps(original, history(original))
    names = {node.name for node in gm.graph.nodes}
    shared = [node for node in original.graph.nodes if node.op.startswith("call") and node.name in names]
    exact = _values(original, inputs, {node.name for node in shared}, torch.float64)
    shared = [node for node in shared if node.name in exact]
    stride = max(1, -(-len(shared) // points))
    places = {node: place * stride / max(len(shared) - 1, 1) for place, node in enumerate(shared[::stride])}
    names = {node.name for node in places}
    before, after = _values(original, inputs, names), _values(gm, inputs, names)
    rewritten = _values(gm, inputs, names, torch.float64)
    touched = {name for step in history(gm) for site in step.applied for _, name in site.changes.nodes}
    return tuple(
        Depth(
            node.name,
            _where(node),
            place,
            _error(before[node.name], exact[node.name]),
            _error(after[node.name], exact[node.name]),
        )
        for node, place in places.items()
        if node.name in before and node.name in after
        if node.name not in touched or _alike(rewritten.get(node.name), exact[node.name], before[node.name].dtype)
    )


def _alike(value: torch.Tensor | None, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two float64 runs compute the same formula, on weights that may be rounded to `dtype`."""
    return _error(value, exact) < min(_SAME * torch.finfo(dtype).eps, _FAR)


class _Tap(fx.Interpreter):
    """Runs a graph, and keeps some of the values on the way."""

    def __init__(self, gm: fx.GraphModule, names: set[str]) -> None:
        super().__init__(gm)
        self.names = names
        self.kept: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        value = super().run_node(n)
        if n.name in self.names and isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            self.kept[n.name] = value.detach().clone()  # a later node may write into it
        return value


def _values(
    gm: fx.GraphModule,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    names: set[str],
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The values of some nodes, in the graph's own precision or in another."""
    model: Callable[..., Any] = gm if dtype is None else in_precision(gm, dtype)
    assert isinstance(model, fx.GraphModule)
    tap = _Tap(model, names)
    args, kwargs = inputs_in_precision(inputs, dtype)
    flat = _flat(model, args, kwargs)
    with torch.no_grad(), nullcontext() if dtype is None else InPrecision(dtype):
        tap.run(*flat, enable_io_processing=False)
    return tap.kept


def _flat(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The inputs of the graph; a graph of `torch.fx` itself takes what its forward takes, by name."""
    codegen: Any = codegen_of(gm.graph)
    if type(codegen).process_inputs is not fx.graph.CodeGen.process_inputs:
        return tuple(codegen.process_inputs(*args, **kwargs))
    holders = [node for node in gm.graph.nodes if node.op == "placeholder"][len(args) :]
    return (*args, *(kwargs.get(str(node.target), *node.args) for node in holders))


def _error(value: torch.Tensor | None, exact: torch.Tensor) -> float:
    if value is None or value.shape != exact.shape:
        return float("inf")
    size = float(exact.double().square().mean().sqrt())
    off = float((value.double() - exact.double()).square().mean().sqrt())
    return off / size if size else off


def _where(node: fx.Node) -> str:
    """The module that the node's source is in."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and isinstance(entry[0], str)]
    return f"{paths[-1]}.{node.name}" if paths and paths[-1] else node.name
