"""What a forward leaves for others to read: on its model an attention map, say, and what it puts into a dictionary.

A graph computes results alone. Such values are made further results of it, which its drop-in leaves where the model
does. Buffers that a model makes when it is first called, as ConViT its table of distances, its drop-in has from the
start.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regraft.capture.own_state import (
    Attribute,
    changed_meanwhile,
    set_attribute,
    set_meanwhile,
    spelled,
    used_meanwhile,
)
from regraft.capture.torch_private import made_by_hooks
from regraft.capture.transformers_adapter import is_pretrained
from regraft.capture.untouched import untouched, values_kept
from regraft.dropin import Reader
from regraft.dropin.contents import Contents, Given, with_own_containers
from regraft.dropin.model import KEY
from regraft.optimize.presets import LARGE
from regraft.verify.precise import inputs_in_precision
from regraft.verify.run import Inputs
from regraft.verify.tree import unsupported
from regraft.verify.values import revalued

logger = logging.getLogger("regraft")

_CONSTANTS = (bool, int, float, str, type(None))
_NAMED = 8
"""So many attributes are named in a sentence."""


class SideEffects(NamedTuple):
    """What calls leave behind.

    Args:
        sets: The attributes that each call sets before it reads them, whatever they were, and whether each is a
            `torch.Size`.
        others: The names of what else changes from one call to the next, which no graph can do.
        made: The buffers that the first call puts in the place of others, whatever the values of its inputs, and that
            later ones leave.
        contents: What each call puts into the lists and dictionaries that it is given.
    """

    sets: dict[Attribute, bool]
    others: list[str]
    made: dict[Attribute, Tensor]
    contents: Contents = Contents()


def side_effects(model: nn.Module, inputs: Inputs) -> SideEffects:
    """What calls leave behind: nothing, of a model that cannot be called, or has no memory for its weights.

    Args:
        model: The model, which is as it was afterwards.
        inputs: A call of it.
    """
    try:
        if not is_pretrained(model):
            return _found(model, inputs)
        # what a model of transformers sets on itself it reads itself
        given = bool(Given(Reader(model).read(*inputs)))
        return SideEffects({}, [], {}, _contents(model, inputs) if given else Contents())
    except Exception:  # whatever a model raises; its capture says what is wrong
        return SideEffects({}, [], {})


def _contents(model: nn.Module, inputs: Inputs) -> Contents:
    with torch.no_grad(), untouched(model), values_kept(_weights(model)):
        return _call(model, inputs)


def _found(model: nn.Module, inputs: Inputs) -> SideEffects:
    with torch.no_grad(), untouched(model), values_kept(_weights(model)):
        with set_meanwhile(model) as assigned, changed_meanwhile(model) as first:
            contents = _call(model, inputs)
        own = _made_by_hooks(model)
        assigned -= own
        if not assigned and not first - set(map(spelled, own)):
            return SideEffects({}, [], {}, contents)
        # once more: what is made on the first call, and kept, is there now
        with used_meanwhile(model, assigned) as used, changed_meanwhile(model) as changed:
            _call(model, inputs)
        values = {each: _value(model, each) for each in sorted(used) if used[each] == "set" and _can_return(model)}
        made = {each: _value(model, each) for each in _buffers(model) if spelled(each) in first - changed}
    sets = {each: isinstance(value, torch.Size) for each, value in values.items() if _is_returnable(value)}
    known = {spelled(each) for each in {*sets, *own}} | {each for each in changed if each.rpartition(".")[2] == KEY}
    return SideEffects(sets, sorted(changed - known), _made_of_no_value(model, inputs, made) if made else {}, contents)


def _made_by_hooks(model: nn.Module) -> set[Attribute]:
    """The weights that weight norm and the like make for the call of their layer, which alone reads them."""
    return {(path, name) for path, module in model.named_modules() for name in made_by_hooks(module)}


def _buffers(model: nn.Module) -> Iterator[Attribute]:
    return ((path, name) for path, module in model.named_modules() for name in module._buffers)


def _made_of_no_value(model: nn.Module, inputs: Inputs, made: dict[Attribute, Tensor]) -> dict[Attribute, Tensor]:
    """Those buffers that a first call with other values makes, too."""
    others = revalued(inputs, torch.Generator().manual_seed(0))
    if others is None:
        return {}
    with torch.no_grad(), untouched(model), values_kept(_weights(model)):
        try:
            _call(model, others)
        except Exception:  # whatever a model raises that does not take them
            return {}
        return {each: buffer for each, buffer in made.items() if _is_same(_value(model, each), buffer)}


def _is_same(other: Any, buffer: Any) -> bool:
    if not (isinstance(other, Tensor) and isinstance(buffer, Tensor)) or unsupported(buffer) or buffer.is_inference():
        return False
    return other.dtype == buffer.dtype and other.device == buffer.device and torch.equal(other, buffer)


def remarks(found: SideEffects) -> Iterator[str]:
    """What to say of what a model leaves behind.

    Args:
        found: That.
    """
    if found.made:
        yield f"the model makes {_some(found.made)} when it is first called: the drop-in has that from the start"
    if found.sets:
        yield f"the model sets {_some(found.sets)} as it runs: the graph returns that too, the drop-in sets it"
    if found.contents.filled:
        changed = _listed(list(found.contents.names))
        yield f"the model changes {changed} of what it is given: the graph returns that too, the drop-in puts it there"
    if found.others:
        lost = (
            f"the model changes {_listed(found.others)} from one call to the next, which no graph does: "
            "where one runs, that stays as it was"
        )
        logger.warning("%s", lost)
        yield lost


def _some(attributes: Iterable[Attribute]) -> str:
    return _listed([spelled(each) for each in attributes])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def having(made: dict[Attribute, Tensor], model: nn.Module) -> nn.Module:
    """A model with the buffers that its first call makes; it is changed.

    Args:
        made: The buffers.
        model: The model.
    """
    for attribute, buffer in made.items():
        set_attribute(model, attribute, buffer)
    return model


def returning(model: nn.Module, attributes: Collection[Attribute], contents: Contents) -> nn.Module:
    """A model whose forward returns what it leaves behind as well: a pair of its result and a list of values.

    What it is given is left as it was.

    Args:
        model: The model; the other one has its layers and weights.
        attributes: What is set.
        contents: What is put into what it is given.
    """
    base, reader = type(model), Reader(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        args, kwargs = with_own_containers((args, kwargs)) if contents.filled else (args, kwargs)
        given = Given(reader.read(args, kwargs))
        return with_values(self, attributes, contents, given, base.forward(self, *args, **kwargs))

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "forward": functools.wraps(base.forward)(forward),
    }
    make_class: Any = type(base)
    other = copy.copy(model)
    other.__class__ = make_class(base.__name__, (base,), namespace)
    return other


def with_values(
    model: nn.Module, attributes: Collection[Attribute], contents: Contents, given: Given, result: Any
) -> tuple[Any, list[Any]]:
    """The pair that the forward of `returning` returns.

    Args:
        model: The model, which has been called.
        attributes: What it sets.
        contents: What it puts into what it is given.
        given: That, looked at before the call.
        result: Its result.
    """
    values = [_value(model, attribute) for attribute in attributes]
    values = [tuple(value) if isinstance(value, torch.Size) else value for value in values]
    return result, [*values, *contents.values(given)]


def _weights(model: nn.Module) -> list[Tensor]:
    """What a call may write to: buffers, and parameters, unless those are much to copy for what hardly a model does."""
    parameters = list(model.parameters())
    return [*model.buffers(), *(parameters if sum(p.nbytes for p in parameters) <= LARGE else [])]


def _call(model: nn.Module, inputs: Inputs) -> Contents:
    """What a call makes of the containers that it is given."""
    args, kwargs = inputs_in_precision(inputs, None)
    given = Given(Reader(model).read(args, kwargs))
    return given.contents(model(*args, **kwargs))


def _value(model: nn.Module, attribute: Attribute) -> Any:
    path, name = attribute
    return getattr(model.get_submodule(path), name)


def _is_returnable(value: Any) -> bool:
    return isinstance(value, torch.Size) or all(map(_is_leaf, pytree.tree_leaves(value)))


def _is_leaf(value: Any) -> bool:
    return unsupported(value) is None if isinstance(value, Tensor) else isinstance(value, _CONSTANTS)


def _can_return(model: nn.Module) -> bool:
    """Whether a call of a model gives what the forward of its class does."""
    return type(model).__call__ is nn.Module.__call__ and "forward" not in vars(model) and not model._forward_hooks
