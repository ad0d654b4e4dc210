"""Merging layers that take the same input: the name and the weights of the one that stands for all."""

from __future__ import annotations

from regraft.core.edit import Derived
from regraft.core.vocabulary import Call
from regraft.core.weights import Concatenate


def common_parent(calls: tuple[Call, ...]) -> str:
    """The innermost module that holds all the layers."""
    paths = [call.where.split(".")[:-1] for call in calls]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def side_by_side(calls: tuple[Call, ...], name: str) -> Derived | None:
    """The layers' weights or biases, one below the other; zeros for those that are missing, None where all are."""
    given = [call.weight(name) for call in calls]
    present = [weight for weight in given if weight is not None]
    if not present:
        return None
    rows = [weight.tensor.shape[0] for call in calls if (weight := call.weight("weight")) is not None]
    parts = tuple(tuple(w.tensor.shape) if w is not None else (n,) for w, n in zip(given, rows, strict=True))
    shapes = tuple(tuple(weight.tensor.shape) for weight in present)
    return Concatenate(0, parts, tuple(weight is None for weight in given), shapes), present
