"""What `gm.to(...)`, `.half()` and the like do to the originals in the journal: what they would have done in `gm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from regraft.core.carry import before, digest, pristine, tensors_of
from regraft.core.journal import Journal, SiteRecord, WeightRecord
from regraft.core.vocabulary import attribute
from regraft.core.written import CHANGED
from regraft.core.written import converted as converted_writes
from regraft.core.written import intact as intact_writes
from regraft.core.written import noted_again as note_writes

Convert = Callable[[Tensor], Tensor]


@contextmanager
def converting(gm: GraphModule, function: Convert, recurse: bool = True) -> Iterator[None]:
    """While `gm` is converted, do the same to the originals in its journal, and forget what was known of its values.

    Without `recurse` only what stood in `gm` itself is converted, as by `nn.Module._apply`.

    A fold can't be made again from converted originals, so the digest of the converted weight is noted where the weight
    was still what the fold had made it. The journal's entries are written anew: a shallow copy of `gm` shares them.
    """
    kinds = [(value.dtype, value.device) for value in _own(gm)]
    if Journal.KEY not in gm.meta or not Journal.of(gm).steps:
        yield
        if kinds != [(value.dtype, value.device) for value in _own(gm)]:
            _forget_values(gm)
        return
    journal = Journal.of(gm)
    intact = {
        (s.id, record.target) for s, record, derived, sources in _derived(gm) if _intact(record, derived, sources)
    }
    written = intact_writes(gm)
    modules = list(gm.modules())
    parameters = [(module, leaf, value) for module in modules for leaf, value in module._parameters.items()]
    here = {id(value) for value in (*modules, *(value for _, _, value in parameters))}
    moved: dict[int, tuple[Any, Any]] = {}  # by id: what was there, which keeps its id from being used again, and is
    for _, site in journal.sites():
        for name, value in before(site).items():
            kept = id(value) in here or (not recurse and ("." in name or isinstance(value, nn.Module)))
            if id(value) not in moved and not kept:
                moved[id(value)] = value, _converted(value, _only_dtype(function) if site.consumed else function)
    yield
    moved |= {id(value): (value, module._parameters[leaf]) for module, leaf, value in parameters}
    journal.steps = converted_writes([step.standing_in(moved) for step in journal.steps], function, recurse)
    if kinds != [(value.dtype, value.device) for value in _own(gm)]:
        _forget_values(gm)
    note_writes(gm, written)
    for site, record, derived, _ in _derived(gm):
        if record.derivation.invert(derived.detach()) is None:
            record.digest = digest(derived) if (site.id, record.target) in intact else CHANGED


def _own(gm: GraphModule) -> list[Tensor]:
    return [*gm.parameters(), *gm.buffers()]


def _forget_values(gm: GraphModule) -> None:
    """Fake tensors of the values say dtypes and devices that no longer hold, and rules would go by them."""
    for owner in gm.modules():
        for node in owner.graph.nodes if isinstance(owner, GraphModule) else ():
            node.meta.pop("val", None)
    if Journal.KEY in gm.meta:
        journal = Journal.of(gm)
        journal.steps = [step.without_values() for step in journal.steps]


def _derived(gm: GraphModule) -> Iterator[tuple[SiteRecord, WeightRecord, Tensor, list[Tensor | None]]]:
    """Every weight that a site has made, in `gm` or in what a later site has put by, with its sources."""
    later: dict[str, Tensor] = {}
    for _, site in reversed(list(Journal.of(gm).sites())):
        held = tensors_of(before(site))
        for record in site.weights:
            derived = later.get(record.target, attribute(gm, record.target))
            if isinstance(derived, Tensor):
                sources = [held.get(n, later.get(n, attribute(gm, n))) for n in record.sources]
                yield site, record, derived, sources
        later |= held


def _intact(record: WeightRecord, derived: Tensor, sources: list[Tensor | None]) -> bool:
    present = [source for source in sources if isinstance(source, Tensor)]
    return len(present) == len(sources) and pristine(record, derived, present)


def _converted(value: Any, function: Convert) -> Any:
    """What a module, a parameter or a buffer becomes; a module stays the same object, as in `nn.Module._apply`."""
    if isinstance(value, nn.Module):
        return value._apply(function)
    if isinstance(value, nn.Parameter):
        holder = nn.Module()
        holder.register_parameter("value", value)
        return holder._apply(function)._parameters["value"]
    with torch.no_grad():
        return function(value) if isinstance(value, Tensor) else value


def _only_dtype(function: Convert) -> Convert:
    """`function` for weights that were let go: there is nothing to move, but they come back in the dtype it gives."""

    def convert(shell: Tensor) -> Tensor:
        return shell.to(function(torch.empty(0, dtype=shell.dtype)).dtype)

    return convert
