"""Which rewrite broke the result?"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from regraft.core.errors import ReversalConflict
from regraft.verify.call import check_call
from regraft.verify.oracle import Oracle
from regraft.verify.result import Verification
from regraft.verify.script import reproduction, save
from regraft.verify.verify import Model, expect_callable, verify


class Site(Protocol):
    """What bisection reads of one place that a step rewrote."""

    @property
    def id(self) -> Any:
        """Its identity within the graph's history."""

    @property
    def where(self) -> str:
        """The module or node it is at."""

    @property
    def sentence(self) -> str:
        """What was done there."""


class Step(Protocol):
    """What bisection reads of one application of a transformation."""

    @property
    def id(self) -> int:
        """Its identity within the graph's history."""

    @property
    def transformation(self) -> str:
        """The name of the class."""

    @property
    def applied(self) -> Sequence[Site]:
        """The sites that were rewritten, in that order; empty where the engine does not know them."""


class Journal(Protocol):
    """The engine's history and undo, which a test can replace."""

    def history(self, gm: fx.GraphModule) -> Sequence[Step]:
        """The steps, oldest first."""

    def undo(self, gm: fx.GraphModule, step: Step, site: Site | None) -> None:
        """Take back one step, or one of its sites, in place."""


class _Engine:
    """The real journal."""

    def history(self, gm: fx.GraphModule) -> Sequence[Step]:
        steps: Sequence[Step] = _engine().history(gm)
        return steps

    def undo(self, gm: fx.GraphModule, step: Step, site: Site | None) -> None:
        if site is None:
            _engine().undo(gm, step.id)
        else:
            _engine().undo(gm, step.id, site=site.id)


def _engine() -> Any:
    return importlib.import_module("regraft.core.history")


@dataclass(frozen=True, repr=False)
class Culprit:
    """The rewrite that broke the result.

    Args:
        step: The id of its step; None where the graph was wrong before any rewrite.
        transformation: The name of the transformation's class; None likewise.
        where: The site, or None where only the step is known.
        sentence: What the engine said it did there.
        alone: Whether this rewrite breaks the result with no other applied; None where that could not be tried.
        verification: The failure, with everything up to and including the culprit applied.
        runs: How many verifications it took.
        note: What limits the answer, or None.
    """

    step: int | None
    transformation: str | None
    where: str | None
    sentence: str | None
    alone: bool | None
    verification: Verification
    runs: int
    note: str | None = None
    _parts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def script(self) -> str:
        """A script that reproduces the failure from the file `write` saves beside it."""
        return reproduction(self, "culprit.pt")

    def write(self, path: str | Path) -> Path:
        """Write the script, and beside it (same name, `.pt`) the models and the inputs it loads.

        Args:
            path: Of the script, such as `culprit.py`.

        Returns:
            The path of the script.

        Raises:
            TypeError: The reference or the inputs cannot be pickled; the message says which.
        """
        path = Path(path)
        data = path.with_suffix(".pt")
        save(self._parts, data)
        path.write_text(reproduction(self, data.name), encoding="utf-8")
        return path

    @property
    def name(self) -> str:
        """The culprit in a few words.

        Example:
            >>> Culprit(1, "MergeLinears", "layer.0", None, True, Verification(()), 5).name
            'MergeLinears at layer.0 (step 1)'
        """
        if self.transformation is None:
            return "no transformation: the graph is wrong before the first one, so look at how it was captured"
        return f"{self.transformation}{f' at {self.where}' if self.where else ''} (step {self.step})"

    def __str__(self) -> str:
        """The culprit, what it did, and how far off the result is."""
        lines = [f"{self.name}, found in {self.runs} verifications"]
        if self.sentence:
            lines.append(f"what it did: {self.sentence}")
        if self.alone is not None:
            lines.append(
                "it breaks the result by itself" if self.alone else "it breaks the result only with earlier rewrites"
            )
        if self.note:
            lines.append(f"note: {self.note}")
        return "\n".join([*lines, str(self.verification)])

    __repr__ = __str__


@dataclass(frozen=True)
class _Unit:
    """The smallest thing that can be taken back."""

    step: Step
    site: Site | None


class _Search:
    def __init__(self, journal: Journal, gm: fx.GraphModule, check: Callable[[fx.GraphModule], Verification]) -> None:
        self.journal = journal
        self.gm = gm
        self.check = check
        self.runs = 0

    def without(self, units: Sequence[_Unit]) -> fx.GraphModule:
        """A copy with these units taken back, newest first."""
        work = copy.deepcopy(self.gm)
        for unit in reversed(units):
            self.journal.undo(work, unit.step, unit.site)
        return work

    def verification(self, gm: fx.GraphModule) -> Verification:
        """Check a copy, and count."""
        self.runs += 1
        return self.check(gm)

    def first_bad(self, units: Sequence[_Unit], bad: Verification) -> tuple[int, Verification]:
        """The smallest number of units after which the result is wrong; it is right after none, wrong after all."""
        right, wrong = 0, len(units)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            found = self.verification(self.without(units[middle:]))
            if found.ok:
                right = middle
            else:
                wrong, bad = middle, found
        return wrong, bad


def bisect(
    reference: Model | Oracle,
    gm: fx.GraphModule,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    journal: Journal | None = None,
    **options: Any,
) -> Culprit:
    """Find the transformation and the site that broke a graph, by undoing ever fewer of them on copies.

    Args:
        reference: What is right, as for `verify`.
        gm: The graph with its history; it is not changed.
        args: Positional arguments of both.
        kwargs: Keyword arguments of both.
        journal: Where history and undo come from; the engine's own by default.
        options: Passed to `verify`.

    Returns:
        The culprit, found in about log2(sites) + 3 verifications.

    Raises:
        ValueError: `gm` verifies, so there is nothing to find.
        TypeError: `gm` is not a graph module, or the call does not fit the reference.
    """
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(
            f"gm is a {type(gm).__name__}, but only a graph module has a history: "
            "gm = regraft.trace(model, args); gm = transformation(gm); bisect(model, gm, args)"
        )
    call = "bisect(reference, gm, {})"
    right = reference.reference if isinstance(reference, Oracle) else expect_callable(reference, "reference", call)
    check_call(right, args, kwargs, call)
    journal = journal or _Engine()
    search = _Search(journal, gm, lambda work: verify(reference, work, args, kwargs, **options))
    bad = search.verification(gm)
    if bad.ok:
        raise ValueError("the graph module verifies against the reference on these inputs: there is no culprit to find")
    steps = list(journal.history(gm))
    units = [_Unit(step, site) for step in steps for site in (*step.applied,) or (None,)]
    note = None
    try:
        bare = search.without(units)
    except ReversalConflict as conflict:
        # Sites of one step may stand on each other; whole steps, newest first, always come off.
        note = f"sites could not be taken back one by one, so whole steps were ({conflict})"
        units = [_Unit(step, None) for step in steps]
        bare = search.without(units)
    start = search.verification(bare)
    parts: dict[str, Any] = {"reference": reference, "args": args, "kwargs": kwargs, "options": options}
    if not start.ok or not units:
        parts["gm"] = bare
        return Culprit(None, None, None, None, None, start, search.runs, note, parts)
    count, bad = search.first_bad(units, bad)
    guilty = units[count - 1]
    shown = search.without(units[count:])
    alone, single = _alone(search, units, count)
    if single is not None and alone is not None and not alone.ok:
        shown, bad = single, alone
    where = guilty.site.where if guilty.site else (", ".join(s.where for s in guilty.step.applied) or None)
    sentence = guilty.site.sentence if guilty.site else None
    parts |= {"gm": shown, "step": guilty.step.id, "site": guilty.site.id if guilty.site else None}
    by_itself = None if alone is None else not alone.ok
    return Culprit(
        guilty.step.id, guilty.step.transformation, where, sentence, by_itself, bad, search.runs, note, parts
    )


def _alone(search: _Search, units: list[_Unit], count: int) -> tuple[Verification | None, fx.GraphModule | None]:
    """Try the culprit with no other rewrite, for a smaller reproduction."""
    if count == 1:
        single = search.without(units[1:])
        return search.verification(single), single
    try:
        single = search.without([*units[: count - 1], *units[count:]])
    except ReversalConflict:
        return None, None  # it stands on an earlier one
    return search.verification(single), single
