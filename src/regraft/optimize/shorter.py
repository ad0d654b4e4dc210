"""A shorter call than the example's, to time steps with where the example's takes long.

What a step is worth hardly depends on how many rows there are, but how long it takes to find out does. Engines, and
what came of it all against the original, are timed on the example itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from regraft.verify.precise import inputs_in_precision
from regraft.verify.run import Inputs
from regraft.verify.sizes import dynamic_axes, resized

_SECONDS = 0.25
"""About so many seconds takes a shorter call; one that takes up to twice as many is short enough."""


def shorter_call(gm: fx.GraphModule, reference: Callable[..., Any], inputs: Inputs, seconds: float) -> Inputs | None:
    """The call with fewer rows, as many as take a quarter of a second; None where it is short, or has to be as it is.

    Args:
        gm: The graph.
        reference: What it was captured from.
        inputs: The call.
        seconds: How long that takes.
    """
    dynamic = dynamic_axes(gm.graph, reference, inputs) if seconds > 2 * _SECONDS else None
    if dynamic is None:
        return None
    elsewhere = {axis.expression for axis in dynamic.axes if axis.dim != 0}
    rows = {symbol: size for symbol, size in dynamic.sample.items() if symbol not in elsewhere}
    fewer = {symbol: max(1, int(size * _SECONDS / seconds)) for symbol, size in rows.items()}
    if fewer == rows:
        return None
    args, kwargs = resized(inputs, dynamic, {**dynamic.sample, **fewer}, torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            run_args, run_kwargs = inputs_in_precision((args, kwargs), None)  # which it may write to
            gm(*run_args, **run_kwargs)
    except Exception:  # whatever a graph raises that does not hold for so few
        return None
    return args, kwargs
