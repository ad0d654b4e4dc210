"""A rewrite of a user's that changes something past its `edit` fails, and leaves everything as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, assert_same, capture, picture, randomise
from regraft.core.vocabulary import MULTIPLY


class Past(rg.Rewrite):
    """Drops multiplications by one, and does something beside."""

    preserves_computation = False
    pattern = rg.Calls(MULTIPLY)

    def __init__(self, before: Callable[[Any, Any], object] | None = None, after: Any = None) -> None:
        self.before, self.after = before, after

    def rewrite(self, match, edit, facts):
        if self.before is not None:
            self.before(match, edit)
        rg.require(rg.that(match.call["other"] != 7, "by seven"))
        edit.replace(match.call.node, torch.add, match.call.input, 1)
        if self.after is not None:
            self.after(match, edit)
        return "added one"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.layer(x) * 3).neg() * 5


def other(match, name="neg"):
    return next(n for n in match.owner.graph.nodes if n.name == name)


def double(match, edit):
    with torch.no_grad():
        match.owner.get_submodule("layer").weight.mul_(2)


def retarget(match, edit):
    node = other(match)
    node.target = "abs"


def own_node(match, edit):
    match.call.node.target = torch.sub


PAST = {
    "another node": retarget,
    "its own node": own_node,
    "a layer": lambda match, edit: setattr(match.owner, "act", nn.Tanh()),
    "a new node": lambda match, edit: match.owner.graph.call_function(torch.neg, (match.call.node,)),
    "a weight": double,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", PAST)
def test_what_is_changed_past_the_edit_is_put_back_and_said(what, when, form):
    if (what, when) == ("its own node", "after"):
        pytest.skip("what a node is after its edit is what the edit has made of it")
    model = randomise(Net()).eval()
    gm = capture(model, (torch.randn(2, 4),), form)
    known, caller = picture(gm), picture(model)
    rewrite = Past(**{when: PAST[what]})
    for call in (rewrite, rewrite.explain, rg.compose(rewrite)):
        with pytest.raises(rg.RegraftError, match=r"Past\.rewrite (changed|wrote to) '.*edit\."):
            call(gm)
        assert_same(known, picture(gm))
        assert_same(caller, picture(model))
        assert not rg.history(gm)


def test_also_where_the_site_is_refused():
    gm = rg.symbolic_trace(Sevens())
    known = picture(gm)
    with pytest.raises(rg.RegraftError, match="changed 'mul' by itself"):
        Past(before=own_node)(gm)
    assert_same(known, picture(gm))


class Sevens(nn.Module):
    def forward(self, x):
        return x * 7


def test_what_goes_through_the_edit_is_fine():
    model = randomise(Net()).eval()
    gm = Past()(capture(model, (torch.randn(2, 4),), "fx"))
    assert not gm.graph.find_nodes(op="call_function", target=operator.mul)
    assert len(rg.history(gm)[-1].applied) == 2
    rg.undo(gm)
    x = torch.randn(2, 4)
    assert torch.equal(gm(x), model(x))
