"""A fault at every single edit of every rule: nothing may differ afterwards, and the rule still works."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

import regraft as rg
from regraft.core import edit, history, states
from regraft.core.edit import Edit
from regraft.core.graph_module import adopt
from regraft.core.query import Facts
from regraft.core.weights import Derivation
from regraft.testing import assert_same_picture, picture
from regraft.testing.parts import randomised

EDITS = [name for name, value in vars(Edit).items() if callable(value) and name not in ("__init__", "rollback")]
FACTS = ["note", "forget", "add", "remove", "follow"]
LOW = [(Graph, name) for name in ("create_node", "erase_node", "lint")]
LOW += [(Node, "replace_all_uses_with"), (edit, "write_slot"), (edit, "clone_module"), (torch, "cat")]
LOW += [(GraphModule, "recompile"), (history, "lint_and_recompile")]
PLACES = [*((Edit, name) for name in EDITS), *((Facts, name) for name in FACTS), *LOW]


class Fault(Exception):
    pass


class Net(nn.Module):
    """Sites for every rule, several of them for most; layers called as functions too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(4, 2)
        self.out, self.norm3 = nn.Linear(8, 3), nn.BatchNorm1d(3)
        self.weight, self.bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))
        self.register_buffer("constant", torch.tensor(3.0))

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm(self.conv(x)))).mean((2, 3)) / 7
        z = torch.relu(torch.cat([self.q(y), self.k(y), self.v(y)], -1) / self.constant)
        unread = z.exp().sin()  # noqa: F841
        return F.linear(self.norm3(self.out(z)), self.weight, self.bias), torch.relu(z) + torch.relu(z)


def made() -> tuple[nn.Module, GraphModule]:
    model = randomised(Net()).eval()
    return model, adopt(torch.fx.symbolic_trace(model))


@contextmanager
def failing(owner, name: str, call: int, afterwards: bool) -> Iterator[Callable[[], bool]]:
    """Call number `call` of a function raises, once: before it does its work, or after."""
    real, calls = getattr(owner, name), 0

    def function(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not afterwards:
            raise Fault(name)
        result = real(*args, **kwargs)
        if calls == call:
            raise Fault(name)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function)
        yield lambda: calls >= call


@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("rule", rg.TRANSFORMATIONS, ids=lambda rule: rule.__name__)
def test_a_fault_at_every_edit_leaves_nothing_behind(rule: type[rg.Transformation], afterwards: bool) -> None:
    model, gm = made()
    callers, before, graph = picture(model), picture(gm), [dict(node.meta) for node in gm.graph.nodes]
    faults = 0
    for owner, name in PLACES:
        call = 1
        while call < 100:
            with failing(owner, name, call, afterwards) as reached, suppress(Fault):
                rule()(gm)
            where = f"a fault {'after' if afterwards else 'at'} {getattr(owner, '__name__', owner)}.{name} #{call}"
            if not reached():
                rg.undo(gm) if rg.history(gm) else None
                break
            assert_same_picture(before, picture(gm), where)
            assert [dict(node.meta) for node in gm.graph.nodes] == graph, where
            assert rg.history(gm) == (), where
            assert_same_picture(callers, picture(model), where)
            call += 1
            faults += 1
        assert_same_picture(before, picture(gm), f"undo, after faults in {name}")
    expected = picture(rule()(made()[1]), objects=False)
    assert_same_picture(expected, picture(rule()(gm), objects=False), "what a rule does after many faults")
    print(f"{rule.__name__}: {faults} faults")


@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
def test_a_fault_at_every_step_of_an_undo_leaves_it_undone_or_not(afterwards: bool) -> None:
    _model, gm = made()
    before = picture(gm)
    everything = rg.compose(rg.FoldBatchNorm(), rg.MergeLinears(), rg.FuseBiasInLinear())
    gm = everything(gm)
    after, steps, faults = picture(gm), rg.history(gm), 0
    for owner, name in [*LOW, (states, "write_slot"), (Derivation, "invert")]:
        for call in range(1, 100):
            with failing(owner, name, call, afterwards) as reached, suppress(Fault):
                everything(gm, reverse=True)
            if not reached():
                break
            assert_same_picture(after, picture(gm), f"a fault in {name} #{call}")
            assert rg.history(gm) == steps
            faults += 1
        assert_same_picture(before, picture(gm), "undo")
        gm = everything(gm)
        after, steps = picture(gm), rg.history(gm)
    print(f"{faults} faults")


@pytest.mark.parametrize("places", [EDITS, ["create_node", "erase_node", "recompile", "lint"]])
def test_a_fault_in_a_composition_takes_back_all_of_its_parts(places: list[str]) -> None:
    model, gm = made()
    callers, before = picture(model), picture(gm)
    t = rg.compose(rg.FoldBatchNorm(), rg.MergeLinears(), rg.ChangeTrueDivToMulByInverse(), rg.FuseBiasInLinear())
    for owner, name in [(owner, name) for owner, name in PLACES if name in places]:
        for call in range(1, 100):
            with failing(owner, name, call, afterwards=False) as reached, suppress(Fault):
                t(gm)
            if not reached():
                t(gm, reverse=True)
                break
            assert_same_picture(before, picture(gm), f"a fault in {name} #{call}")
            assert rg.history(gm) == ()
    assert_same_picture(callers, picture(model), "the caller's model")


def test_a_users_own_function_is_atomic_at_every_edit() -> None:
    class Direct(rg.Transformation):
        def transform(self, graph_module):
            for node in list(graph_module.graph.nodes):
                if node.target is operator.truediv:
                    with graph_module.graph.inserting_after(node):
                        new = graph_module.graph.call_function(torch.neg, (node.args[0],))
                    node.replace_all_uses_with(new)
                    graph_module.graph.erase_node(node)
            graph_module.q = nn.Linear(4, 4)
            with torch.no_grad():
                graph_module.k.weight.zero_()
            graph_module.graph.lint()
            return graph_module

    model, gm = made()
    callers, before = picture(model), picture(gm)
    for owner, name in [*LOW, (torch.Tensor, "zero_")]:
        for afterwards in (False, True):
            for call in range(1, 20):
                with failing(owner, name, call, afterwards) as reached, suppress(Fault):
                    Direct()(gm)
                if not reached():
                    break
                assert_same_picture(before, picture(gm), f"a fault in {name} #{call}")
                assert rg.history(gm) == ()
                assert_same_picture(callers, picture(model), "the caller's model")
            else:
                continue
            model, gm = made()
            callers, before = picture(model), picture(gm)
