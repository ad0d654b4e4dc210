"""Plants one bug at a time in the conditions and formulas of the rules, and counts how many the tests catch.

    python tests/mutation/run.py                      every mutant
    python tests/mutation/run.py --only _batch_norm   those of one file, or line: _batch_norm.py:99:
    python tests/mutation/run.py --sample 8           a few, the same ones each time
    python tests/mutation/run.py --seed 0 --minutes 9 in a random order, until the time is over
    python tests/mutation/run.py --list               what would be planted

A mutant is a module with one change in its syntax tree. It is imported, in place of the real one, by a fork of this
process, which has torch loaded already and runs the tests that the module has until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regraft"
SECONDS = 240

RULES = sorted(p for p in (SOURCE / "transformations").glob("*.py") if p.name != "__init__.py")
ORACLE = [SOURCE / "core" / name for name in ("query.py", "plainness.py", "strides.py", "flow.py", "values.py")]
SHARED = ["merge_linears", "fuse_bias", "change_true_div", "fold_batch_norm"]
"""Their tests stand for all in what all rules share."""
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
                    mutant = Mutant(path, getattr(at, "lineno", 0), what, changes, position, number)
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


def tests_of(mutant: Mutant) -> list[str]:
    """The tests of a rule; of the rules that import a module or ask a question; of a few for what all rules share."""
    path, here, found = mutant.path, ROOT / "tests", list[Path]()
    if path.parent.name == "transformations":
        found = of_rules(rules_with(path))
    else:
        question = mutant.what.partition("(")[0]
        asking = [rule for rule in RULES if f"facts.{question}(" in rule.read_text()]
        found = of_rules([*SHARED, *(stem for rule in asking for stem in rules_with(rule))])
    weights = ("test_checkpoint.py", "test_scaled.py") if path.name in ("weights.py", "_batch_norm.py") else ()
    shared = [here / "core" / name for name in weights]
    return [*dict.fromkeys(map(str, (here / "mutation" / "test_survivors.py", *found, *shared)))]


def of_rules(stems: list[str]) -> list[Path]:
    return [p for stem in stems for p in sorted((ROOT / "tests" / "transformations").glob(f"test_*{stem}*.py"))]


def rules_with(path: Path) -> list[str]:
    """The rule itself, or those that import what is none, as parts of the names of their tests."""
    if of_rules([path.stem.lstrip("_")]):
        return [path.stem.lstrip("_")]
    users = [rule for rule in RULES if f"transformations.{path.stem} " in rule.read_text()]
    return [stem for user in users for stem in rules_with(user)]


def run(
    mutant: Mutant | None, tests: list[str], left_out: tuple[str, ...] = (), fast: bool = False
) -> tuple[bool, str]:
    """Run tests in a fork; whether they all passed, and which failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os._exit(in_child(mutant, tests, left_out, fast, write))
    os.close(write)
    deadline, status = time.monotonic() + SECONDS, None
    while status is None and time.monotonic() < deadline:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid else time.sleep(0.02)
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        failed = pipe.read()
    return status == 0, failed if status is not None else "timeout"


def in_child(mutant: Mutant | None, tests: list[str], left_out: tuple[str, ...], fast: bool, write: int) -> int:
    import pytest

    class Failures:
        def pytest_runtest_logreport(self, report) -> None:
            if report.failed:
                os.write(write, f"{report.nodeid}\n".encode())

        def pytest_collectreport(self, report) -> None:
            if report.failed:
                os.write(write, f"{report.nodeid}\n".encode())

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("regraft", "tests", "helpers", "conftest")]:
        del sys.modules[name]
    if mutant is not None:
        sys.meta_path.insert(0, Planted(mutant))
    options = [
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--override-ini=addopts=",
        f"--rootdir={ROOT}",
    ]
    options += [f"--deselect={test}" for test in left_out]
    options += ["-k", "not trace"] if fast else []
    return int(pytest.main([*options, *(["-x"] if mutant else []), *tests], plugins=[Failures()]))


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
    parser.add_argument(
        "--thorough", action="store_true", help="with the tests that trace, which take most of the time"
    )
    parser.add_argument("--trust", action="store_true", help="that the tests pass where no bug is planted")
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
    os.environ["REGRAFT_MUTANT"] = "1"
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch.export

    import regraft
    from regraft.testing import fuzz

    torch.set_num_threads(1)
    fuzz(regraft.MergeLinears(), examples=3)  # what torch loads late is loaded before the forks
    passing, broken = set[str](), set[str]()
    survivors: list[Mutant] = []
    planted: list[Mutant] = []
    end = time.monotonic() + 60 * options.minutes
    for number, mutant in enumerate(found, 1):
        if time.monotonic() > end:
            break
        tests = tests_of(mutant)
        survived, by = run(mutant, tests, tuple(broken), not options.thorough)
        while (
            not options.trust
            and not survived
            and (test := by.partition("\n")[0]) not in passing
            and "::" in test
            and test not in broken
        ):
            passed, _ = run(None, [str(ROOT / test)], fast=not options.thorough)
            (passing if passed else broken).add(test)
            if not passed:  # what fails without a mutant says nothing
                print(f"left out, because it fails without a mutant: {test}")
                survived, by = run(mutant, tests, tuple(broken), not options.thorough)
        planted.append(mutant)
        survivors += [mutant] * survived
        by = f"by {by.splitlines()[0]}" if by else ""
        print(f"{number}/{len(found)} {'SURVIVED' if survived else 'caught'} {mutant}  {by}", flush=True)
    print()
    ran, alive = Counter(mutant.path for mutant in planted), Counter(mutant.path for mutant in survivors)
    for path in sorted(ran):
        print(f"{path.relative_to(SOURCE)}: {ran[path]} of {there[path]} run, {ran[path] - alive[path]} caught")
    print(f"{len(planted) - len(survivors)} of {len(planted)} mutants caught")
    print("\n".join(f"  survived: {mutant}" for mutant in survivors))
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
