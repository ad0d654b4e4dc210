"""Which axes of a call vary, where the caller leaves that open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from regraft.capture import caches
from regraft.capture.cache_names import name_in
from regraft.capture.sample_inputs import SampleMaker
from regraft.capture.sample_makers import VISUAL


def axes_of(model: nn.Module, call: Mapping[str, Any]) -> Any:
    """Which axes vary in the calls of a transformers model, as `trace` takes it.

    The sides of images do not where the config names them, since to leave those open takes minutes.

    Args:
        model: The model.
        call: A call of it, by name.
    """
    if _is_one_token(call):
        return _one_token_at_a_time(call)
    if not any(name in VISUAL for name in call) or not all(isinstance(value, Tensor) for value in call.values()):
        return "auto"
    if not SampleMaker.variants(model, list(call))[0].narrow:
        return "auto"
    axes = {name: range(1 if name in VISUAL else value.dim()) for name, value in call.items()}
    return {name: dict.fromkeys(those, Dim.AUTO) for name, those in axes.items()}


def _one_token_at_a_time(call: Mapping[str, Any]) -> dict[str, Any]:
    """Which axes vary: all but the length of what is new, since a model that sees one token needs no causal mask."""

    def varying(tensor: Tensor) -> dict[int, Any]:
        return {axis: Dim.AUTO for axis in range(tensor.dim()) if axis == 0 or tensor.shape[axis] != 1}

    shapes: dict[str, Any] = {}
    for name, value in call.items():
        if isinstance(value, Tensor):
            shapes[name] = varying(value)
        elif (state := caches.state_of(value)) is not None:
            shapes[name] = [dict.fromkeys(axes, Dim.AUTO) for axes in caches.varying_axes(state)]
        elif leaves := [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]:
            shapes[name] = [varying(leaf) for leaf in leaves]
    return shapes


def _is_one_token(call: Mapping[str, Any]) -> bool:
    if name_in(call) is None:
        return False
    tokens = call.get("decoder_input_ids", call.get("input_ids"))
    return isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] == 1
