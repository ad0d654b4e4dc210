"""State dicts of the original model, saved from and loaded into a graph module that has been rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from regraft.core.carry import before, digest, tensors_of
from regraft.core.clone import clone_module
from regraft.core.errors import ReversalConflict
from regraft.core.expect import expect_graph
from regraft.core.graph_module import GraphModule as OwnGraphModule
from regraft.core.history import with_original_slots
from regraft.core.journal import Journal, SiteRecord, Step, WeightRecord
from regraft.core.states import TABLES, Changes, Slot
from regraft.core.vocabulary import attribute
from regraft.core.weights import Unknown, same_bits


def original_state_dict(gm: GraphModule) -> dict[str, Any]:
    """The state dict that the original model would have: its names, its order, its layout, today's values.

    Where a merged or fused weight has been trained, its values are divided among the weights it was made from.

    Args:
        gm: The graph module, rewritten or not; it is not changed.

    Raises:
        ReversalConflict: where a fold's weight, or one that your own transformation put in, has been trained, or the
            originals were let go with `consume=True`, so that the original weights cannot be had.

    Example:
        >>> import torch, regraft as rg
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> gm = rg.FuseBiasInLinear()(rg.symbolic_trace(model))
        >>> list(gm.state_dict()), list(rg.original_state_dict(gm))
        (['0.weight'], ['0.weight', '0.bias'])
    """
    expect_graph(gm, "original_state_dict", "regraft.original_state_dict({})")
    state: dict[str, Any] = with_original_slots(gm, carry=True).state_dict()
    return state


def load_original_state_dict(gm: GraphModule, state_dict: Mapping[str, Any]) -> GraphModule:
    """Load a checkpoint of the original model into a graph module, through every rewrite that stands in it.

    All weights become new tensors: the model that `gm` was captured from, and shallow copies of `gm`, keep theirs. So
    make optimizers afterwards. Undo works as before, and gives back the loaded values.

    Args:
        gm: The graph module, which is changed in place.
        state_dict: What `model.state_dict()` or `original_state_dict(gm)` returned.

    Raises:
        RuntimeError: naming every missing and unexpected key and every wrong shape, as `nn.Module.load_state_dict`
            does, and every tied weight with two values. Nothing has been loaded then.
        ReversalConflict: where a step made weights in a way that it did not record. Nothing has been loaded then.

    Example:
        >>> import torch, regraft as rg
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> gm = rg.FuseBatchNorm2dInConv2d()(rg.symbolic_trace(model))
        >>> checkpoint = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        >>> gm = rg.load_original_state_dict(gm, checkpoint)
        >>> gm.get_submodule("0").weight.flatten()[0]
        tensor(1.0000, grad_fn=<SelectBackward0>)
    """
    expect_graph(gm, "load_original_state_dict", "regraft.load_original_state_dict({}, state_dict)")
    original = with_original_slots(gm, carry=False)
    fresh = _Replacement(_fresh_tensors(gm, original))
    trial = fresh.module(original)
    trial.load_state_dict(state_dict, strict=True)
    _expect_one_value_each(trial, state_dict)

    steps, tensors = _derived_again(gm, fresh.tensors)
    shells = {id(value) for _, site in Journal.of(gm).sites() for value in _tensors(site) if value.is_meta}
    loaded = _Replacement({key: new for key, new in tensors.items() if key not in shells or new.is_meta})
    _expect_recorded(gm, loaded)
    steps = [replace(step, applied=tuple(map(loaded.site, step.applied))) for step in steps]
    tables = loaded.tables(gm)
    gm.__dict__.update(tables)
    Journal.of(gm).steps = steps
    return gm


@dataclass
class _Replacement:
    """Takes modules and journal entries over with other tensors in them; what holds none of those stays itself.

    Args:
        tensors: The new tensor, by the `id` of the old one.
    """

    tensors: dict[int, Tensor]
    modules: dict[int, nn.Module] = field(default_factory=dict)

    def module(self, old: nn.Module) -> nn.Module:
        """The module with the new tensors in it: another object, unless it is the same through and through."""
        if id(old) in self.modules:
            return self.modules[id(old)]
        tables = self.tables(old)
        new = old
        if any(tables[kind][name] is not value for kind in TABLES for name, value in vars(old)[kind].items()):
            new = OwnGraphModule.__copy__(old) if isinstance(old, GraphModule) else clone_module(old)  # type: ignore[arg-type]
            new.__dict__.update(tables)
        self.modules[id(old)] = new
        return new

    def tables(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """The tables of a module, with the new tensors and children."""
        return {kind: {name: self.value(value) for name, value in vars(module)[kind].items()} for kind in TABLES}

    def value(self, old: Any) -> Any:
        """What stands in the place of a tensor or a module."""
        return self.module(old) if isinstance(old, nn.Module) else self.tensors.get(id(old), old)

    def site(self, site: SiteRecord) -> SiteRecord:
        """A site's entry in the journal; shallow copies of the graph module share the old one."""
        slots = {key: (self._slot(old), self._slot(new)) for key, (old, new) in site.changes.slots.items()}
        return replace(site, changes=Changes(site.changes.nodes, slots, site.changes.anchors))

    def _slot(self, slot: Slot | None) -> Slot | None:
        return slot and replace(slot, value=self.value(slot.value))


def _fresh_tensors(gm: GraphModule, original: nn.Module) -> dict[int, Tensor]:
    """For each tensor that the original's state dict holds, one of its own to load into, by `id`."""
    here = next((p.device for p in gm.parameters() if not p.is_meta), None)
    made: dict[int, Tensor] = {}
    for module in original.modules():
        names = [*module._parameters, *(name for name in module._buffers if _saved(module, name))]
        for name in names:
            old = module._parameters.get(name, module._buffers.get(name))
            if old is not None and id(old) not in made:
                made[id(old)] = _like(old, _empty_or_copy(old, here))
    return made


def _empty_or_copy(old: Tensor, here: torch.device | None) -> Tensor:
    """A copy in the same layout; where the original was let go, room for it beside the rewritten weights."""
    return torch.empty_like(old, device=here) if old.is_meta and here is not None else old.detach().clone()


def _saved(module: nn.Module, buffer: str) -> bool:
    return buffer not in module._non_persistent_buffers_set


def _like(old: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value


def _expect_one_value_each(trial: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Names that are tied have been given one value."""
    names: dict[int, list[str]] = {}
    for name, tensor in trial.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and name in state_dict:
            names.setdefault(id(tensor), []).append(name)
    torn = [
        f"{first} and {name} are one tensor, and the state dict has two values for it"
        for first, *others in names.values()
        for name in others
        if not same_bits(state_dict[first], state_dict[name])
    ]
    if torn:
        raise RuntimeError("Error(s) in loading state_dict:\n\t" + "\n\t".join(torn))


def _derived_again(gm: GraphModule, loaded: dict[int, Tensor]) -> tuple[list[Step], dict[int, Tensor]]:
    """The steps and all new tensors, by the `id` of the old: those that are loaded, and those made from them."""
    tensors = dict(loaded)
    records: dict[int, list[WeightRecord]] = {}
    for site, record, derived, sources in reversed(list(_made(gm))):
        if isinstance(record.derivation, Unknown):
            records.setdefault(site.id, []).insert(0, record)
            continue
        with torch.inference_mode(False), torch.no_grad():
            value = record.derivation.compute(*(tensors.get(id(source), source).detach() for source in sources))
            value = value.to(derived.dtype) if derived.is_meta else value.to(derived)
        tensors[id(derived)] = _like(derived, value)
        now = digest(value) if record.digest is not None else None
        records.setdefault(site.id, []).insert(0, replace(record, digest=now))
    steps = []
    for step in Journal.of(gm).steps:
        applied = tuple(replace(site, weights=records.get(site.id, site.weights)) for site in step.applied)
        steps.append(replace(step, applied=applied))
    return steps, tensors


def _made(gm: GraphModule) -> Iterator[tuple[SiteRecord, WeightRecord, Tensor, list[Tensor]]]:
    """Every weight that a site made, the last one first, as it stands in `gm` or in the journal, with its sources."""
    later: dict[str, Tensor] = {}
    for _, site in reversed(list(Journal.of(gm).sites())):
        held = tensors_of(before(site))
        for record in reversed(site.weights):
            derived = later.get(record.target, attribute(gm, record.target))
            sources = [held.get(name, later.get(name, attribute(gm, name))) for name in record.sources]
            if not isinstance(derived, Tensor) or not all(isinstance(source, Tensor) for source in sources):
                raise ReversalConflict(f"{record.target}, which {site.where} made, or what it was made from, is gone")
            yield site, record, derived, sources
        later |= held


def _tensors(site: SiteRecord) -> Iterator[Tensor]:
    return iter(tensors_of(before(site)).values())


def _expect_recorded(gm: GraphModule, loaded: _Replacement) -> None:
    """Every weight in `gm` that a step made has been made again."""
    unknown = {
        id(value): name for name, value in gm.state_dict(keep_vars=True).items() if id(value) not in loaded.tensors
    }
    for step, site in Journal.of(gm).sites():
        after = {
            ".".join(filter(None, key)): new.value for key, (_, new) in site.changes.slots.items() if new is not None
        }
        for tensor in tensors_of(after).values():
            if id(tensor) in unknown:
                raise ReversalConflict(
                    f"{unknown[id(tensor)]} was made by {step}, which does not say how; undo that step before loading"
                )
