"""Tables in a terminal: drawn by rich where it is installed and somebody looks on, plain text otherwise."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from regraft.core.report import Report
from regraft.report.result import Result
from regraft.verify import Comparison, Verification

_WIDEST = 100  # of the last column of a plain table, which holds the sentences

GOOD, BAD, DIM = "green", "red", "dim"


@dataclass(frozen=True)
class Table:
    """A table to be shown.

    Attributes:
        title: The line above it.
        columns: The heads.
        rows: The cells, as text.
        styles: A style for each row: `GOOD`, `BAD`, `DIM` or nothing; empty where no row has one.
        notes: Lines below.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The table as plain text, which programs can read and files can hold.

        >>> print(Table("sites", ("site", "what"), (("layer.0", "merged"), ("fc", "not merged"))))
        sites
          site     what
          layer.0  merged
          fc       not merged
        """
        rows = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns) - 1)]
        lines = [self.title]
        for row in rows:
            start = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
            sentence = textwrap.wrap(row[-1], _WIDEST, break_long_words=False, break_on_hyphens=False) or [""]
            lines += [(start if i == 0 else " " * len(start)) + line for i, line in enumerate(sentence)]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])


def show(shown: Table | str, file: Any = None) -> None:
    """Print a table, or a line, to a terminal or a file.

    Args:
        shown: what to print.
        file: standard output by default.
    """
    file = sys.stdout if file is None else file
    console = _console(file)
    if console is None:
        print(shown, file=file)
    elif isinstance(shown, str):
        console.print(shown, markup=False, highlight=False)
    else:
        _draw(shown, console)


def _draw(table: Table, console: Any) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(table.columns):
        # A name that is cut can be looked for nowhere, so names are folded rather than cut.
        drawn.add_column(name, overflow="fold", ratio=1 if i == len(table.columns) - 1 else None)
    for i, row in enumerate(table.rows):
        drawn.add_row(*map(Text, row), style=table.styles[i] if table.styles else None)
    console.print(drawn)
    for note in table.notes:
        console.print(note, markup=False, highlight=False)


@contextmanager
def working(sentence: str) -> Iterator[None]:
    """Say on a terminal, for as long as it takes, what is being done.

    Args:
        sentence: what is being done.
    """
    console = _console(sys.stderr)
    if console is None:
        yield
        return
    with console.status(sentence):
        yield


def _console(file: Any) -> Any:
    """A console of rich, or None where rich is not installed or nobody looks on."""
    if not getattr(file, "isatty", lambda: False)():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=file)


def sites(report: Report) -> Table:
    """The sites of a report, with what was done there or why not.

    Args:
        report: what `explain` gave.
    """
    rows = tuple(report.rows())
    styles = tuple(GOOD if row[1] == "applied" else DIM for row in rows)
    idle = [step.transformation for step in report.steps if not step.applied and not step.refused]
    notes = (f"no candidate site was found for {', '.join(idle)}",) if idle else ()
    title = f"{report.applied} {_sites(report.applied)} would be rewritten, {report.refused} refused"
    return Table(title, ("transformation", "outcome", "site", "what is done, or why not"), rows, styles, notes)


def _sites(count: int) -> str:
    return "site" if count == 1 else "sites"


def verification(result: Verification) -> Table:
    """A verification, a line per output.

    Args:
        result: what `verify` gave.
    """
    rows, styles = [], []
    for case in result.cases:
        for leaf in case.leaves:
            error = f"{leaf.candidate_error:.2e} of {leaf.allowed:.2e} allowed, {leaf.ratio:.2f}x the model's own"
            rows.append((case.label, leaf.name, leaf.dtype, "ok" if leaf.ok else "WRONG", leaf.problem or error))
            styles.append(GOOD if leaf.ok else BAD)
    notes = [f"{case.label}: {problem}" for case in result.cases for problem in case.problems]
    notes += [f"{case.label}: left out, {case.skipped}" for case in result.cases if case.skipped]
    tried = sum(case.skipped is None for case in result.cases)
    verdict = f"{'verified' if result.ok else 'NOT verified'} on {tried} {'set' if tried == 1 else 'sets'} of inputs"
    columns = ("inputs", "output", "dtype", "verdict", "error against float64")
    return Table(verdict, columns, tuple(rows), tuple(styles), (*notes, *(f"note: {note}" for note in result.notes)))


def comparison(result: Comparison) -> Table:
    """A measurement, a line for each of the two.

    Args:
        result: what `compare_speed` gave.
    """
    baseline, candidate = result.baseline_seconds * 1e3, result.candidate_seconds * 1e3
    rows = (("model", f"{baseline:.4g} ms", "1"), ("candidate", f"{candidate:.4g} ms", result.describe()))
    style = GOOD if result.faster else BAD if result.slower else ""
    return Table(result.reason.partition(":")[0], ("", "median of a call", "ratio"), rows, ("", style))


def optimized(result: Result) -> Table:
    """What `optimize` did, a line per transformation.

    Args:
        result: what it gave.
    """
    rows, styles = [], []
    for step in result.steps:
        outcome = "kept" if step.kept else "taken back" if step.applied else "nothing"
        name = step.transformation.removesuffix("()")
        rows.append((step.graph, name, str(step.applied), str(step.refused), outcome, step.reason))
        styles.append(GOOD if step.kept else DIM)
    notes = [f"{graph.name}: {graph.verdict}" for graph in result.graphs]
    if result.verification is not None:
        notes.append(verification(result.verification).title)
    kept = sum(step.kept for step in result.steps)
    columns = ("graph", "transformation", "applied", "refused", "outcome", "why")
    title = f"{kept} of {len(rows)} transformations kept"
    return Table(title, columns, tuple(rows), tuple(styles), (*notes, *(f"note: {note}" for note in result.notes)))
