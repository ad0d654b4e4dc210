"""Inputs of other sizes than the sample's, for a graph whose shapes are dynamic."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from regraft.verify.run import Inputs, inputs_tree
from regraft.verify.values import drawn, is_rich

_UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Axis:
    """One axis of one input whose length is an expression in symbols."""

    leaf: str
    dim: int
    expression: Any


@dataclass(frozen=True)
class Dynamic:
    """The axes of a call's inputs that may vary, and the sample's value and the range of every symbol."""

    axes: tuple[Axis, ...]
    sample: dict[Any, int]
    ranges: dict[Any, tuple[int, int]]


def dynamic_axes(graph: fx.Graph, model: Callable[..., Any], inputs: Inputs) -> Dynamic | None:
    """Match the placeholders of a graph with the inputs of a call.

    Args:
        graph: The graph, whose placeholders hold fake tensors in `meta["val"]`.
        model: What the inputs are for; its signature names the positional ones.
        inputs: The sample.

    Returns:
        None where nothing is dynamic, or where the placeholders and the inputs do not fit together.
    """
    holders = [n for n in graph.nodes if n.op == "placeholder" and _is_tensor(n)]
    shapes = {node: tuple(node.meta["val"].shape) for node in holders}
    if not any(isinstance(size, torch.SymInt) for shape in shapes.values() for size in shape):
        return None
    tensors = dict(inputs_tree(*inputs).tensors())
    names = _argument_names(model, inputs)
    pairs = {node: names.get(node.name, names.get(str(node.target))) for node in holders}
    if any(leaf not in tensors for leaf in pairs.values()):
        if len(holders) != len(tensors):
            return None
        pairs = dict(zip(holders, tensors, strict=True))
    axes: list[Axis] = []
    sample: dict[Any, int] = {}
    ranges: dict[Any, tuple[int, int]] = {}
    for node, leaf in pairs.items():
        actual = tuple(tensors[str(leaf)].shape)
        if len(actual) != len(shapes[node]):
            return None
        for dim, size in enumerate(shapes[node]):
            if not isinstance(size, torch.SymInt):
                if size != actual[dim]:
                    return None
                continue
            expression = size.node.expr
            axes.append(Axis(str(leaf), dim, expression))
            for symbol in expression.free_symbols:
                ranges[symbol] = _range(size, symbol)
            if expression.is_Symbol and sample.setdefault(expression, actual[dim]) != actual[dim]:
                return None
    # A symbol that no axis shows by itself cannot be read off the sample: such axes keep their size.
    axes = [a for a in axes if a.expression.free_symbols and a.expression.free_symbols <= sample.keys()]
    return Dynamic(tuple(axes), sample, ranges) if axes else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _range(size: torch.SymInt, symbol: Any) -> tuple[int, int]:
    try:
        bounds = size.node.shape_env.var_to_range[symbol]
        lower, upper = bounds.lower, bounds.upper
    except (AttributeError, KeyError):
        return 1, _UNBOUNDED
    # torch takes a size to be two or more where nobody says so; of one, the graph itself tells whether it takes it
    least = int(lower) if lower.is_Integer and lower != 2 else 1
    return least, (int(upper) if upper.is_Integer else _UNBOUNDED)


def _argument_names(model: Callable[..., Any], inputs: Inputs) -> dict[str, str]:
    args, kwargs = inputs
    names = {name: f"kwargs[{name!r}]" for name in kwargs}
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):
        return names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names.update({name: f"args[{i}]" for i, name in enumerate(positional[: len(args)])})
    return names


def other_sizes(dynamic: Dynamic, few_rows: bool = False) -> list[dict[Any, int]]:
    """Sizes to try: each symbol a little larger and by a different amount, each smaller, and one where allowed.

    Inputs that agree in the sample (a batch of token ids and one of masks) go on agreeing, even where the graph would
    take each by itself: the reference may not.

    Args:
        dynamic: The axes that vary.
        few_rows: Take about a third of the rows, where there are several, for a little larger, and leave out the half:
            a call that takes seconds has as many rows as there is use for, and the other axes are larger all the same.
    """

    def bounded(symbol: Any, size: int) -> int:
        lower, upper = dynamic.ranges[symbol]
        return min(max(size, lower, 1), upper)

    symbols = sorted(dynamic.sample, key=str)
    alike = [(min(a.dim for a in dynamic.axes if a.expression == s), dynamic.sample[s]) for s in symbols]
    more = {s: 1 + sorted(set(alike)).index(key) for s, key in zip(symbols, alike, strict=True)}
    begun = {s: dynamic.sample[s] for s in symbols}
    if few_rows:
        begun |= {s: size // 3 for s, (axis, size) in zip(symbols, alike, strict=True) if axis == 0 and size > 1}
    tries = [
        {s: bounded(s, begun[s] + more[s]) for s in symbols},
        *([] if few_rows else [{s: bounded(s, dynamic.sample[s] // 2) for s in symbols}]),
        {s: bounded(s, 1) for s in symbols},
    ]
    found: list[dict[Any, int]] = []
    for sizes in tries:
        if sizes != dynamic.sample and sizes not in found:
            found.append(sizes)
    return found


def resized(inputs: Inputs, dynamic: Dynamic, sizes: dict[Any, int], generator: torch.Generator) -> Inputs:
    """The sample at other sizes.

    Integers, booleans and masks repeat the sample's own entries, the same ones in every input that shares a
    symbol, so that token ids stay valid and stay with their mask. Floating-point inputs are drawn at random from
    the sample's own values.

    Args:
        inputs: The sample.
        dynamic: Which axes vary.
        sizes: The new value of each symbol.
        generator: For the floating-point content.

    Returns:
        New inputs; the sample is not changed.
    """
    memo: dict[int, Any] = {}
    for name, tensor in inputs_tree(*inputs).tensors():
        mine = [axis for axis in dynamic.axes if axis.leaf == name]
        new = tensor.detach()
        for axis in mine:
            length = int(axis.expression.xreplace(sizes))
            index = torch.arange(length, device=new.device) % max(new.shape[axis.dim], 1)
            if new.shape[axis.dim]:
                new = new.index_select(axis.dim, index)
        if mine and is_rich(tensor):
            new = drawn(tensor, tuple(new.shape), generator)
        memo[id(tensor)] = new
    args, kwargs = copy.deepcopy(inputs, memo)
    return args, kwargs


def redrawn(
    inputs: Inputs, count: int, generator: torch.Generator, coarsest: torch.dtype | None = None
) -> Iterator[Inputs]:
    """The same inputs with other rounding errors in them: up to `count` draws.

    Floating-point inputs move by a few units in the last place. Where there are none, the entries of all inputs
    move along the last axis together.

    Args:
        inputs: The sample.
        count: How many draws.
        generator: For the numbers.
        coarsest: The dtype of the coarsest run that must round differently, where it is not that of the inputs: what
            moves a float64 input by a unit in its last place is the same input to a float32 run.
    """
    tensors = dict(inputs_tree(*inputs).tensors())
    rich = any(is_rich(tensor) for tensor in tensors.values())
    for shift in range(1, count + 1):
        memo: dict[int, Any] = {}
        for tensor in tensors.values():
            new = tensor.detach().clone()
            if rich and is_rich(tensor):
                noise = torch.rand(tuple(tensor.shape), generator=generator, dtype=torch.float64).to(tensor.device)
                wide = tensor.detach().to(torch.float64)
                unit = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, coarsest or tensor.dtype))
                new = (wide * (1 + (noise - 0.5) * 16 * unit)).to(tensor.dtype)
            elif not rich and tensor.dim():
                new = new.roll(shift, -1)
            memo[id(tensor)] = new
        args, kwargs = copy.deepcopy(inputs, memo)
        yield args, kwargs
