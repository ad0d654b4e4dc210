"""Merging layers that take the same input: the name and the weights of the one that stands for all."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from regraft.core.edit import Derived, Edit
from regraft.core.errors import Refused
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.vocabulary import Call
from regraft.core.weights import Concatenate


def divide(match: Match, facts: Facts, expect: Callable[[Call, Facts], None]) -> list[Match]:
    """The groups of siblings that can be one layer each, and each sibling that fits into none, with the reason.

    Args:
        match: All the siblings.
        facts: The safety oracle.
        expect: Refuses a layer that can be merged with no other.
    """
    groups: list[list[Call]] = []
    odd: dict[Call, str] = {}
    for call in match.calls:
        try:
            expect(call, facts)
        except Refused as refusal:
            odd[call] = str(refusal)
        else:
            home = next((group for group in groups if _misfit(group[0], call, facts) is None), None)
            groups.append([call]) if home is None else home.append(call)
    merged = [group for group in groups if len(group) > 1]
    first = merged[0][0] if merged else groups[0][0] if groups else None
    for (call,) in (group for group in groups if len(group) == 1):
        if first is not None and call is not first:
            odd[call] = _misfit(first, call, facts) or ""
    if not merged:
        return [Match(match.owner, match.calls, reason="; ".join(dict.fromkeys(odd.values())))]
    sites = [Match(match.owner, tuple(group)) for group in merged]
    sites += [Match(match.owner, (call,), reason=reason) for call, reason in odd.items()]
    return sorted(sites, key=lambda site: site.call.node)


def _misfit(one: Call, other: Call, facts: Facts) -> str | None:
    """Why two layers can't be one, each of which could be merged with some other."""
    weights = [(weight.name, weight.tensor) for call in (one, other) if (weight := call.weight("weight")) is not None]
    try:
        require(
            facts.agree(weights),
            facts.same_mode((one, other)),
            facts.unchanged(one.input, one.node, other.node),
            that(weights[0][1].shape[1:] == weights[1][1].shape[1:], f"{other.where} takes inputs of another size"),
        )
    except Refused as refusal:
        return str(refusal)
    return None


def common_parent(calls: tuple[Call, ...]) -> str:
    """The innermost module that holds all the layers."""
    paths = [call.where.split(".")[:-1] for call in calls]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def take_part(edit: Edit, facts: Facts, call: Call, merged: Node, index: Any) -> None:
    """The result of `call` is a slice of the merged one; where the caller gets it, a copy, laid out as it was."""
    if facts.returned(call.node):
        edit.replace(call.node, torch.clone, edit.insert(call.node, operator.getitem, merged, index))
    else:
        edit.replace(call.node, operator.getitem, merged, index)
    edit.discard(call)


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
