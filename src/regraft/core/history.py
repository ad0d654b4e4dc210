"""What was done to a graph module, and taking any of it back: `history`, `undo`, `forget`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from regraft.core.carry import apply_settings, carry_back, changed_settings, with_values
from regraft.core.errors import ReversalConflict
from regraft.core.expect import expect_graph
from regraft.core.journal import Journal, SiteRecord, Step
from regraft.core.modules import graph_modules
from regraft.core.reversal import Conflict, Reversal
from regraft.core.snapshot import Snapshot
from regraft.core.states import Changes
from regraft.core.written import restored, write

logger = logging.getLogger("regraft")

_Pair = tuple[Step, SiteRecord]


def history(gm: GraphModule) -> tuple[Step, ...]:
    """The steps that stand in `gm`, oldest first: what was applied where, what was refused and why, the time taken.

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.symbolic_trace(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval())
        >>> gm = rg.FuseBatchNorm2dInConv2d()(gm)
        >>> [(step.id, step.transformation, len(step.applied)) for step in rg.history(gm)]
        [(1, 'FuseBatchNorm2dInConv2d', 1)]
    """
    expect_graph(gm, "history", "regraft.history({})")
    return tuple(Journal.of(gm).steps) if Journal.KEY in gm.meta else ()


def undo(gm: GraphModule, step: Step | int | str | None = None, *, site: str | int | None = None) -> GraphModule:
    """Take back the last step, a named step, or one site; in any order.

    Args:
        gm: The graph module, which is changed in place.
        step: A `Step` of `history(gm)`, its `id`, or the name of a transformation (its last step). The last step of all
            where neither `step` nor `site` is given.
        site: The place of a site (`"encoder.layer.3.attention.self"`, or a module that holds it), or its id. Only what
            was done there is taken back.

    Raises:
        ReversalConflict: if something made later stands on it, or weights would be lost; nothing is changed then.
        ValueError: if there is no such step or site; the message lists those there are.

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.symbolic_trace(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval())
        >>> code = gm.code
        >>> rg.undo(rg.FuseBatchNorm2dInConv2d()(gm)).code == code
        True
    """
    expect_graph(gm, "undo", "regraft.undo({})")
    steps = list(history(gm))
    if step is not None:
        steps = [_find_step(steps, step)]
    elif site is None:
        if not steps:
            raise ValueError("there is nothing to undo: history(gm) is empty")
        steps = steps[-1:]
    if site is None:
        undo_steps(gm, steps)
        return gm
    pairs = [(s, record) for s in steps for record in s.applied if _is_at(record, site)]
    if not pairs:
        known = sorted({record.where for s in steps for record in s.applied})
        raise ValueError(f"nothing was applied at {site!r}; undo(gm, site=...) takes one of {known}")
    undo_sites(gm, pairs)
    return gm


def forget(gm: GraphModule) -> GraphModule:
    """Drop the history and with it the original weights, for deployment. Nothing can be undone afterwards."""
    expect_graph(gm, "forget", "regraft.forget({})")
    gm.meta.pop(Journal.KEY, None)
    return gm


def undo_steps(gm: GraphModule, steps: Sequence[Step], compile_code: bool = True) -> None:
    """Take back whole steps; the steps leave the history even where no site of theirs stands."""
    undo_sites(gm, [(step, site) for step in steps for site in step.applied], compile_code)
    withdraw(gm, steps)


def withdraw(gm: GraphModule, steps: Sequence[Step]) -> None:
    """Take steps out of the history."""
    gone = {step.id for step in steps}
    journal = Journal.of(gm)
    journal.steps = [step for step in journal.steps if step.id not in gone]


def undo_sites(gm: GraphModule, pairs: Sequence[_Pair], compile_code: bool = True) -> None:
    """Take sites back, all or none."""
    journal = Journal.of(gm)
    pairs = sorted(pairs, key=lambda pair: pair[1].id)
    sites = [site for _, site in pairs]
    settings = changed_settings(gm, sites)
    before = Snapshot(gm, Changes.net(site.changes for site in sites))
    stand_ins: dict[int, tuple[Any, Any]] = {}
    try:
        for group in _groups(journal, pairs):
            _take_back(gm, journal, group, stand_ins)
        overwritten = restored(gm, sites)
        if compile_code:
            lint_and_recompile(gm)
    except BaseException as error:
        before.restore()
        if isinstance(error, (Conflict, RuntimeError)):
            raise _conflict(journal, pairs, error) from error
        raise
    write(overwritten)
    apply_settings(gm, settings)
    ids = {site.id for site in sites}
    touched = {step.id for step, _ in pairs}
    trimmed = [step.without(ids).standing_in(stand_ins) for step in journal.steps]
    journal.steps = [step for step in trimmed if step.applied or step.id not in touched]
    journal.settle(gm)


def _take_back(
    gm: GraphModule, journal: Journal, group: Sequence[_Pair], stand_ins: dict[int, tuple[Any, Any]]
) -> None:
    """Take a group of sites back at once.

    What carried values are put into is another object than the journal's: `stand_ins` tells the older sites.
    """
    sites = [site.standing_in(stand_ins) if stand_ins else site for _, site in group]
    held = Changes.net(site.changes for site in sites)
    reversal = Reversal(gm, held, journal.orders, {step.signature for step, _ in group})
    reversal.slots = with_values(held, carry_back(gm, sites))  # after the conflicts of the graph
    reversal.apply()
    for key, (slot, _) in reversal.slots.items():
        was = held.slots[key][0]
        if was is not None and slot is not None and slot.value is not was.value:
            stand_ins[id(was.value)] = was.value, slot.value


def with_original_slots(gm: GraphModule, carry: bool) -> GraphModule:
    """A shallow copy of `gm` that holds the modules and weights from before the first step; its graph is left as it is.

    Args:
        gm: The graph module, which is not changed.
        carry: Give it the values that the weights have been trained to; else those that the journal holds.

    Raises:
        ReversalConflict: if a slot has been changed by something else since, or, with `carry`, if values would be lost.
    """
    original = copy.copy(gm)
    journal = Journal.of(original)
    journal.settle(original)
    pairs = list(journal.sites())
    sites = [site for _, site in pairs]
    slots = Changes(slots=Changes.net(site.changes for site in sites).slots)
    try:
        reversal = Reversal(original, slots, journal.orders, set())
        reversal.slots = with_values(slots, carry_back(gm, sites) if carry else {})  # after the conflicts of the graph
        reversal.apply()
    except Conflict as error:
        raise _conflict(journal, pairs, error) from error
    return original


def lint(gm: GraphModule) -> None:
    """Check the graphs of `gm`, nested ones too."""
    for module in graph_modules(gm).values():
        module.graph.lint()


def lint_and_recompile(gm: GraphModule) -> None:
    """Check the graphs of `gm`, nested ones too, and compile their code."""
    lint(gm)
    for module in graph_modules(gm).values():
        module.recompile()


def log_step(step: Step) -> None:
    """One INFO line per site, and a warning where nothing was rewritten."""
    for site in step.applied:
        logger.info("%s (%s)", site.sentence, site.where)
    for refusal in step.refused:
        logger.debug("%s refused (%s): %s", step.transformation, refusal.where, refusal.reason)
    if not step.applied:
        reason = (
            f"{len(step.refused)} candidates refused; see explain(gm)" if step.refused else "no candidate was found"
        )
        logger.warning("%s rewrote nothing: %s", step.transformation, reason)


def _groups(journal: Journal, pairs: Sequence[_Pair]) -> list[list[_Pair]]:
    """The sites in the groups that can be taken back at once, newest first.

    All at once, unless a site that stays has touched the same thing in between; then one by one.
    """
    chosen = {site.id for _, site in pairs}
    seen: dict[Any, bool] = {}  # whether a key that a chosen site touched was touched since by one that stays
    for _, site in journal.sites():
        for key in site.keys:
            if site.id not in chosen:
                seen[key] = key in seen
            elif seen.get(key):
                return [[pair] for pair in reversed(pairs)]
            else:
                seen.setdefault(key, False)
    return [list(pairs)] if pairs else []


def _conflict(journal: Journal, pairs: Sequence[_Pair], error: Exception) -> ReversalConflict:
    """Names the later step, or says that it was not regraft."""
    first = pairs[0][0]
    if not isinstance(error, Conflict):
        return ReversalConflict(f"{first} can't be undone, the graph would not be valid: {error}")
    chosen = {site.id for _, site in pairs}
    for step, site in reversed(list(journal.sites())):
        if site.id not in chosen and error.key in site.keys:
            return ReversalConflict(
                f"{first} can't be undone: {error.fact}, by {step} at {site.where}; undo that one first"
            )
    return ReversalConflict(f"{first} can't be undone: {error.fact}, by something other than regraft")


def _find_step(steps: Sequence[Step], wanted: Step | int | str) -> Step:
    for step in reversed(steps):
        if wanted in (step.id, step.transformation) or (isinstance(wanted, Step) and wanted.id == step.id):
            return step
    known = [f"{step.id} ({step.transformation})" for step in steps]
    raise ValueError(f"there is no step {wanted!r}; undo(gm, step) takes one of {known}")


def _is_at(record: SiteRecord, site: str | int) -> bool:
    if isinstance(site, int):
        return record.id == site
    return record.where == site or record.where.startswith(f"{site}.")
