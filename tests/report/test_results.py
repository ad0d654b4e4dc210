"""What happened at a site, as plain data."""

from __future__ import annotations

import torch
from torch import nn

import regraft as rg
from regraft.core.results import Drawer, Drawing


def drawn(model: nn.Module, *parts: rg.Transformation, x: torch.Tensor | None = None) -> list[Drawing]:
    gm = rg.trace(model.eval(), (torch.randn(2, 4) if x is None else x,))
    for part in parts:
        gm = part(gm)
    steps = rg.history(gm)
    found = [Drawer(gm, steps).draw(site) for step in steps for site in step.applied]
    return [drawing for drawing in found if drawing is not None]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.a(x), self.b(x)], -1))


def test_a_site_is_drawn_with_what_it_reads_and_what_reads_it() -> None:
    (drawing,) = drawn(Pair(), rg.MergeLinears())
    before = {node.name: node for node in drawing.before}
    after = {node.name: node for node in drawing.after}
    assert {name: node.touch for name, node in before.items()} == {
        "x": "around", "a": "changed", "b": "changed", "cat": "around"
    }  # fmt: skip
    assert {name: node.touch for name, node in after.items()} == {
        "x": "around", "a_b": "added", "a": "changed", "b": "changed", "cat": "around"
    }  # fmt: skip
    assert (before["a"].label, after["a"].label, after["a_b"].label) == ("Linear", "getitem", "Linear")
    assert after["b"].inputs == ("a_b",)
    assert after["b"].detail == "getitem(a_b, (..., 4:6))"
    assert after["a_b"].value == "float32 2 x 6"
    assert drawing.weights[0] == "a_b.weight from a.weight, b.weight"


def test_nodes_come_behind_what_they_read() -> None:
    for drawing in drawn(Pair(), rg.MergeLinears(), rg.FuseBiasInLinear()):
        for side in (drawing.before, drawing.after):
            seen: set[str] = set()
            for node in side:
                assert set(node.inputs) <= seen
                seen.add(node.name)


def test_a_site_is_drawn_as_it_was_then_whatever_was_done_since() -> None:
    merged, *_ = drawn(Pair(), rg.MergeLinears(), rg.FuseBiasInLinear())
    after = {node.name: node for node in merged.after}
    assert after["a_b"].detail == "a_b = Linear(in_features=4, out_features=6, bias=True)"
    assert after["a_b"].inputs == ("x",)


def test_a_node_that_went_is_in_one_picture_only() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU())
    (drawing,) = drawn(model, rg.FoldBatchNorm(), x=torch.randn(2, 4, 3))
    touches = {node.label: node.touch for node in drawing.before}
    assert touches["BatchNorm1d"] == "removed"
    assert "BatchNorm1d" not in {node.label for node in drawing.after}


def test_a_site_that_was_taken_back_can_still_be_drawn() -> None:
    gm = rg.MergeLinears()(rg.trace(Pair().eval(), (torch.randn(2, 4),)))
    steps = rg.history(gm)
    rg.undo(gm)
    drawing = Drawer(gm, steps).draw(steps[0].applied[0])
    assert drawing is not None
    assert {node.name for node in drawing.after} == {"x", "a_b", "a", "b", "cat"}
    assert {node.label for node in drawing.before} == {"input", "Linear", "cat"}
