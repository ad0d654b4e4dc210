"""`compose`: several transformations as one, linted and compiled once."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

from torch.fx import GraphModule, Node

from regraft.core.history import lint, lint_and_recompile, undo_steps
from regraft.core.journal import Journal, Step
from regraft.core.modules import graph_modules
from regraft.core.report import Report
from regraft.core.rewrite import Rewrite
from regraft.core.snapshot import Snapshot
from regraft.core.transformation import ReversibleTransformation, Transformation, expect_graph_module


class _Composition(Transformation):
    """Several transformations, one after the other, linted and compiled once."""

    def __init__(self, transformations: tuple[Transformation, ...], inplace: bool) -> None:
        self.transformations = transformations
        self.inplace = inplace

    @property
    def preserves_computation(self) -> bool:  # type: ignore[override]
        """True where all parts preserve."""
        return all(part.preserves_computation for part in self.transformations)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Apply the parts in order."""
        for part in self.transformations:
            graph_module = part(graph_module, lint_and_recompile=False)
        return graph_module

    def __call__(self, graph_module: GraphModule, lint_and_recompile: bool = True, **options: Any) -> GraphModule:
        """Apply all parts, or none where one of them fails. `strict` and `consume` go to the parts that know them."""
        return self._apply_parts(graph_module, lint_and_recompile, options)

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes marked by any of the parts, in order."""
        marked = {node for part in self.transformations for node in part.get_transformed_nodes(graph_module)}
        owners = graph_modules(graph_module).values()
        return [node for owner in owners for node in owner.graph.nodes if node in marked]

    def transformed(self, node: Node) -> bool:
        """Whether any of the parts marked `node`."""
        return any(part.transformed(node) for part in self.transformations)

    def explain(self, graph_module: GraphModule) -> Report:
        """A dry run of all parts, each on what the ones before it would leave."""
        trial = copy.copy(expect_graph_module(graph_module, self))
        known = len(Journal.of(trial).steps)
        for part in self.transformations:
            part.rehearse(trial)
        lint(trial)
        return Report("composition", tuple(Journal.of(trial).steps[known:]))

    def rehearse(self, trial: GraphModule) -> None:
        """See `Transformation.rehearse`."""
        for part in self.transformations:
            part.rehearse(trial)

    def _apply_parts(self, graph_module: GraphModule, compile_code: bool, options: dict[str, Any]) -> GraphModule:
        original = expect_graph_module(graph_module, self)
        gm = original if self.inplace else copy.copy(original)
        before, result = Snapshot(gm), gm
        try:
            with before.guard() if self._writes_weights() else nullcontext():
                for part in self.transformations:
                    known_options = options if isinstance(part, (Rewrite, _Composition)) else {}
                    result = part(result, lint_and_recompile=False, **known_options)
            if compile_code:
                lint_and_recompile(result)
        except BaseException:
            before.restore()
            raise
        return result

    def _writes_weights(self) -> bool:
        """Whether a part may write weights in place: a user's own function, which is not held to `Edit`."""
        return any(not isinstance(part, (Rewrite, _Composition)) for part in self.transformations)


class _ReversibleComposition(_Composition, ReversibleTransformation):
    """A composition all of whose parts can be taken back."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Take the parts back, last first."""
        return self(graph_module, lint_and_recompile=False, reverse=True)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False, **options: Any
    ) -> GraphModule:
        """Apply all parts in order, or take them all back, last first."""
        if not reverse:
            return super().__call__(graph_module, lint_and_recompile, **options)
        original = expect_graph_module(graph_module, self)
        gm = original if self.inplace else copy.copy(original)
        undo_steps(gm, self.steps_to_reverse(gm), lint_and_recompile)
        return gm

    def steps_to_reverse(self, gm: GraphModule) -> list[Step]:
        """The steps that taking back all parts takes back."""
        found: dict[int, Step] = {}
        for part in reversed(self.transformations):
            assert isinstance(part, ReversibleTransformation)
            found |= {step.id: step for step in part.steps_to_reverse(gm)}
        return [found[number] for number in sorted(found)]


def compose(*args: Transformation, inplace: bool = True) -> Transformation:
    """One transformation out of several, applied in order; reversible where all of them are.

    Args:
        args: The transformations; none, one, and compositions are fine too.
        inplace: Change the graph module that it is called on. False leaves that one alone and returns a new one, which
            shares every weight that is not rewritten.

    Raises:
        TypeError: if an argument is not a transformation.

    Example:
        >>> import regraft as rg
        >>> t = rg.compose(rg.ChangeTrueDivToMulByInverse(), rg.MergeLinears())
        >>> t.preserves_computation
        True
    """
    given: tuple[object, ...] = args
    for part in given:
        if not isinstance(part, Transformation):
            hint = f"; did you mean compose({part.__name__}())?" if isinstance(part, type) else ": compose(one, two)"
            raise TypeError(f"compose takes transformations, and got {part!r}{hint}")
    kind = _ReversibleComposition if all(isinstance(part, ReversibleTransformation) for part in args) else _Composition
    return kind(args, inplace)
