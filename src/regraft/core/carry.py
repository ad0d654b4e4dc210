"""What becomes of weights when a rewrite is taken back: the originals, or the values they have been trained to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from regraft.core.clone import clone_module
from regraft.core.errors import ReversalConflict
from regraft.core.journal import SiteRecord, WeightRecord
from regraft.core.states import Changes, Key, Slot
from regraft.core.vocabulary import attribute
from regraft.core.weights import same_bits


def carry_back(gm: GraphModule, sites: Sequence[SiteRecord]) -> dict[str, Tensor]:
    """The values of original weights that differ from those the journal holds, by qualified name.

    Args:
        gm: The graph module as it is now.
        sites: The sites that are to be undone, oldest first.

    Raises:
        ReversalConflict: where a weight has changed and its originals can't be computed from it.
    """
    carried: dict[str, Tensor] = {}
    later: dict[str, Tensor] = {}  # what stood there before the sites that are undone first
    for site in reversed(sites):
        held = tensors_of(before(site))
        for record in site.weights:
            derived = carried.pop(record.target, None)
            replaced = derived is None and record.target in later
            if derived is None:
                derived = later[record.target] if replaced else attribute(gm, record.target)
            if not isinstance(derived, Tensor):
                raise ReversalConflict(f"{record.target}, which {site.where} made, is gone")
            sources = [held[name] if name in held else attribute(gm, name) for name in record.sources]
            carried.update(_originals(site, record, derived, sources, untouched=replaced))
        later.update(held)
    return carried


def _originals(
    site: SiteRecord, record: WeightRecord, derived: Tensor, sources: Sequence[Any], untouched: bool
) -> dict[str, Tensor]:
    """The sources of one weight, where they are not what the journal, or the graph module, holds."""
    inverted = None
    if type(derived) in (Tensor, nn.Parameter):
        inverted = record.derivation.invert(derived.detach())
    if inverted is not None:
        return {
            name: value
            for name, value, source in zip(record.sources, inverted, sources, strict=True)
            if source is None or source.is_meta != value.is_meta or not same_bits(source, value)
        }
    if any(source is None or (source.is_meta and not derived.is_meta) for source in sources):
        raise ReversalConflict(
            f"the weights that {record.target} ({site.where}) was made from were let go with consume=True"
        )
    if not untouched and not pristine(record, derived, [s for s in sources if s is not None]):
        if not sources:
            raise ReversalConflict(
                f"{record.target} ({site.where}: {site.sentence}) has changed since it was put in, and its new values"
                " would be lost with it. Undo before you train or load, or keep a copy of it"
            )
        raise ReversalConflict(
            f"{record.target} ({site.where}: {site.sentence}) has changed since it was made, or the model's own"
            f" {' or '.join(_owners(record))} has, which it was made from. It is not what those make now, and can't be"
            " divided among them: undoing it would lose its values. Undo before you train, load, or change the model"
        )
    return {}


def _owners(record: WeightRecord) -> list[str]:
    """The layers that a weight was made from, and the weights without one."""
    return list(dict.fromkeys(source.rpartition(".")[0] or source for source in record.sources))


def pristine(record: WeightRecord, derived: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether a weight is still what the rewrite made it."""
    if record.digest is not None:
        return record.digest == digest(derived)
    if type(derived) not in (Tensor, nn.Parameter):
        return False
    with torch.no_grad():
        return same_bits(record.derivation.compute(*(source.detach() for source in sources)), derived.detach())


def digest(tensor: Tensor) -> str:
    """A digest of the bits of a tensor."""
    if tensor.is_meta or not tensor.numel():
        return "empty"
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def with_values(changes: Changes, carried: dict[str, Tensor]) -> dict[Key, tuple[Slot | None, Slot | None]]:
    """The slots with the carried values in the modules and tensors that come back; the caller's own are not written."""
    by_owner: dict[str, dict[str, Tensor]] = {}
    for name, value in carried.items():
        owner, _, leaf = name.rpartition(".")
        by_owner.setdefault(owner, {})[leaf] = value
    slots = dict(changes.slots)
    if not carried:
        return slots
    for (path, name), (old, new) in changes.slots.items():
        label = f"{path}.{name}" if path else name
        if old is not None and label in carried:
            slots[path, name] = (Slot(old.kind, _like(old.value, carried[label]), old.persistent), new)
        elif old is not None and label in by_owner and isinstance(old.value, nn.Module):
            module = clone_module(old.value)
            for leaf, value in by_owner[label].items():
                table: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
                table[leaf] = _like(table[leaf], value)
            slots[path, name] = (Slot(old.kind, module, old.persistent), new)
    return slots


def changed_settings(gm: GraphModule, sites: Sequence[SiteRecord]) -> dict[str, bool]:
    """What was set on replacements since they were made, by the names of the originals: training, requires_grad."""
    settings: dict[str, bool] = {}
    for site in sites:
        for name, training in site.training.items():
            replacement = attribute(gm, name)
            if isinstance(replacement, nn.Module) and replacement.training is not training:
                originals = [key for key, value in before(site).items() if isinstance(value, nn.Module)]
                settings |= dict.fromkeys(originals, replacement.training)
        for record in site.weights:
            derived = attribute(gm, record.target)
            if isinstance(derived, nn.Parameter) and derived.requires_grad is not record.requires_grad:
                settings |= dict.fromkeys(record.sources, derived.requires_grad)
    return settings


def apply_settings(gm: GraphModule, settings: dict[str, bool]) -> None:
    """Put `changed_settings` on what has come back."""
    for name, value in settings.items():
        restored = attribute(gm, name)
        if isinstance(restored, nn.Module):
            restored.train(value)
        elif isinstance(restored, nn.Parameter):
            restored.requires_grad_(value)


def before(site: SiteRecord) -> dict[str, Any]:
    """What the site replaced or removed, by qualified name."""
    slots: dict[Key, tuple[Slot | None, Slot | None]] = site.changes.slots
    return {f"{p}.{n}" if p else n: old.value for (p, n), (old, _) in slots.items() if old is not None}


def tensors_of(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among the values, and in the modules among them, by qualified name."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, nn.Module):
            inside = value.named_modules(prefix=name, remove_duplicate=False) if value._modules else ((name, value),)
            for prefix, module in inside:
                for table in (module._parameters, module._buffers):
                    found.update((f"{prefix}.{leaf}", tensor) for leaf, tensor in table.items() if tensor is not None)
    return found


def _like(old: Any, value: Tensor) -> Tensor:
    """`value` as what `old` is: a parameter as trainable as it, or a buffer."""
    fresh = value.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(fresh, old.requires_grad) if isinstance(old, nn.Parameter) else fresh
