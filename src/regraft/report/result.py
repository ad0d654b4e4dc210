"""What a report reads: the shape of the result of `optimize`, which stands above this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from regraft.core.journal import Step
from regraft.verify import Comparison, Verification


class StepResult(Protocol):
    """What one transformation did to one graph, and whether that stayed."""

    @property
    def graph(self) -> str:
        """The graph's name."""

    @property
    def transformation(self) -> str:
        """The transformation, by name and arguments."""

    @property
    def kept(self) -> bool:
        """Whether it stands in the graph."""

    @property
    def reason(self) -> str:
        """Why it was kept or not."""

    @property
    def applied(self) -> int:
        """How many sites it rewrote."""

    @property
    def refused(self) -> int:
        """How many it refused."""

    @property
    def comparison(self) -> Comparison | None:
        """The graph with it against the graph without."""

    @property
    def records(self) -> Sequence[Step]:
        """The sites and refusals."""


class EngineResult(Protocol):
    """Which engines were tried to run a graph, and which was taken."""

    @property
    def engine(self) -> str:
        """The one that runs it."""

    @property
    def tried(self) -> Mapping[str, str]:
        """What came of each, as a sentence."""

    @property
    def rewriting(self) -> Mapping[str, Comparison]:
        """What the rewrites add to each."""


class GraphResult(Protocol):
    """One graph, and what came of it."""

    @property
    def name(self) -> str:
        """Such as `forward`."""

    @property
    def graph_module(self) -> Any:
        """The graph; a report hands it on and does not look into it."""

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call it was captured with."""

    @property
    def used(self) -> bool:
        """Whether the model runs it."""

    @property
    def verdict(self) -> str:
        """Why, as a sentence."""

    @property
    def benchmark(self) -> Comparison | None:
        """The result against the original."""

    @property
    def engine(self) -> EngineResult | None:
        """What was tried to run it; None for torch alone."""


class Result(Protocol):
    """The result of `optimize`."""

    @property
    def original(self) -> Any:
        """The caller's model."""

    @property
    def graphs(self) -> Sequence[GraphResult]:
        """The graphs."""

    @property
    def steps(self) -> Sequence[StepResult]:
        """What was tried, in order."""

    @property
    def verification(self) -> Verification | None:
        """The comparison with the original."""

    @property
    def notes(self) -> Sequence[str]:
        """What else a reader should know."""
