"""What was applied and what was refused, in a form that prints."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

from regraft.core.journal import Step


@dataclass(frozen=True)
class Report:
    """The outcome of a transformation at every candidate site.

    Attributes:
        title: The transformation.
        steps: What each part of it did; one step where it is not a composition.
    """

    title: str
    steps: tuple[Step, ...]

    @property
    def applied(self) -> int:
        """How many sites were rewritten."""
        return sum(len(step.applied) for step in self.steps)

    @property
    def refused(self) -> int:
        """How many sites were refused."""
        return sum(len(step.refused) for step in self.steps)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Transformation, outcome, place and sentence of every site."""
        rows = []
        for step in self.steps:
            rows += [(step.transformation, "applied", site.where, site.sentence) for site in step.applied]
            rows += [(step.transformation, "refused", site.where, site.reason) for site in step.refused]
        return rows

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            one = Report(step.transformation, (step,))
            found = one.applied + one.refused
            counts = f"{one.applied} applied, {one.refused} refused" if found else "no candidate site was found"
            lines.append(f"{step.transformation}: {counts}")
            rows = one.rows()
            width = max((len(row[2]) for row in rows), default=0)
            lines += [f"  {outcome}  {where:<{width}}  {sentence}" for _, outcome, where, sentence in rows]
        return "\n".join(lines) or f"{self.title}: nothing to do"

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows())
        head = "".join(
            f"<th>{name}</th>" for name in ("transformation", "outcome", "site", "what was done, or why not")
        )
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        caption = f"{html.escape(self.title)}: {self.applied} applied, {self.refused} refused"
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        names = ("transformation", "outcome", "site", "sentence")
        sites = [dict(zip(names, row, strict=True)) for row in self.rows()]
        return {"title": self.title, "applied": self.applied, "refused": self.refused, "sites": sites}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)
