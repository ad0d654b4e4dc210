"""Capture runs the model's code on stand-ins for tensors; afterwards the model is as it was."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# hooks are in ordered dictionaries: a transformers model that is asked for more outputs installs some as it runs
CONTAINERS = (list, dict, set, OrderedDict, deque)
"""What a module may collect in as it runs."""


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back, on leaving, everything that running a model can change about it: attributes, buffers, random state.

    Lists, dictionaries, sets and deques that are attributes of a module get their old contents back, one level deep.

    Args:
        model: the model.
    """
    saved = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    settings = [(config, dict(vars(config))) for config in configs.values()]
    cpu_state, python_state = torch.get_rng_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        for module, attributes, contents in saved:
            _restore(module, attributes, contents)
        for config, values in settings:
            vars(config).clear()
            vars(config).update(values)
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Put back the values of buffers, for a run on real tensors.

    Args:
        model: the model.
    """
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _configs(module: nn.Module) -> list[Any]:
    config = vars(module).get("config")
    return [config] if config is not None and hasattr(config, "__dict__") else []


def _contents(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in vars(module).items() if type(value) in CONTAINERS}


def _restore(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    current = vars(module)
    for name in [name for name in current if name not in attributes]:
        del current[name]
    current.update(attributes)
    for name, before in contents.items():
        value = current[name]
        value.clear()
        value.extend(before) if isinstance(value, (list, deque)) else value.update(before)
