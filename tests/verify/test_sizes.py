"""Graphs with dynamic shapes are tried at other sizes."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim

import regraft as rg
from regraft.core.errors import NotCovered
from regraft.verify import verify
from regraft.verify.sizes import Axis, Dynamic, other_sizes


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * mask[..., None]
        return self.out(hidden.sum(1)) * scale


def exported(model: nn.Module, args: Any, kwargs: Any, extra: bool = False) -> Any:
    batch, length = Dim("batch"), Dim("length")
    both = {0: batch, 1: length}
    shapes = {"ids": both, "mask": both, "scale": {0: batch}}
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)


@pytest.fixture
def call() -> tuple[Any, Any]:
    torch.manual_seed(0)
    ids, mask = torch.randint(1, 10, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:], ids[0, 3:] = 0, 0
    return (ids,), {"scale": torch.rand(2, 1), "mask": mask}


@pytest.mark.parametrize("kind", ["program", "module"])
def test_other_sizes_are_tried(call: tuple[Any, Any], kind: str) -> None:
    model = Tokens().eval()
    program = exported(model, *call)
    result = verify(model, program if kind == "program" else program.module(), *call)
    assert result.ok, result
    shapes = {case.label for case in result.cases}
    assert len(shapes) >= 3
    assert all(case.skipped is None for case in result.cases)
    assert len(verify(model, program, *call, vary_sizes=False).cases) == 2


def test_of_a_sample_that_takes_long_there_are_fewer_rows_and_no_shorter_ones() -> None:
    batch, masked, length = sympy.symbols("s0 s1 s2")
    axes = (Axis("ids", 0, batch), Axis("ids", 1, length), Axis("mask", 0, masked), Axis("mask", 1, length))
    for rows, fewer in ((9, 4), (3, 2), (2, 1), (1, 2)):
        dynamic = Dynamic(axes, {batch: rows, masked: rows, length: 5}, dict.fromkeys((batch, masked, length), (1, 99)))
        longer, ones = other_sizes(dynamic, few_rows=True)
        assert longer == {batch: fewer, masked: fewer, length: 7}
        assert ones == {batch: 1, masked: 1, length: 1}
        assert other_sizes(dynamic)[0] == {batch: rows + 1, masked: rows + 1, length: 7}


@pytest.mark.parametrize(("long", "sizes"), [(0.0, "4x7"), (math.inf, "10x7")])
def test_what_takes_long_is_what_the_sample_took(call: tuple[Any, Any], monkeypatch, long: float, sizes: str) -> None:
    monkeypatch.setattr(sys.modules["regraft.verify.verify"], "_LONG", long)
    rows = [tensor.repeat(5, 1)[:9] for tensor in (call[0][0], *call[1].values())]
    inputs = (rows[0],), dict(zip(call[1], rows[1:]))
    result = verify(model := Tokens().eval(), exported(model, *inputs), *inputs)
    assert result.ok
    assert result.cases[2].label.startswith(f"args[0] {sizes},")


def test_a_mistake_at_other_sizes_only_is_seen(call: tuple[Any, Any]) -> None:
    class Baked(Tokens):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(ids, mask, scale) + (ids.shape[1] - 5) * 0.01

    model = Tokens().eval()
    baked = Baked().eval()
    baked.load_state_dict(model.state_dict())
    result = verify(model, exported(baked, *call), *call)
    assert result.cases[0].ok
    assert not result.ok
    assert not verify(model, exported(baked, *call), *call).cases[2].ok


def test_token_ids_and_masks_stay_valid_and_together(call: tuple[Any, Any]) -> None:
    seen = []

    class Looks(Tokens):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            seen.append((ids, mask, scale))
            return super().forward(ids, mask, scale)

    model = Tokens().eval()
    looks = Looks().eval()
    looks.load_state_dict(model.state_dict())
    (ids,), kwargs = call
    program = exported(model, *call)
    seen.clear()
    assert verify(looks, program, *call).ok
    assert len({i.shape for i, _, _ in seen}) >= 3
    for i, m, s in seen:
        assert i.shape == m.shape
        assert s.shape[0] == i.shape[0]
        assert set(i.unique().tolist()) <= set(ids.unique().tolist())
        assert torch.equal(i == 0, m == 0)
        assert s.float().max() <= kwargs["scale"].max() + 1e-6


def test_sizes_that_the_reference_refuses_are_left_out_and_said(call: tuple[Any, Any]) -> None:
    class Short(Tokens):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > 5:
                raise ValueError("too long")
            return super().forward(ids, mask, scale)

    short = Short().eval()
    model = Tokens().eval()
    model.load_state_dict(short.state_dict())
    result = verify(short, exported(model, *call), *call)
    assert result.ok
    assert any(case.skipped for case in result.cases)
    assert "too long" in str(result)


def test_sizes_that_the_graph_itself_refuses_are_left_out_and_said(call: tuple[Any, Any]) -> None:
    model = Tokens().eval()
    gm = exported(model, *call).module()
    inner = gm.forward
    sample = call[1]["mask"].shape if "mask" in call[1] else None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs["mask"].shape != sample:
            raise NotCovered("the captured graph holds only where x.shape[0] != 1")
        return inner(*args, **kwargs)

    gm.forward = forward
    result = verify(model, gm, *call)
    assert result.ok
    assert "holds only where" in str(result)
    other = {name: tensor[:1] for name, tensor in call[1].items()}
    assert not verify(model, gm, *call, extra_inputs=[(call[0], other)]).ok  # but not where it was asked for


class Narrowing(nn.Module):
    """Its images must have four rows or more, of which a program of torch.export makes a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu().mean((2, 3))


@pytest.mark.parametrize("kind", ["program", "module"])
def test_sizes_that_a_program_guards_against_are_left_out_and_said(kind: str) -> None:
    model, x = Narrowing().eval(), torch.randn(2, 2, 8, 9)
    program = torch.export.export(model, (x,), dynamic_shapes=((Dim.AUTO, Dim.STATIC, Dim.AUTO, Dim.AUTO),))
    candidate = program if kind == "program" else program.module()
    result = verify(model, candidate, (x,))
    assert result.ok, result
    assert any("the captured graph refuses these sizes" in str(case.skipped) for case in result.cases), result
    # what was given is not left out
    refused = verify(model, candidate, (x,), extra_inputs=[(torch.randn(2, 2, 3, 3),)])
    assert not refused.ok
    assert "Guard failed" in str(refused)


def test_a_size_of_one_is_tried_where_the_graph_takes_it() -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(5, 4)
    gm = rg.trace(model, (x,), dynamic_shapes="auto")
    assert gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0].node.expr.is_Symbol

    def mistaken(x: torch.Tensor) -> torch.Tensor:
        return gm(x).squeeze(0)

    mistaken.graph = gm.graph  # type: ignore[attr-defined]
    result = verify(model, mistaken, (x,))
    assert [case.label for case in result.cases if not case.ok] == ["args[0] 1x4"], result


def test_static_graphs_are_tried_at_their_size_only(call: tuple[Any, Any]) -> None:
    model = Tokens().eval()
    program = torch.export.export(model, *call)
    assert [case.label for case in verify(model, program, *call).cases][1:] == ["other values of the same sizes"]
