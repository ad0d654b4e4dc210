"""Transformations to subclass: `Transformation`, and `ReversibleTransformation` for those that can be taken back."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from regraft.core.arithmetic import node_arithmetic
from regraft.core.errors import TransformationError
from regraft.core.expect import expect_graph
from regraft.core.graph_module import adopt
from regraft.core.history import lint, lint_and_recompile, undo_steps, withdraw
from regraft.core.journal import Journal, Refusal, SiteRecord, Step
from regraft.core.modules import graph_modules
from regraft.core.report import Report
from regraft.core.signature import arguments_of, signature_of
from regraft.core.snapshot import Snapshot
from regraft.core.states import MARKS


class Transformation(ABC):
    """A graph transformation. Subclass it, implement `transform`, and call the instance on a graph module.

    Whatever `transform` does is atomic: an exception leaves graph, code and weights as they were. It stands in
    `history(gm)` and `undo(gm)` takes it back.

    Attributes:
        preserves_computation: Whether the transformed graph computes the same outputs.

    Example:
        >>> import operator, torch, regraft as rg
        >>> class ChangeMulToAdd(rg.Transformation):
        ...     def transform(self, graph_module):
        ...         for node in graph_module.graph.nodes:
        ...             if node.op == "call_function" and node.target == operator.mul:
        ...                 node.target = operator.add
        ...         return graph_module
        >>> class Double(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * 2
        >>> gm = ChangeMulToAdd()(rg.symbolic_trace(Double()))
        >>> gm(torch.tensor(5.0))
        tensor(7.)
    """

    preserves_computation: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({arguments_of(self)})"

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Change `graph_module` and return it."""

    def __call__(self, graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
        """Apply the transformation.

        Args:
            graph_module: The graph module, which is changed in place.
            lint_and_recompile: Check the graph and compile its code afterwards. False where several transformations
                follow each other and the last one does it.

        Raises:
            TypeError: if `graph_module` is not one.
            TransformationError: if `transform` returns none.
        """
        return self._apply(expect_graph_module(graph_module, self), self.transform, lint_and_recompile)

    @property
    def signature(self) -> str:
        """Equal for equal class and arguments, different otherwise, the same in every process."""
        return signature_of(self)

    def mark_as_transformed(self, node: Node) -> None:
        """Mark `node` as transformed by this transformation."""
        node.meta[MARKS] = node.meta.get(MARKS, frozenset()) | {self.signature}

    def transformed(self, node: Node) -> bool:
        """Whether `node` is marked as transformed by this transformation."""
        return self.signature in node.meta.get(MARKS, ())

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes marked by this transformation, in order, those of nested graph modules included."""
        name = type(self).__name__
        expect_graph(graph_module, name, f"{name}().get_transformed_nodes({{}})")
        signature = self.signature
        owners = graph_modules(graph_module).values()
        return [node for owner in owners for node in owner.graph.nodes if signature in node.meta.get(MARKS, ())]

    def explain(self, graph_module: GraphModule) -> Report:
        """What applying this would do: a dry run on a copy that shares every weight and makes none.

        Args:
            graph_module: The graph module; it is not changed.
        """
        trial = copy.copy(expect_graph_module(graph_module, self))
        known = len(Journal.of(trial).steps)
        self.rehearse(trial)
        lint(trial)  # as applying does
        return Report(type(self).__name__, tuple(Journal.of(trial).steps[known:]))

    def rehearse(self, trial: GraphModule) -> None:
        """Apply the transformation to a copy that shares its weights, and leave those as they are."""
        before = Snapshot(trial)
        with before.guard():
            self(trial, lint_and_recompile=False)
        before.restore_weights()

    def _apply(
        self, gm: GraphModule, function: Callable[[GraphModule], GraphModule], compile_code: bool
    ) -> GraphModule:
        """Run a user's function on `gm` as one step: wholly or not at all."""
        start = time.perf_counter()
        before = Snapshot(gm)
        try:
            with node_arithmetic(), before.guard():
                result = function(gm)
            if not isinstance(result, GraphModule):
                raise TransformationError(
                    f"{type(self).__name__}.{function.__name__} returned {type(result).__name__}, not the graph module;"
                    " end it with `return graph_module`"
                )
            result = adopt(result)
            if compile_code:
                lint_and_recompile(result)
        except BaseException:
            before.restore()
            raise
        self._record(gm, result, before, time.perf_counter() - start)
        return result

    def _record(self, gm: GraphModule, result: GraphModule, before: Snapshot, seconds: float) -> None:
        journal = Journal.of(gm)
        if result is not gm:
            result.meta.setdefault(Journal.KEY, Journal())
            return
        changes = before.changes()
        site = SiteRecord(
            journal.new_site(), "whole graph", "", changes, before.put_in(changes), written=before.written()
        )
        site.sentence = f"{len(site.keys)} changes"
        sites = [site] if site.keys else []
        add_step(self, gm, sites, [], seconds)


class ReversibleTransformation(Transformation):
    """A transformation that can be taken back. Implement `transform` and `reverse`.

    An application that the history knows is taken back from there: bit for bit, names included. `reverse` is run where
    it knows none: on a graph that was made elsewhere, or whose history was dropped.
    """

    @abstractmethod
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Take `transform` back on `graph_module` and return it."""

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Apply the transformation, or take it back.

        Args:
            graph_module: The graph module, which is changed in place.
            lint_and_recompile: As in `Transformation`.
            reverse: Take back the last application of a transformation with this one's signature.

        Raises:
            ReversalConflict: if later steps stand on what would be taken back; nothing is changed then.
        """
        if not reverse:
            return super().__call__(graph_module, lint_and_recompile)
        gm = expect_graph_module(graph_module, self)
        steps = self.steps_to_reverse(gm)
        if not steps or not steps[-1].applied:
            result = self._apply(gm, self.reverse, lint_and_recompile)
            withdraw(result, [*steps, *(s for s in Journal.of(result).steps[-1:] if not s.applied)])
            return result
        undo_steps(gm, steps, lint_and_recompile)
        return gm

    def steps_to_reverse(self, gm: GraphModule) -> list[Step]:
        """The last step of a transformation with this one's signature."""
        return [step for step in Journal.of(gm).steps if step.signature == self.signature][-1:]

    def mark_as_restored(self, node: Node) -> None:
        """Take back the mark of this transformation from `node`.

        Raises:
            ValueError: if the node is not marked.
        """
        marks = node.meta.get(MARKS, frozenset())
        if self.signature not in marks:
            raise ValueError(f"node {node.name!r} is not marked as transformed by {type(self).__name__}")
        node.meta[MARKS] = marks - {self.signature}


def expect_graph_module(graph_module: Any, transformation: Transformation) -> GraphModule:
    """`graph_module`, adopted in place; a `TypeError` with the corrected call where it is none."""
    name = type(transformation).__name__
    expect_graph(graph_module, name, f"{name}()({{}})")
    return adopt(graph_module)


def add_step(
    transformation: Transformation,
    gm: GraphModule,
    applied: list[SiteRecord],
    refused: list[Refusal],
    seconds: float,
) -> Step:
    """Enter an application into the journal of `gm`."""
    journal = Journal.of(gm)
    step = Step(
        journal.new_step(),
        type(transformation).__name__,
        arguments_of(transformation),
        transformation.signature,
        tuple(applied),
        tuple(refused),
        seconds,
    )
    journal.steps.append(step)
    journal.settle(gm)
    return step
