"""Weights that a user's own function wrote in place: their values come back with undo, unless they changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from regraft.core.carry import before, digest, tensors_of
from regraft.core.journal import Journal, SiteRecord, Step, Written
from regraft.core.reversal import Conflict
from regraft.core.states import Key
from regraft.core.vocabulary import attribute

CHANGED = "changed"
"""The digest of a weight that was no longer what a step had made it: it equals that of no tensor."""


def restored(gm: GraphModule, sites: Sequence[SiteRecord]) -> list[tuple[Tensor, Tensor]]:
    """The weights of `gm` that are to be written again when `sites` (oldest first) are undone, and their values.

    Raises:
        Conflict: where a weight is gone, or is not what the last of the sites has left.
    """
    values: dict[Key, Tensor] = {}
    for site in reversed(sites):
        for key, written in site.written.items():
            now = values.get(key, attribute(gm, _name(key)))
            if not isinstance(now, Tensor):
                raise Conflict(key, f"{_name(key)!r}, which it wrote in place, is gone")
            if digest(now) != written.digest:
                raise Conflict(key, f"{_name(key)!r}, which it wrote in place, has been changed since")
            values[key] = written.before
    return [(attribute(gm, _name(key)), value) for key, value in values.items()]


def write(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values into weights."""
    with torch.no_grad():
        for weight, value in values:
            weight.copy_(value)


def left(gm: GraphModule) -> Iterator[tuple[int, Key, Written, Tensor]]:
    """Every write into a weight, the last first: the site's id, the weight, what was noted, and what it is now."""
    later: dict[str, Tensor] = {}
    for _, site in reversed(list(Journal.of(gm).sites())):
        later |= tensors_of(before(site))
        for key, written in site.written.items():
            now = later.get(_name(key), attribute(gm, _name(key)))
            if isinstance(now, Tensor):
                yield site.id, key, written, now
            later[_name(key)] = written.before


def intact(gm: GraphModule) -> set[tuple[int, Key]]:
    """The writes whose weight is still what they left."""
    return {(number, key) for number, key, written, now in left(gm) if digest(now) == written.digest}


def converted(steps: list[Step], function: Callable[[Tensor], Tensor], recurse: bool) -> list[Step]:
    """The steps with what they keep of written weights converted too; of the graph module's own alone, or of all."""

    def convert(site: SiteRecord) -> SiteRecord:
        kept = dict(site.written)
        with torch.no_grad():
            for key, written in site.written.items():
                if recurse or not key[0]:
                    kept[key] = Written(function(written.before), written.digest)
        return replace(site, written=kept)

    return [replace(step, applied=tuple(map(convert, step.applied))) for step in steps]


def noted_again(gm: GraphModule, unharmed: set[tuple[int, Key]]) -> None:
    """After a conversion, note the digests of the weights that were intact before it."""
    sites = {site.id: site for _, site in Journal.of(gm).sites()}
    for number, key, written, now in list(left(gm)):
        sites[number].written[key] = Written(written.before, digest(now) if (number, key) in unharmed else CHANGED)


def _name(key: Key) -> str:
    return ".".join(filter(None, key))
