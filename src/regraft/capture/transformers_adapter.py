"""All that capture knows of transformers' insides; without transformers, or where it moved, plain export is used.

Public names of transformers are used elsewhere too. `tests/capture/test_private_apis.py` fails when these move.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from regraft.capture import linear_states, torch_private


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers; its module is imported by whoever made the model, never by this.

    Args:
        model: any module.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def generating_within(model: nn.Module) -> str | None:
    """Where in another model, such as those of peft, the transformers model is that its `generate` calls.

    Args:
        model: any module.

    Returns:
        None where the model is one of transformers, or generates nothing.
    """
    if is_pretrained(model) or not callable(getattr(model, "generate", None)):
        return None
    within = ((path, module) for path, module in model.named_modules() if is_pretrained(module))
    return next((path for path, module in within if module.can_generate()), None)


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


_OF_OUTPUTS = ("__new__", "__post_init__", "__setattr__", "__setitem__")


def output_maker(spec: Any) -> torch_private.Maker | None:
    """What makes the same as the class of a model's output does, which asks all of its fields for the sake of each.

    A call of an engine ends with it, when the caches are full of the network. It was tried once beside the class.

    Args:
        spec: the structure of an output.

    Returns:
        None where the class is none of transformers' or does something of its own.
    """
    kind: Any = torch_private.spec_type(spec)
    base = getattr(getattr(sys.modules.get("transformers"), "utils", None), "ModelOutput", None)
    if base is None or not issubclass(kind, base):
        return None
    names, fields = torch_private.spec_context(spec), getattr(kind, "__dataclass_fields__", None)
    # a container that is the only value may be taken for names and values
    plain = len(names) > 1 or all(map(torch_private.is_leaf, torch_private.spec_children(spec)))
    if fields is None or not plain or any(getattr(kind, name) is not getattr(base, name) for name in _OF_OUTPUTS):
        return None

    def make(values: Sequence[Any]) -> Any:
        made = kind.__new__(kind)
        attributes = vars(made)
        attributes.update(dict.fromkeys(fields))
        for name, value in zip(names, values):
            attributes[name] = value
            OrderedDict.__setitem__(made, name, value)
        return made

    sample = [torch.zeros(()) for _ in names]
    try:
        usual = kind(**dict(zip(names, sample)))
    except Exception:  # whatever a class raises that does not take them
        return None
    return make if _identities(usual) == _identities(make(sample)) else None


def _identities(output: Any) -> tuple[list[tuple[str, int]], dict[str, int]]:
    items = [(name, id(value)) for name, value in output.items()]
    return items, {name: id(value) for name, value in vars(output).items()}


_CAPTURING = "transformers.utils.output_capturing"


def is_collector(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one that transformers puts on layers once it is asked for their results, and that then stays.

    It does nothing but while a model collects.

    Args:
        hook: the hook.
    """
    return getattr(hook, "__module__", None) == _CAPTURING


def collects(traced: bool = False) -> bool:
    """Whether a transformers model is running that wants the results of layers inside: hidden states, attentions.

    Args:
        traced: whether a compiler traces this.
    """
    capturing = sys.modules.get(_CAPTURING)
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        return False
    # a compiler cannot trace what a context holds, so there transformers keeps it beside
    return bool(getattr(collector, "global_var", None) if traced else collector.get())


def ways(model: nn.Module) -> list[Callable[[], AbstractContextManager[Any]]]:
    """The contexts to export a model in, in the order of trying: as it is first, then with what others need.

    Args:
        model: any module.
    """
    plain: list[Callable[[], AbstractContextManager[Any]]] = [contextlib.nullcontext, _whatever_the_mask]
    if not is_pretrained(model):
        return plain
    known = [lambda: _as_run(model), *plain, *([_patched] if _exporter() is not None else [])]
    return [functools.partial(_with_states_assigned, way) for way in known]


def dress(gm: nn.Module, model: nn.Module) -> None:
    """Give a graph the attributes by which other libraries know a transformers model: its config.

    Args:
        gm: the graph module.
        model: what it was captured from.
    """
    if is_pretrained(model):
        gm.config = model.config


@contextlib.contextmanager
def _with_states_assigned(way: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with linear_states.assigned(sys.modules.get("transformers.cache_utils")), way():
        yield


@contextlib.contextmanager
def _as_run(model: nn.Module) -> Iterator[None]:
    """With the form of attention that the model chooses when it runs, by sizes, and not the one for export.

    For export transformers writes every causal mask out, because export without symbolic sizes would fix the choice,
    and for one new token repeats keys and values that several heads share. The sizes are symbols here, and one of them
    that the choice depends on becomes a condition of the graph.

    A mask that is not causal alone, as Gemma 3's for images, is made number by number with `torch.vmap`, which has no
    form in a graph; made from the same numbers along four axes it is the same mask.

    For export linear attention solves its triangular systems row by row: thousands of nodes where the model runs one.
    A state space model scans token by token as it runs and for export, and by an operator of higher order where it is
    compiled: it is left believing that it is exported.

    Args:
        model: a transformers model.
    """
    instead: dict[str, dict[str, Any]] = {
        "transformers.masking_utils": {
            "is_torchdynamo_exporting": _no,
            "_vmap_expansion_sdpa": _along_axes,
            "TransformGetItemToIndex": contextlib.nullcontext,  # what vmap needs, and has no form in a graph either
        },
        "transformers.integrations.sdpa_attention": {"is_torchdynamo_compiling": _no},
    }
    for name in {type(part).__module__ for part in model.modules()}:
        if not hasattr(sys.modules.get(name), "mamba_selective_scan"):
            instead[name] = {"is_torchdynamo_exporting": _no}
    changed = [
        (vars(sys.modules[module]), name, other)
        for module, names in instead.items()
        for name, other in names.items()
        if hasattr(sys.modules.get(module), name)
    ]
    was = [(place, name, place[name]) for place, name, _ in changed]
    for place, name, other in changed:
        place[name] = other
    try:
        yield
    finally:
        for place, name, function in was:
            place[name] = function


def _no() -> bool:
    return False


def _along_axes(mask: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of the numbers of a text, head, query and key, as one of the vectors of all of them."""

    def masks(*numbers: torch.Tensor) -> torch.Tensor:
        apart = torch.meshgrid(*numbers, indexing="ij")
        return mask(*apart).expand(apart[0].shape)

    return masks


@contextlib.contextmanager
def _whatever_the_mask() -> Iterator[None]:
    """The fused transformer encoder of torch decides by the values of its mask; the plain one need not."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch_private.causal_as_told():
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


def decoder_config(model: nn.Module) -> Any:
    """The part of a model's config that is about the text it writes; the whole where there are no parts, or several.

    Args:
        model: a transformers model.
    """
    try:
        return model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    except (AttributeError, ValueError):
        return model.config


def main_inputs(model: nn.Module) -> list[str]:
    """The inputs that a model is usually called with, or without which it cannot be, in the order of its forward.

    Args:
        model: a transformers model.
    """
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = {name for name, each in parameters.items() if each.default is each.empty and each.kind in kinds}
    wanted.add(str(getattr(model, "main_input_name", "input_ids")))
    if "input_ids" in wanted:
        wanted.add("attention_mask")
    if int(getattr(model.config, "type_vocab_size", 0) or 0) > 1:
        wanted.add("token_type_ids")
    if getattr(model.config, "is_encoder_decoder", False):
        wanted.add("decoder_input_ids")
    if "input_ids" in parameters and "pixel_values" in parameters:
        wanted |= {"input_ids", "attention_mask", "pixel_values"}
    return [name for name in parameters if name in wanted]
