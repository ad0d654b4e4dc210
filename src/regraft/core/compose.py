"""`compose`: several transformations as one, linted and compiled once."""

from __future__ import annotations

import copy
from contextlib import nullcontext

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

    def __repr__(self) -> str:
        parts = map(repr, self.transformations)
        return f"compose({', '.join(parts if self.inplace else [*parts, 'inplace=False'])})"

    @property
    def preserves_computation(self) -> bool:  # type: ignore[override]
        """True where all parts preserve."""
        return all(part.preserves_computation for part in self.transformations)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Apply the parts in order."""
        for part in self.transformations:
            graph_module = part(graph_module, lint_and_recompile=False)
        return graph_module

    def __call__(
        self,
        graph_module: GraphModule,
        lint_and_recompile: bool = True,
        reverse: bool = False,
        *,
        strict: bool = False,
        consume: bool = False,
    ) -> GraphModule:
        """Apply all parts in order, or none where one of them fails; or take them all back, last first.

        Args:
            graph_module: The graph module.
            lint_and_recompile: As in `Transformation`.
            reverse: Take all parts back.
            strict: As in `Rewrite`, for the parts that are one.
            consume: The same.

        Raises:
            TypeError: with `reverse`, if a part has no way back.
        """
        if reverse:
            return self._take_back(graph_module, lint_and_recompile)
        return self._apply_parts(graph_module, lint_and_recompile, {"strict": strict, "consume": consume})

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
        return Report(repr(self), tuple(Journal.of(trial).steps[known:]))

    def rehearse(self, trial: GraphModule) -> None:
        """See `Transformation.rehearse`."""
        for part in self.transformations:
            part.rehearse(trial)

    def _take_back(self, graph_module: GraphModule, compile_code: bool) -> GraphModule:
        raise TypeError(
            f"this composition cannot be reversed, for {', '.join(_one_way(self))} has no reverse: make it a "
            "ReversibleTransformation or a Rewrite, or take back all that was done to the graph by regraft.undo(gm)"
        )

    def _apply_parts(self, graph_module: GraphModule, compile_code: bool, options: dict[str, bool]) -> GraphModule:
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

    def _take_back(self, graph_module: GraphModule, compile_code: bool) -> GraphModule:
        original = expect_graph_module(graph_module, self)
        gm = original if self.inplace else copy.copy(original)
        undo_steps(gm, self.steps_to_reverse(gm), compile_code)
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


def _one_way(transformation: Transformation) -> list[str]:
    """The parts that cannot be taken back, by name, in order."""
    if isinstance(transformation, _Composition):
        return [name for part in transformation.transformations for name in _one_way(part)]
    return [] if isinstance(transformation, ReversibleTransformation) else [type(transformation).__name__]
