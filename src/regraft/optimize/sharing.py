"""The weights that steps have made: two graphs of one model that were rewritten alike hold one, not two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from regraft.core.history import history
from regraft.core.journal import Journal
from regraft.core.weights import same_bits


def share_weights(first: GraphModule, second: GraphModule) -> None:
    """Let `second` use the weights that `first` has made, where it has made the same ones.

    Args:
        first: A graph module.
        second: Another one of the same model; its own copies go.
    """
    if first is second:
        return
    made = {key: tensor for key, _, _, tensor in _made(first)}
    shared: dict[int, tuple[Any, Any]] = {}
    for key, table, name, tensor in _made(second):
        other = made.get(key)
        if other is not None and other is not tensor and same_bits(other, tensor):
            table[name] = other
            shared[id(tensor)] = tensor, other
    if shared:  # what a step has put into the graph itself is taken back only where it is still there
        journal = Journal.of(second)
        journal.steps = [step.standing_in(shared) for step in journal.steps]


def weights_made(gm: GraphModule) -> Iterator[Tensor]:
    """The weights in a graph that steps have made, and so nobody else has.

    Args:
        gm: A graph module.
    """
    return (tensor for _, _, _, tensor in _made(gm))


def _made(gm: GraphModule) -> Iterator[tuple[Any, dict[str, Any], str, Tensor]]:
    """Every weight that a step made, with what it was made from, and the table that holds it."""
    for step in history(gm):
        for site in step.applied:
            for record in site.weights:
                path, _, name = record.target.rpartition(".")
                try:
                    table: dict[str, Any] = gm.get_submodule(path)._parameters
                except AttributeError:  # a later step has replaced it
                    continue
                tensor = table.get(name)
                if tensor is not None:
                    yield (record.target, record.sources, repr(record.derivation)), table, name, tensor
