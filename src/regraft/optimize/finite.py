"""Which arguments have to be finite, since a kernel would make a number of a NaN.

torch's ReLU of NaN is NaN. That of oneDNN, alone or at the end of a convolution or a linear layer, is 0, as is what it
cuts off by limits: a result that says that an input was broken would become one that says nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regraft.dropin import Entry
from regraft.optimize.graphs import Graph
from regraft.verify.tree import tree_of


def must_be_finite(graph: Graph, entry: Entry) -> dict[str, bool]:
    """The arguments of which a NaN reaches the original's result and not that of the graph, or of its engine.

    Both are tried: an engine of one size leaves other sizes to the graph, whose kernels are not the engine's.
    Tensors in lists, dictionaries and caches are not looked at.

    Args:
        graph: The graph.
        entry: What runs it.

    Returns:
        For each whether infinities are to be looked for as well: not where the example has some, as masks do.
    """
    found: dict[str, bool] = {}
    reader = graph.reader
    if reader is None or graph.cache is not None:
        return found
    for name, value in graph.call.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            spoiled = {**graph.call, name: torch.full_like(value, torch.nan)}
            args, kwargs = reader.apart(spoiled)
            expected = _nans(graph.reference, *args, **kwargs)
            runs = [_nans(entry.run, spoiled)]
            if entry.engine is not None:
                runs.append(_nans(entry.gm.forward, **spoiled))
            if not all(_alike(each, expected) for each in runs):
                found[name] = bool(value.isfinite().all())
    return found


def _alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _nans(run: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Where the tensors of a result have one; nothing of a model that refuses what is broken."""
    try:
        with torch.no_grad():
            return {name: value.isnan() for name, value in tree_of(run(*args, **kwargs)).tensors()}
    except Exception:  # whatever a model raises
        return {}
