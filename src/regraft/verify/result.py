"""What a verification found, and how it is shown."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass
from typing import Any

from regraft.core.errors import VerificationError


@dataclass(frozen=True)
class Leaf:
    """One output, or one input or buffer after the call, compared.

    Args:
        name: Such as `output.logits` or `output[0]`; `args[0] after the call` for an input changed in place, and
            `buffer mean after the call` for a buffer.
        ok: Whether it is right.
        dtype: The reference's; the class of a value that is not a tensor.
        shape: The reference's.
        max_abs: Largest |candidate - reference|.
        max_rel: The same relative to the element, or to the output's typical magnitude where that is larger.
        cosine: Similarity of candidate and reference as flat vectors.
        reference_error: The reference's largest error against float64, relative as in `regraft.verify.compare`.
        candidate_error: The candidate's.
        ratio: The candidate's error over the reference's.
        allowed: The largest `candidate_error` that passes.
        where: Index of the worst element.
        problem: What is wrong, or None.
        note: What else a reader should know, or None.
    """

    name: str
    ok: bool
    dtype: str = ""
    shape: tuple[int, ...] = ()
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    reference_error: float = 0.0
    candidate_error: float = 0.0
    ratio: float = 1.0
    allowed: float = 0.0
    where: tuple[int, ...] = ()
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Case:
    """One set of inputs: what was compared on it, or why it was left out."""

    label: str
    leaves: tuple[Leaf, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything on these inputs is right; true of a case left out, which `skipped` tells."""
        return not self.problems and all(leaf.ok for leaf in self.leaves)


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of `verify`. True where it is right, and printed as a table.

    Args:
        cases: The sample first, then other sizes and the caller's extra inputs.
        notes: What limits the verdict: no float64 run, a differing training mode.
    """

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the candidate computes what the reference computes, on every case."""
        return all(case.ok for case in self.cases)

    def __bool__(self) -> bool:
        """`ok`."""
        return self.ok

    @property
    def worst(self) -> tuple[Case, Leaf] | None:
        """The wrong output that is furthest beyond its bound, with its case; None where none is wrong."""
        wrong = [(case, leaf) for case in self.cases for leaf in case.leaves if not leaf.ok]
        return max(wrong, key=lambda pair: _excess(pair[1]), default=None)

    def raise_for_status(self) -> Verification:
        """Raise unless it is right.

        Returns:
            This result, so that calls chain.

        Raises:
            VerificationError: naming the worst output, the place in it, by how much, and what to do next.
        """
        if self.ok:
            return self
        raise VerificationError(self._sentence())

    def _sentence(self) -> str:
        lines = ["the candidate does not compute what the reference computes."]
        lines += [f"On {case.label}: {problem}." for case in self.cases for problem in case.problems]
        if self.worst is not None:
            case, leaf = self.worst
            lines.append(f"On {case.label}: {leaf.name} {leaf.problem}.")
            more = sum(not other.ok for c in self.cases for other in c.leaves) - 1
            lines += [f"{more} more {'output is' if more == 1 else 'outputs are'} wrong; print the result to see."] * (
                more > 0
            )
        lines += [f"Note: {note}." for note in self.notes]
        lines.append("To find the transformation and the site: regraft.bisect(reference, candidate, args, kwargs)")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists; NaN and infinities as strings, so that it is valid JSON."""
        cases = [
            {
                "label": case.label,
                "ok": case.ok,
                "skipped": case.skipped,
                "problems": list(case.problems),
                "leaves": [{key: _plain(value) for key, value in vars(leaf).items()} for leaf in case.leaves],
            }
            for case in self.cases
        ]
        return {"ok": self.ok, "notes": list(self.notes), "cases": cases}

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        """A table with a line per output."""
        rows = [_HEAD, *(row for case in self.cases for row in _rows(case))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([*lines, *self._remarks(), self._verdict()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for case in self.cases for row in _rows(case))
        remarks = "".join(f"<li>{html.escape(text)}</li>" for text in self._remarks())
        return (
            f"<table><thead>{line(_HEAD, 'th')}</thead><tbody>{body}</tbody></table>"
            f"<ul>{remarks}</ul><p><b>{html.escape(self._verdict())}</b></p>"
        )

    def _remarks(self) -> list[str]:
        wrong = [(c.label, f"{leaf.name} {leaf.problem}") for c in self.cases for leaf in c.leaves if not leaf.ok]
        noted = [(c.label, f"{leaf.name} {leaf.note}") for c in self.cases for leaf in c.leaves if leaf.note]
        broken = [(case.label, problem) for case in self.cases for problem in case.problems]
        skipped = [(case.label, f"left out, {case.skipped}") for case in self.cases if case.skipped]
        lines = [f"{label}: {text}" for label, text in (*broken, *wrong, *noted, *skipped)]
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def _verdict(self) -> str:
        tried = sum(case.skipped is None for case in self.cases)
        on = f"on {tried} {'set' if tried == 1 else 'sets'} of inputs"
        return f"verified {on}" if self.ok else f"NOT verified {on}"


_HEAD = ["inputs", "output", "dtype", "shape", "max abs", "max rel", "cosine", "error/reference's", "verdict"]


def _rows(case: Case) -> list[list[str]]:
    return [
        [
            case.label,
            leaf.name,
            leaf.dtype,
            "x".join(map(str, leaf.shape)) or "-",
            f"{leaf.max_abs:.2e}",
            f"{leaf.max_rel:.2e}",
            f"{leaf.cosine:.9f}",
            f"{leaf.ratio:.2f}",
            "ok" if leaf.ok else "WRONG",
        ]
        for leaf in case.leaves
    ]


def _excess(leaf: Leaf) -> float:
    if math.isnan(leaf.candidate_error) or leaf.allowed == 0:
        return math.inf
    return leaf.candidate_error / leaf.allowed


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
