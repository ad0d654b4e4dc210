"""`Rewrite`, the easier way to write a transformation: a pattern, the conditions, the edit. It is always reversible."""

from __future__ import annotations

import gc
import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, final

from torch.fx import GraphModule, Node

from regraft.core.edit import Edit
from regraft.core.errors import NothingApplied, Refused, TransformationError
from regraft.core.history import lint_and_recompile, log_step, undo_steps
from regraft.core.journal import Journal, Refusal, SiteRecord, Step
from regraft.core.pattern import Match, Pattern, expect_pattern
from regraft.core.query import Facts
from regraft.core.reversal import Reversal
from regraft.core.snapshot import Codes, Snapshot
from regraft.core.states import Changes
from regraft.core.transformation import ReversibleTransformation, add_step, expect_graph_module

logger = logging.getLogger("regraft")


class Rewrite(ReversibleTransformation):
    """The easier way to write a transformation: a pattern, the conditions, the edit. Its reverse comes by itself.

    Attributes:
        pattern: Where to begin.
        exhaustive: Look again, after sites were rewritten, for more that have become sites only now or may be rewritten
            now: norms that stand in a row go into a layer one after the other.

    Example:
        >>> import torch, regraft as rg
        >>> from regraft.core.vocabulary import MULTIPLY
        >>> class DropTimesOne(rg.Rewrite):
        ...     preserves_computation = True
        ...     pattern = rg.Calls(MULTIPLY)
        ...     def rewrite(self, match, edit, facts):
        ...         call = match.call
        ...         rg.require(rg.that(call["other"] == 1, f"{call.where} does not multiply by one"))
        ...
        ...         edit.redirect(call.node, call.input)
        ...         edit.erase(call.node)
        ...         return "dropped times one"
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * 1 + x * 2
        >>> gm = rg.symbolic_trace(Model())
        >>> print(DropTimesOne().explain(gm))
        DropTimesOne: 1 applied, 1 refused
          applied  mul    dropped times one
          refused  mul_1  mul_1 does not multiply by one
        >>> gm = DropTimesOne()(gm)
        >>> [node.name for node in gm.graph.nodes]
        ['x', 'mul_1', 'add', 'output']
    """

    pattern: Pattern
    exhaustive: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        pattern = vars(cls).get("pattern")
        if pattern is not None and not hasattr(pattern, "__get__"):  # what a property makes is looked at when it runs
            expect_pattern(pattern, cls.__name__)

    @abstractmethod
    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """Rewrite one site: look up, `require`, then edit. Returns what was done, in a few words.

        Whatever is changed goes through `edit`; what is changed past it is put back, and the application fails.

        Raises:
            Refused: by way of `require`; the site then stays as it was.
        """

    def divide(self, match: Match, facts: Facts) -> Sequence[Match]:
        """The sites of a candidate: itself, unless a rule knows better. What is to be refused has a `reason`."""
        return [match]

    def __call__(
        self,
        graph_module: GraphModule,
        lint_and_recompile: bool = True,
        reverse: bool = False,
        *,
        strict: bool = False,
        consume: bool = False,
    ) -> GraphModule:
        """Apply the rewrite at every site that allows it, or take it back.

        Args:
            graph_module: The graph module, which is changed in place; weights shared with other modules are not.
            lint_and_recompile: As in `Transformation`.
            reverse: Take back every application of a rewrite with this signature.
            strict: Raise where no site can be rewritten.
            consume: Let the original weights go, to save their memory. Re-arrangements can still be taken back; folds
                cannot.

        Raises:
            NothingApplied: with `strict`, if nothing was rewritten; the message holds the reasons.
            TransformationError: if the class has no pattern, or `rewrite` does not say what was done.
            ReversalConflict: if later steps stand on what would be taken back; nothing is changed then.
        """
        gm = expect_graph_module(graph_module, self)
        if reverse:
            return self._take_back(gm, lint_and_recompile)
        step = self._run(gm, lint_and_recompile, dry=False, consume=consume, strict=strict)
        log_step(step)
        return gm

    @final
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Apply the rewrite, without compiling the code."""
        return self(graph_module, lint_and_recompile=False)

    @final
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Take the rewrite back, without compiling the code."""
        return self(graph_module, lint_and_recompile=False, reverse=True)

    def steps_to_reverse(self, gm: GraphModule) -> list[Step]:
        """Every step of a rewrite with this signature."""
        return [step for step in Journal.of(gm).steps if step.signature == self.signature]

    def rehearse(self, trial: GraphModule) -> None:
        """See `Transformation.rehearse`."""
        self._run(trial, compile_code=False, dry=True, consume=False, strict=False)

    def _take_back(self, gm: GraphModule, compile_code: bool) -> GraphModule:
        steps = self.steps_to_reverse(gm)
        if not any(step.applied for step in steps):
            logger.warning("%s: nothing to reverse, it was not applied to this graph", type(self).__name__)
        undo_steps(gm, steps, compile_code)
        return gm

    def _run(self, gm: GraphModule, compile_code: bool, *, dry: bool, consume: bool, strict: bool) -> Step:
        start = time.perf_counter()
        expect_pattern(self.pattern if "pattern" in dir(self) else None, type(self).__name__)
        journal = Journal.of(gm)
        journal.settle(gm)
        steps, codes = list(journal.steps), Codes(gm)
        # regraft's own keep to `edit`, as their tests see to; a user's may not, and is looked at from outside
        before = None if type(self).__module__.startswith("regraft.") else Snapshot(gm)
        applied: list[SiteRecord] = []
        refused: list[Refusal] = []
        if consume:
            gc.collect()  # tracing leaves the model in a reference cycle, which would keep what is let go here
        try:
            with before.guard() if before is not None else nullcontext():
                self._visit(Facts(gm), journal, applied, refused, dry, consume)
            if before is not None:
                self._expect_edits(before, Changes.net(site.changes for site in applied))
            if strict and not applied:
                reasons = "; ".join(f"{r.where}: {r.reason}" for r in refused) or "no candidate was found"
                raise NothingApplied(f"{type(self).__name__} rewrote nothing: {reasons}")
            if compile_code:
                lint_and_recompile(gm)
            return add_step(self, gm, applied, refused, time.perf_counter() - start)
        except BaseException:
            if before is not None:
                before.restore()
                raise
            journal.steps[:] = steps
            Reversal(gm, Changes.net(site.changes for site in applied), journal.orders, None).apply()
            codes.restore()
            raise

    def _expect_edits(self, before: Snapshot, known: Changes) -> None:
        """Refuse what was changed past `edit`: the history would not know it, and undo would leave it."""
        written = [".".join(filter(None, key)) for key in before.written()]
        if written:
            raise TransformationError(
                f"{type(self).__name__}.rewrite wrote to {written[0]!r} in place, a weight that others may share; put "
                "a new one there: edit.put_module(name, like, {'weight': (derivation, [call.weight('weight')])})"
            )
        strange = before.changes().unknown_to(known)
        if strange:
            raise TransformationError(
                f"{type(self).__name__}.rewrite changed {min(name for _, name in strange)!r} by itself, which nobody "
                "could take back; every change goes through `edit`: edit.replace(node, torch.relu, x), "
                "edit.redirect(node, other), edit.erase(node)"
            )

    def _visit(
        self,
        facts: Facts,
        journal: Journal,
        applied: list[SiteRecord],
        refused: list[Refusal],
        dry: bool,
        consume: bool,
    ) -> None:
        backwards = False
        while True:
            found, refused[:] = len(applied), []
            for path in list(facts.graphs):
                facts, reasons = self._visit_graph(facts, path, journal, applied, dry, consume, backwards)
                refused += reversed(reasons) if backwards else reasons
            if not self.exhaustive or len(applied) == found:
                return
            backwards = not backwards  # a row that was met from the wrong end takes one more pass, whatever its length

    def _visit_graph(
        self,
        facts: Facts,
        path: str,
        journal: Journal,
        applied: list[SiteRecord],
        dry: bool,
        consume: bool,
        backwards: bool,
    ) -> tuple[Facts, list[Refusal]]:
        mark, owner = self.signature, facts.graphs[path]
        erased: set[Node] = set()
        refused: list[Refusal] = []
        candidates = list(self.pattern.candidates(owner))
        for nodes in reversed(candidates) if backwards else candidates:
            candidate = None if erased.intersection(nodes) else self.pattern.match(owner, nodes)
            if candidate is None:
                continue
            for match in [candidate] if candidate.reason is not None else self.divide(candidate, facts):
                edit = Edit(facts, path, journal.orders, mark, dry)
                where = ".".join(filter(None, (path, match.where)))
                try:
                    if match.reason is not None:
                        raise Refused(match.reason)
                    sentence = self._sentence(self.rewrite(match, edit, facts))
                    site = edit.commit(journal.new_site(), where, sentence, consume)
                except Refused as reason:
                    if edit.rollback():  # it had begun to edit
                        facts = Facts(facts.root)
                    refused.append(Refusal(where, str(reason)))
                except BaseException:
                    edit.rollback()
                    raise
                else:
                    erased |= edit.erased
                    applied.append(site)
        return facts, refused

    def _sentence(self, returned: object) -> str:
        if isinstance(returned, str):
            return returned
        raise TransformationError(
            f"{type(self).__name__}.rewrite returned {type(returned).__name__}, not what it did; end it with "
            '`return "a few words"`, and leave a site as it was with `require(that(condition, "why not"))`'
        )
