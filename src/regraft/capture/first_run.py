"""A model is run once before it is exported, so that what it caches outside of itself is real.

A table that `functools.lru_cache` keeps, or a dictionary of the module that a forward stands in, would else be one of
the stand-ins that export runs a model with, and stay one at every later call of the model. What hangs on the model is
put back in any case; see `untouched`.
"""

from __future__ import annotations

import contextlib
import io

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from regraft.capture.holders import holders, values_of
from regraft.capture.signature import Call
from regraft.capture.untouched import untouched
from regraft.core.copy_before_write import CopyBeforeWrite, is_strided


def run_once(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """Run a model on its example, and leave it as it was, whatever it raises and writes.

    A model that has lazy layers, which would be made by that, or no values is not run.

    Args:
        model: the model.
        call: the example.

    Returns:
        Those of its tensors that it wrote.
    """
    held = [value for holder in holders(model) for value in values_of(holder.held) if isinstance(value, torch.Tensor)]
    if any(is_lazy(tensor) or tensor.is_meta for tensor in (*held, *call.leaves)):
        return []
    were = [
        (tensor, tensor.detach())
        for tensor in held
        if type(tensor) in (torch.Tensor, nn.Parameter) and is_strided(tensor)
    ]
    args, kwargs = call.rebuild([leaf.detach().clone() for leaf in call.leaves])
    writes = CopyBeforeWrite(held)
    with torch.inference_mode(False), torch.no_grad():  # what it caches may be computed with outside of that
        try:
            with (
                contextlib.suppress(Exception),  # whatever a model raises on its example: export is to say so
                contextlib.redirect_stderr(io.StringIO()),  # where fx writes about a failing graph
                untouched(model),
                writes,
            ):
                model(*args, **kwargs)
        finally:
            for tensor, was in were:
                if not tensor.is_set_to(was):
                    tensor.data = was
            written = writes.written()
            writes.restore()
    return written
