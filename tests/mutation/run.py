"""Plants one bug at a time in the conditions and formulas of the rules, and counts how many the tests catch.

    python tests/mutation/run.py                      every mutant
    python tests/mutation/run.py --only _batch_norm   those of one file, or line: _batch_norm.py:99:
    python tests/mutation/run.py --sample 8           a few, the same ones each time
    python tests/mutation/run.py --part 0/2           the first of two halves, for a process of its own
    python tests/mutation/run.py --seed 0 --minutes 9 in a random order, until the time is over
    python tests/mutation/run.py --list               what would be planted

First the tests run without a bug, and `coverage` notes which test runs which line, and in what time. A mutant is a
module with one change in its syntax tree. It is imported, in place of the real one, by a fork of this process, which
has torch loaded already and runs the tests that reach the changed lines, the fastest first, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import pickle
import random
import select
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regraft"
TESTS = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests" / "mutation").glob("test_survivors*.py"))]
TESTS += ["tests/core", "tests/transformations"]
FIRST = 25
"""So many tests are collected and run before the rest is, because most bugs are caught by one of them."""

RULES = sorted(p for p in (SOURCE / "transformations").glob("*.py") if p.name != "__init__.py")
ORACLE = [SOURCE / "core" / name for name in ("query.py", "plainness.py", "strides.py", "flow.py", "values.py")]
FORMULAS = [*RULES, SOURCE / "core" / "weights.py"]

SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SWAPPED |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
SWAPPED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
SWAPPED |= {ast.And: ast.Or, ast.Or: ast.And}


Change = tuple[ast.AST, str, Callable[[ast.AST], None]]
"""Where, what, and how it is done to a node."""


@dataclass(frozen=True)
class Mutant:
    """One bug: where, what, and how it comes into the syntax tree."""

    path: Path
    line: int
    end: int
    what: str
    changes: Callable[[ast.AST], Iterator[Change]]
    position: int
    number: int

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT / "src").with_suffix("").parts)

    @property
    def source(self) -> str:
        """The whole module with the bug in it."""
        tree = ast.parse(self.path.read_text())
        target = list(ast.walk(tree))[self.position]
        list(self.changes(target))[self.number][2](target)
        return ast.unparse(ast.fix_missing_locations(tree))

    @property
    def place(self) -> str:
        """The file and the line."""
        return f"{self.path.relative_to(SOURCE)}:{self.line}:"

    def __str__(self) -> str:
        return f"{self.place} {self.what}"


def mutants(only: str = "") -> Iterator[Mutant]:
    """All of them, of the places (`core/weights.py:79`) that have one of the parts `only` (with commas) in them."""
    for paths, changes in ((FORMULAS, conditions_and_formulas), (ORACLE, questions)):
        for path in paths:
            for position, node in enumerate(ast.walk(ast.parse(path.read_text()))):
                for number, (at, what, _) in enumerate(changes(node)):
                    mutant = Mutant(path, at.lineno, at.end_lineno, what, changes, position, number)
                    if any(part in mutant.place for part in only.split(",")):
                        yield mutant


def questions(node: ast.AST) -> Iterator[Change]:
    """A question that always answers that all is well."""
    returns = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns is not None else ""
    if returns in ("Answer", "str | None") and node.name not in ("that", "require"):
        yield node, f"{node.name}() answers None", lambda n: setattr(n, "body", [ast.Return(ast.Constant(None))])


def conditions_and_formulas(node: ast.AST) -> Iterator[Change]:
    """A condition left out; an operator, an axis, an operand or a branch that is another."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
        for index, argument in enumerate(node.args):
            yield argument, f"without require({short(argument)})", lambda n, i=index: n.args.pop(i)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        other = SWAPPED[type(node.op)]
        yield node, f"{short(node)}: {other.__name__}", lambda n: setattr(n, "op", other())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        other = SWAPPED[type(node.ops[0])]
        yield node, f"{short(node)}: {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"{short(node)}: without not", without_not
    elif isinstance(node, ast.IfExp):
        yield node, f"{short(node)}: branches swapped", swap_branches
    elif isinstance(node, ast.Call):
        for index, argument in enumerate(node.args):
            if isinstance(argument, ast.Constant) and type(argument.value) is int:
                yield node, f"{short(node)}: {argument.value + 1}", lambda n, i=index: next_number(n.args[i])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "rsqrt":
            yield node, f"{short(node)}: sqrt", lambda n: setattr(n.func, "attr", "sqrt")


def without_not(node: ast.AST) -> None:
    node.op, node.operand = ast.UAdd(), ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])


def next_number(node: ast.AST) -> None:
    node.value += 1


def swap_branches(node: ast.AST) -> None:
    node.body, node.orelse = node.orelse, node.body


def short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) < 60 else f"{text[:57]}..."


@dataclass
class Reached:
    """Which tests run which lines of the source, by a run without a bug."""

    seconds: dict[str, float]
    """Of each test that passed."""
    tests: dict[tuple[str, int], set[str]]
    """By file and line; "" among them where the line runs when it is imported."""

    def by(self, mutant: Mutant) -> list[str]:
        """The tests that run a changed line, the fastest first; all of them for what runs at import."""
        lines = [self.tests.get((str(mutant.path), line), set()) for line in range(mutant.line, mutant.end + 1)]
        found = set[str]().union(*lines)
        if not found - {""} and found:
            found = set(self.seconds)
        return sorted(found & set(self.seconds), key=lambda test: self.seconds[test])


def reached(tests: Iterable[str]) -> Reached:
    """Run the tests without a bug, twice: with coverage, and in the order in which mutants meet them."""
    _, found = run(None, tests, timeout=3600, cover=True)
    seconds = {test: took for test, (passed, took, _) in found.items() if passed}
    covered = defaultdict[tuple[str, int], set[str]](set)
    for test, (_, _, lines) in found.items():
        for place in lines:
            covered[place].add(test)
    _, again = run(None, sorted(seconds, key=lambda test: seconds[test]), timeout=3600)
    for test in [test for test in seconds if test not in again or not again[test][0]]:
        print(f"left out, because it fails without a mutant: {test}")
        del seconds[test]
    return Reached(seconds, covered)


def caught_by(mutant: Mutant, tests: list[str], known: Reached) -> str | None:
    """The test that fails with the bug; None if none does."""
    for some in (tests[:FIRST], tests[FIRST:]):
        if some:
            passed, found = run(mutant, some, timeout=60 + 4 * sum(known.seconds[test] for test in some))
            if not passed:
                return next((test for test, (right, *_) in found.items() if not right), "a crash")
    return None


Outcome = dict[str, tuple[bool, float, list[tuple[str, int]]]]
"""By test: whether it passed, in how many seconds, and the files and lines that it ran where that was asked for."""


def run(mutant: Mutant | None, tests: Iterable[str], *, timeout: float, cover: bool = False) -> tuple[bool, Outcome]:
    """Run tests in a fork; whether they all passed, and what came of each."""
    tests = list(tests)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            code, outcome = in_child(mutant, tests, cover)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(outcome, pipe)
        except BaseException:
            code = 3
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], timeout)
        if not ready:
            os.kill(child, 9)
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return status == 0, pickle.loads(text) if text else {"" if ready else "timeout": (False, 0.0, [])}


def in_child(mutant: Mutant | None, tests: list[str], cover: bool) -> tuple[int, Outcome]:
    import pytest
    from coverage import Coverage

    outcome: Outcome = {}
    coverage = Coverage(data_file=None, include=[f"{SOURCE}/*"]) if cover else None
    order = {test: index for index, test in enumerate(tests)}

    class Plugin:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            if "::" in tests[0]:
                items[:] = sorted((i for i in items if i.nodeid in order), key=lambda item: order[item.nodeid])

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            outcome[nodeid] = (True, 0.0, [])
            if coverage is not None:
                coverage.switch_context(nodeid)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            passed, seconds, lines = outcome[report.nodeid]
            outcome[report.nodeid] = (passed and not report.failed, seconds + report.duration, lines)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                outcome[report.nodeid] = (False, 0.0, [])

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("regraft", "tests", "helpers", "conftest")]:
        del sys.modules[name]
    if mutant is not None:
        sys.meta_path.insert(0, Planted(mutant))
    options = ["-q", "--import-mode=importlib", "--override-ini=addopts=", f"--rootdir={ROOT}"]
    options += ["-p", "no:cacheprovider", "-p", "no:benchmark", *(["-x"] if mutant else [])]
    files = dict.fromkeys(str(ROOT / test.partition("::")[0]) for test in tests)
    if coverage is None:
        return int(pytest.main([*options, *files], plugins=[Plugin()])), outcome
    coverage.start()
    code = int(pytest.main([*options, *files], plugins=[Plugin()]))
    coverage.stop()
    data = coverage.get_data()
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                outcome.setdefault(context, (False, 0.0, []))[2].append((path, line))
    return code, outcome


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant where the real module is asked for."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name, path=None, target=None):
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.mutant.source, str(self.mutant.path), "exec"), module.__dict__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="parts of their places, with commas: weights.py,query.py:99:")
    parser.add_argument("--sample", type=int, help="so many of them, spread evenly")
    parser.add_argument("--but", default="", help="not these, likewise")
    parser.add_argument("--seed", type=int, help="in the random order of this seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after so many")
    parser.add_argument("--part", default="0/1", help="the k-th of n parts: 0/2, 1/2")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders with the tests to choose from")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    found = list(mutants(options.only))
    if options.but:
        found = [mutant for mutant in found if not any(part in mutant.place for part in options.but.split(","))]
    there = Counter(mutant.path for mutant in found)
    if options.seed is not None:
        random.Random(options.seed).shuffle(found)
    if options.sample:
        found = found[:: max(len(found) // options.sample, 1)][: options.sample]
    part, parts = map(int, options.part.split("/"))
    found = found[part::parts]
    if options.list:
        print("\n".join(map(str, found)))
        return 0
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import coverage  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch.export

    import regraft
    from regraft.testing import fuzz

    torch.set_num_threads(1)
    fuzz(regraft.MergeLinears(), examples=3)  # what torch loads late is loaded before the forks
    known = reached(options.tests)
    print(f"{len(known.seconds)} tests in {sum(known.seconds.values()):.0f} seconds", flush=True)
    survivors: list[Mutant] = []
    planted: list[Mutant] = []
    end = time.monotonic() + 60 * options.minutes
    for number, mutant in enumerate(found, 1):
        if time.monotonic() > end:
            break
        tests = known.by(mutant)
        by = caught_by(mutant, tests, known)
        planted.append(mutant)
        survivors += [mutant] * (by is None)
        result = f"SURVIVED {len(tests)} tests" if by is None else f"caught by {by}"
        print(f"{number}/{len(found)} {mutant}  {result}", flush=True)
    print()
    ran, alive = Counter(mutant.path for mutant in planted), Counter(mutant.path for mutant in survivors)
    for path in sorted(ran):
        print(f"{path.relative_to(SOURCE)}: {ran[path]} of {there[path]} run, {ran[path] - alive[path]} caught")
    print(f"{len(planted) - len(survivors)} of {len(planted)} mutants caught")
    print("\n".join(f"  survived: {mutant}" for mutant in survivors))
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
