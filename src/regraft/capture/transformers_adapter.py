"""All that capture knows of transformers' insides; without transformers, or where it moved, plain export is used.

Public names of transformers are used elsewhere too. `tests/capture/test_private_apis.py` fails when these move.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from regraft.capture import torch_private


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers; it is imported by whoever made the model, never by this.

    Args:
        model: any module.
    """
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def prepare(model: nn.Module) -> None:
    """Make the containers that a model takes and returns known to pytree: its cache classes.

    Args:
        model: any module; nothing is done for one that is not of transformers.
    """
    exporter = _exporter() if is_pretrained(model) else None
    if exporter is not None:
        exporter.register_cache_pytrees_for_model(model)


def register_container(kind: type) -> None:
    """Make one class of containers known to pytree, where it is a cache of transformers that is not yet.

    Args:
        kind: the class.
    """
    if not kind.__module__.startswith("transformers.") or torch_private.is_container(kind):
        return
    exporter = _exporter()
    if exporter is not None:
        exporter.register_pytree_node(kind)


def ways(model: nn.Module) -> list[Callable[[], AbstractContextManager[Any]]]:
    """The contexts to export a model in, in the order of trying: as it is first, then with what others need.

    Args:
        model: any module.
    """
    plain: list[Callable[[], AbstractContextManager[Any]]] = [contextlib.nullcontext, _without_fast_path]
    if not is_pretrained(model):
        return plain
    return [_masks_as_run, *plain, _patched] if _exporter() is not None else [_masks_as_run, *plain]


def dress(gm: nn.Module, model: nn.Module) -> None:
    """Give a graph the attributes by which other libraries know a transformers model: its config.

    Args:
        gm: the graph module.
        model: what it was captured from.
    """
    if is_pretrained(model):
        gm.config = model.config


@contextlib.contextmanager
def _masks_as_run() -> Iterator[None]:
    """With the choice of an attention mask that the model makes when it runs, by sizes, and not the one for export.

    For export transformers writes every causal mask out, because export without symbolic sizes would fix the choice.
    The sizes are symbols here, and one of them that the choice depends on becomes a condition of the graph.
    """
    masks = sys.modules.get("transformers.masking_utils")
    was = getattr(masks, "is_torchdynamo_exporting", None)
    if masks is None or was is None:
        yield
        return
    masks.is_torchdynamo_exporting = lambda: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks.is_torchdynamo_exporting = was  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """The fused transformer encoder of torch decides by the values of its mask; the plain one does not."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """With the replacements that transformers has for the parts of its models that do not export."""
    try:
        from transformers.exporters.utils import apply_patches
    except ImportError:
        yield
        return
    with apply_patches("dynamo"):
        yield


def _exporter() -> Any:
    try:
        from transformers.exporters import exporter_dynamo
    except ImportError:
        return None
    return exporter_dynamo if hasattr(exporter_dynamo, "register_cache_pytrees_for_model") else None


def main_inputs(model: nn.Module) -> list[str]:
    """The inputs that a model is usually called with, in the order of its forward.

    Args:
        model: a transformers model.
    """
    parameters = list(inspect.signature(model.forward).parameters)
    wanted = {str(getattr(model, "main_input_name", "input_ids"))}
    if "input_ids" in wanted:
        wanted.add("attention_mask")
    if int(getattr(model.config, "type_vocab_size", 0) or 0) > 1:
        wanted.add("token_type_ids")
    if getattr(model.config, "is_encoder_decoder", False):
        wanted.add("decoder_input_ids")
    if "input_ids" in parameters and "pixel_values" in parameters:
        wanted |= {"input_ids", "attention_mask", "pixel_values"}
    return [name for name in parameters if name in wanted]
