"""Check the arguments of a verification before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from regraft.core.expect import expect_call
from regraft.verify.run import Inputs, inputs_tree
from regraft.verify.tree import unsupported

VERIFY = "verify(reference, candidate, {})"
"""How `verify` is called, for errors."""


def check_call(model: Callable[..., Any], args: Any, kwargs: Any, call: str = VERIFY) -> Inputs:
    """The inputs of a call, checked against the model's signature.

    Args:
        model: What is called.
        args: The positional arguments.
        kwargs: The named ones.
        call: The call to correct in an error, with `{}` in the place of both.

    Raises:
        TypeError: naming the argument and showing the corrected call.

    >>> check_call(torch.nn.Linear(1, 1), torch.ones(1), None)
    Traceback (most recent call last):
    ...
    TypeError: args is a Tensor, but takes a tuple of the positional arguments: verify(reference, candidate, args=(x,))
    """
    inputs: Inputs = expect_call(args, kwargs, call)
    for name, tensor in inputs_tree(*inputs).tensors():
        why = unsupported(tensor)
        if why is not None:
            raise TypeError(f"verify compares dense tensors: {name} {why}")
    _check_signature(model, inputs, call)
    return inputs


def _check_signature(model: Callable[..., Any], inputs: Inputs, call: str) -> None:
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):
        return
    args, kwargs = inputs
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD]
        names = [n for n in names if signature.parameters[n].kind is not inspect.Parameter.VAR_POSITIONAL]
        listed = "".join(f"{name}, " for name in names).rstrip()
        shown = call.replace("{}", f"args=({listed})" if names else "args=(x,), kwargs={'mask': m}")
        raise TypeError(
            f"args and kwargs do not fit the reference, which is called as {signature}: {error}. Write {shown}"
        ) from None


def checked_extra(model: Callable[..., Any], extra: Iterable[Any]) -> list[Inputs]:
    """The caller's further inputs in one form.

    Raises:
        TypeError: naming the entry and showing the forms it may have.
    """
    if isinstance(extra, (torch.Tensor, Mapping)):
        raise TypeError("extra_inputs takes a list of inputs: extra_inputs=[(x,), {'x': x}, ((x,), {'mask': m})]")
    found = []
    for i, entry in enumerate(extra):
        pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], tuple)
        try:
            if isinstance(entry, Mapping):
                found.append(check_call(model, (), entry))
            elif pair and isinstance(entry[1], Mapping):
                found.append(check_call(model, *entry))
            else:
                found.append(check_call(model, entry, None))
        except TypeError as error:
            raise TypeError(f"extra_inputs[{i}]: {error}") from None
    return found


def described(inputs: Inputs) -> str:
    """The shapes of some inputs, for a reader.

    >>> described(((torch.ones(2, 3),), {"mask": torch.ones(2)}))
    'args[0] 2x3, mask 2'
    """
    shapes = []
    for name, tensor in inputs_tree(*inputs).tensors():
        name = name.removeprefix("kwargs['").replace("']", "", 1) if name.startswith("kwargs['") else name
        shapes.append(f"{name} {'x'.join(map(str, tensor.shape)) or 'scalar'}")
    return ", ".join(shapes[:4]) + (", ..." if len(shapes) > 4 else "")
