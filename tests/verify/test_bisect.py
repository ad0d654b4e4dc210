"""Bisection, against an engine of the test's own: a chain of additions, each of which can be taken back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from regraft.core.errors import ReversalConflict
from regraft.verify import bisect


@dataclass(frozen=True)
class FakeSite:
    id: int
    where: str
    sentence: str


@dataclass(frozen=True)
class FakeStep:
    id: int
    transformation: str
    applied: tuple[FakeSite, ...]


class Terms(nn.Module):
    """x plus the terms that sites put in; a rewrite that is right puts in zero."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ParameterDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.terms.values():
            x = x + value
        return x


class FakeJournal:
    def __init__(self, sizes: tuple[int, ...], whole_steps: bool = False) -> None:
        numbers = iter(range(sum(sizes)))
        self.whole_steps = whole_steps
        self.steps = tuple(
            FakeStep(k + 1, f"Rule{k}", tuple(FakeSite(i, f"layer.{i}", f"merged {i}") for i in (next(numbers),) * 1))
            if size == 1
            else FakeStep(
                k + 1,
                f"Rule{k}",
                tuple(FakeSite(i, f"layer.{i}", f"merged {i}") for i in (next(numbers) for _ in range(size))),
            )
            for k, size in enumerate(sizes)
        )

    def history(self, gm: fx.GraphModule) -> tuple[FakeStep, ...]:
        return self.steps

    def undo(self, gm: Any, step: Any, site: Any) -> None:
        if site is not None and self.whole_steps:
            raise ReversalConflict("sites of this step stand on each other")
        for one in step.applied if site is None else (site,):
            del gm.inner.terms[str(one.id)]


def graph_with(errors: dict[int, float], count: int) -> fx.GraphModule:
    inner = Terms()
    for i in range(count):
        inner.terms[str(i)] = nn.Parameter(torch.full((1,), errors.get(i, 0.0)))
    root = nn.Module()
    root.inner = inner
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    return fx.GraphModule(root, graph)


X = torch.linspace(0.5, 2.0, 16)


@pytest.mark.parametrize("culprit", [0, 1, 13, 14, 31])
def test_the_culprit_is_found_in_logarithmic_time(culprit: int) -> None:
    journal = FakeJournal((1, 13, 10, 8))
    gm = graph_with({culprit: 1e-3}, 32)
    found = bisect(nn.Identity(), gm, (X,), journal=journal)
    assert found.where == f"layer.{culprit}"
    step = next(s for s in journal.steps if any(site.id == culprit for site in s.applied))
    assert (found.step, found.transformation) == (step.id, step.transformation)
    assert found.runs <= math.log2(32) + 3
    assert found.alone is True
    assert f"merged {culprit}" in str(found)
    assert not found.verification.ok
    assert len(gm.inner.terms) == 32  # type: ignore[union-attr, arg-type]


def test_the_first_of_several() -> None:
    found = bisect(nn.Identity(), graph_with({9: 1e-3, 4: 1e-3, 20: 1.0}, 32), (X,), journal=FakeJournal((32,)))
    assert not found.verification.ok
    assert found.where in {"layer.4", "layer.9", "layer.20"}


def test_a_rewrite_that_is_wrong_only_together_with_another() -> None:
    # Each alone stays below the tolerance.
    found = bisect(nn.Identity(), graph_with({2: 6e-4, 5: 6e-4}, 8), (X,), journal=FakeJournal((8,)), atol=1e-3)
    assert found.where == "layer.5"
    assert found.alone is False
    assert "only with earlier" in str(found)


def test_whole_steps_where_sites_stand_on_each_other() -> None:
    journal = FakeJournal((4, 4, 4), whole_steps=True)
    found = bisect(nn.Identity(), graph_with({6: 1e-3}, 12), (X,), journal=journal)
    assert (found.step, found.transformation) == (2, "Rule1")
    assert "layer.6" in str(found.where)
    assert found.note is not None


def test_a_graph_that_was_wrong_from_the_start() -> None:
    found = bisect(lambda x: x + 1, graph_with({}, 4), (X,), journal=FakeJournal((4,)))
    assert found.transformation is None
    assert "captured" in str(found)
    assert "undo" not in found.script


def test_nothing_to_find_and_nothing_to_search() -> None:
    with pytest.raises(ValueError, match="no culprit"):
        bisect(nn.Identity(), graph_with({}, 4), (X,), journal=FakeJournal((4,)))
    with pytest.raises(TypeError, match=r"regraft\.trace"):
        bisect(nn.Identity(), nn.Identity(), (X,))  # type: ignore[arg-type]
    for reference, args in ((nn.Identity(), X), (nn.Identity(), ()), (3, (X,))):
        with pytest.raises(TypeError, match=r"bisect\(reference, gm, args="):
            bisect(reference, graph_with({}, 4), args, journal=FakeJournal((4,)))  # type: ignore[arg-type]


def test_the_script_is_python_and_loads_what_is_written(tmp_path: Path) -> None:
    gm = graph_with({3: 1e-3}, 4)
    found = bisect(nn.Identity(), gm, (X,), journal=FakeJournal((4,)))
    compile(found.script, "script", "exec")
    assert "regraft.undo(gm, 1, site=3)" in found.script
    path = found.write(tmp_path / "why.py")
    assert path.read_text().count("why.pt") == 1
    case = torch.load(tmp_path / "why.pt", weights_only=False)
    assert torch.equal(case["args"][0], X)
    assert list(case["gm"].inner.terms) == ["3"]  # the culprit alone


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    found = bisect(lambda x: x, graph_with({0: 1e-3}, 1), (X,), journal=FakeJournal((1,)))
    with pytest.raises(TypeError, match="the reference cannot be saved"):
        found.write(tmp_path / "why.py")
    assert not list(tmp_path.iterdir())
