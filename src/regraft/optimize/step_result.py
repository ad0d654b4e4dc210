"""What one step of `optimize` came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regraft.core.journal import Step
from regraft.core.report import Report
from regraft.core.transformation import Transformation
from regraft.verify import Comparison, Verification


@dataclass(frozen=True)
class StepResult:
    """What one transformation did to one graph, and whether that stayed.

    Args:
        graph: Which graph: `"forward"`, or `"prefill"` and `"decode"` for what a decoder's `generate` calls.
        transformation: The transformation, by name and arguments.
        kept: Whether what it did stands in the graph.
        reason: Why it was kept or taken back, as a sentence.
        applied: How many sites it rewrote.
        refused: How many sites it refused.
        preserves: Whether it claims to compute the same.
        comparison: The graph with it against the graph without; None where that was not measured.
        records: What the history says of it, sites and refusals included; also of what was taken back.
    """

    graph: str
    transformation: str
    kept: bool
    reason: str
    applied: int
    refused: int
    preserves: bool
    comparison: Comparison | None
    records: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graph's own records, as plain data; sites and refusals as sentences."""
        plain = {key: value for key, value in vars(self).items() if key not in ("comparison", "records")}
        names = ("transformation", "outcome", "site", "sentence")
        sites = [dict(zip(names, row, strict=True)) for row in Report(self.transformation, self.records).rows()]
        return {**plain, "comparison": self.comparison and self.comparison.to_dict(), "sites": sites}


def result_of(name: str, transformation: Transformation, records: Sequence[Step]) -> StepResult:
    """What a transformation has done, before it is known whether that stays.

    Args:
        name: The graph's.
        transformation: The transformation.
        records: What the history says of it.
    """
    return StepResult(
        graph=name,
        transformation=repr(transformation),
        kept=False,
        reason="",
        applied=sum(len(step.applied) for step in records),
        refused=sum(len(step.refused) for step in records),
        preserves=transformation.preserves_computation,
        comparison=None,
        records=tuple(records),
    )


def why_nothing(records: Sequence[Step]) -> str:
    """Why a transformation has rewritten no site, as a sentence.

    Args:
        records: What the history says of it.
    """
    refusals = [refusal for step in records for refusal in step.refused]
    if not refusals:
        return "nothing to do: no candidate site"
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return f"nothing done, {refusals[0].where} was refused: {refusals[0].reason}{more}"


def worst_sentence(found: Verification) -> str:
    """What is wrong by most, as the end of a sentence.

    Args:
        found: A verification that is not ok.
    """
    for case in found.cases:
        for problem in case.problems:
            return f"on {case.label} {problem}"
    if found.worst is None:
        return "the results differ"
    case, leaf = found.worst
    return f"on {case.label} {leaf.name} {leaf.problem}"
