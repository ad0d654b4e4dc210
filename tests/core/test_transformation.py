"""Users' own transformations, as the original's guide has them: atomic, marked, in the history, undone bit for bit."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import FORMS, Wrap, assert_same, capture, copies, picture, randomise, values_of
from regraft.core.vocabulary import LINEAR, MULTIPLY


class ChangeMulToAdd(rg.Transformation):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                node.target = operator.add
        return graph_module


class MulToMulTimesTwo(rg.ReversibleTransformation):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                x, y = node.args
                node.args = (2 * x, y)
        return graph_module

    def reverse(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                x, y = node.args
                node.args = (x / 2, y)
        return graph_module


class Marker(rg.ReversibleTransformation):
    """Marks every multiplication, and has an argument."""

    def __init__(self, by=1):
        self.by = by

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is operator.mul:
                node.args = (node.args[0], node.args[1] * self.by)
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module):
        for node in self.get_transformed_nodes(graph_module):
            node.args = (node.args[0], node.args[1] / self.by)
            self.mark_as_restored(node)
        return graph_module


class Forgets(rg.Transformation):
    def transform(self, graph_module):
        next(iter(graph_module.graph.nodes)).meta["touched"] = True


def product() -> nn.Module:
    return Wrap(lambda self, x: self.layer(x) * 3, layer=nn.Linear(4, 4))


X = torch.randn(2, 4)


@pytest.mark.parametrize("form", FORMS)
def test_the_guides_transformation(form):
    net = randomise(product())
    gm = capture(net, (X,), form)
    before = picture(gm)
    result = ChangeMulToAdd()(gm)
    assert result is gm
    assert torch.equal(gm(X), net.layer(X) + 3)
    assert [step.transformation for step in rg.history(gm)] == ["ChangeMulToAdd"]
    rg.undo(gm)
    assert_same(before, picture(gm))


@pytest.mark.parametrize("form", FORMS)
def test_the_guides_reversible_transformation_forward_and_back(form):
    net = randomise(product())
    gm = capture(net, (X,), form)
    before, t = picture(gm), MulToMulTimesTwo()
    t(gm)
    assert torch.equal(gm(X), (2 * net.layer(X)) * 3)
    assert t(gm, reverse=True) is gm
    assert_same(before, picture(gm))
    assert rg.history(gm) == ()


def test_reverse_itself_runs_where_the_history_knows_nothing():
    net = randomise(product())
    gm = MulToMulTimesTwo()(capture(net, (X,), "fx"))
    rg.forget(gm)
    MulToMulTimesTwo()(gm, reverse=True)
    assert torch.allclose(gm(X), net(X) / 2)  # as it is written there, it halves the multiplication that it added too
    assert [n.name for n in gm.graph.nodes] == ["x", "layer", "mul_1", "truediv", "mul", "output"]


def test_arithmetic_on_nodes_works_in_transform_only():
    class Every(rg.Transformation):
        def transform(self, graph_module):
            x = next(iter(graph_module.graph.nodes))
            (output,) = graph_module.graph.find_nodes(op="output")
            y = -((x + 1) * 2 - x) / 4 + (1 + x) + (3 - x) + 2 / (x * x + 1) + x // 1 + x % 2 + x**2 + 2**x + abs(x)
            output.args = (y + (x @ x),)
            return graph_module

    class Model(nn.Module):
        def forward(self, x):
            return x

    gm = capture(Model(), (), "fx")
    before = picture(gm)
    Every()(gm)
    x = torch.randn(3, 3)
    expected = -((x + 1) * 2 - x) / 4 + (1 + x) + (3 - x) + 2 / (x * x + 1) + x // 1 + x % 2 + x**2 + 2**x + abs(x)
    assert torch.equal(gm(x), expected + x @ x)
    node = next(iter(gm.graph.nodes))
    with pytest.raises(TypeError):
        node * 2
    rg.undo(gm)
    assert_same(before, picture(gm))


@pytest.mark.parametrize("form", FORMS)
def test_the_guides_composition(form):
    net = randomise(product())
    gm = capture(net, (X,), form)
    before = picture(gm)
    composition = rg.compose(MulToMulTimesTwo(), ChangeMulToAdd())
    assert not isinstance(composition, rg.ReversibleTransformation)
    composition(gm)
    assert torch.allclose(gm(X), (2 + net.layer(X)) + 3)
    rg.undo(gm)
    rg.undo(gm)
    assert_same(before, picture(gm))
    rg.compose(MulToMulTimesTwo(), MulToMulTimesTwo())(gm)
    rg.undo(gm)
    rg.undo(gm)
    assert_same(before, picture(gm))


def test_forgetting_to_return_is_said_at_once_and_nothing_is_changed():
    gm = capture(product(), (X,), "fx")
    before = picture(gm)
    said = r"Forgets.transform returned NoneType.*end it with `return graph_module`"
    with pytest.raises(rg.TransformationError, match=said):
        Forgets()(gm)
    assert_same(before, picture(gm))


class NoPattern(rg.Rewrite):
    def rewrite(self, match, edit, facts):
        return "nothing"


class NotAPattern(NoPattern):
    @property
    def pattern(self):
        return LINEAR


class SaysNothing(rg.Rewrite):
    pattern = rg.Calls(MULTIPLY)

    def rewrite(self, match, edit, facts):
        edit.replace(match.call.node, operator.add, *match.call.node.args)


@pytest.mark.parametrize(
    ("rewrite", "said"),
    [
        (NoPattern, r"NoPattern has no pattern; .*pattern = regraft.Calls\(LINEAR\)"),
        (NotAPattern, r"NotAPattern has .* as its pattern; .*pattern = regraft.Calls\(LINEAR\)"),
        (SaysNothing, r"SaysNothing.rewrite returned NoneType.*end it with `return"),
    ],
)
def test_a_rewrite_that_lacks_something_is_told_what_and_changes_nothing(rewrite, said):
    gm = capture(product(), (X,), "fx")
    before = picture(gm)
    for use in (rewrite().explain, rewrite()):
        with pytest.raises(rg.TransformationError, match=said):
            use(gm)
        assert_same(before, picture(gm))


def test_a_pattern_may_be_set_late_and_an_error_of_its_own_stays_what_it_is():
    class Late(NoPattern):
        def __init__(self):
            self.pattern = rg.Calls(LINEAR)

    class Fails(NoPattern):
        @property
        def pattern(self):
            return self.nothing

    gm = capture(product(), (X,), "fx")
    assert Late().explain(gm).applied == 1
    with pytest.raises(AttributeError, match="nothing"):
        Fails().explain(gm)


@pytest.mark.parametrize("given", [nn.Linear(2, 2), None, "gm"])
def test_what_is_no_graph_module(given):
    with pytest.raises(TypeError, match=r"MulToMulTimesTwo takes a torch.fx.GraphModule, and got .*regraft.trace"):
        MulToMulTimesTwo()(given)
    for function in (rg.undo, rg.history, rg.forget, rg.original_state_dict):
        name = function.__name__
        with pytest.raises(TypeError, match=rf"{name} takes .* capture it first: regraft.{name}\(regraft.trace"):
            function(given)
    with pytest.raises(TypeError, match=r"capture it first: regraft.load_original_state_dict\(.*, state_dict\)"):
        rg.load_original_state_dict(given, {})
    with pytest.raises(TypeError, match=r"capture it first: MergeLinears\(\).get_transformed_nodes\(regraft.trace"):
        rg.MergeLinears().get_transformed_nodes(given)


class Explodes(rg.Transformation):
    """Does one thing that it then has to be sorry for."""

    def __init__(self, damage):
        self.damage = damage

    def transform(self, graph_module):
        self.damage(graph_module)
        graph_module.recompile()
        raise RuntimeError("half-way")


class Writes(Explodes):
    """Writes weights in place, and lives."""

    def transform(self, graph_module):
        self.damage(graph_module)
        return graph_module


def scale_weight(gm):
    with torch.no_grad():
        gm.get_submodule("layer").weight.mul_(2)
        gm.get_submodule("layer").weight[0].zero_()


def write_data(gm):
    gm.get_submodule("layer").weight.data.fill_(7)


def copy_into(gm):
    gm.get_submodule("layer").load_state_dict(nn.Linear(4, 4).state_dict())


def new_parameter(gm):
    gm.get_submodule("layer").weight = nn.Parameter(torch.zeros(4, 4))


def delete_weight(gm):
    del gm.get_submodule("layer").bias


def delete_module(gm):
    gm.delete_submodule("layer")


def replace_module(gm):
    gm.add_submodule("layer", nn.Linear(4, 4))


def add_things(gm):
    gm.register_buffer("extra", torch.zeros(2))
    gm.add_submodule("new.deeper", nn.ReLU())


def erase_nodes(gm):
    (output,) = gm.graph.find_nodes(op="output")
    (x, *_) = gm.graph.nodes
    output.args = (x,)
    gm.graph.eliminate_dead_code()


def retarget(gm):
    for node in gm.graph.nodes:
        node.meta["mine"] = 1
        if node.op == "call_function":
            node.target, node.kwargs = torch.mul, {}


def insert_nodes(gm):
    with gm.graph.inserting_before(next(iter(gm.graph.find_nodes(op="output")))):
        gm.graph.call_function(torch.relu, (next(iter(gm.graph.nodes)),))


DAMAGE = [scale_weight, write_data, copy_into, new_parameter, delete_weight, delete_module, replace_module, add_things]
DAMAGE += [erase_nodes, retarget, insert_nodes]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_an_exception_half_way_leaves_everything_as_it_was(damage, form):
    net = randomise(product())
    gm = capture(net, (X,), form)
    before, caller = picture(gm), picture(net)
    with pytest.raises(RuntimeError, match="half-way"):
        Explodes(damage)(gm)
    assert_same(before, picture(gm))
    assert_same(caller, picture(net))
    assert rg.history(gm) == ()
    assert torch.equal(gm(X), net(X))


@pytest.mark.parametrize("damage", DAMAGE)
def test_in_a_composition_the_parts_before_are_taken_back_too(damage):
    net = randomise(product())
    gm = capture(net, (X,), "fx")
    before = picture(gm)
    with pytest.raises(RuntimeError):
        rg.compose(rg.FuseBiasInLinear(), MulToMulTimesTwo(), Writes(scale_weight), Explodes(damage))(gm)
    assert_same(before, picture(gm))
    assert rg.history(gm) == ()


def test_a_graph_that_does_not_lint_is_an_exception_too():
    class Breaks(rg.Transformation):
        def transform(self, graph_module):
            for node in graph_module.graph.nodes:
                if node.op == "call_module":
                    node.target = "nowhere"
            return graph_module

    gm = capture(product(), (X,), "fx")
    before = picture(gm)
    with pytest.raises(RuntimeError, match="nowhere"):
        Breaks()(gm)
    assert_same(before, picture(gm))


def test_marks():
    gm = capture(product(), (X,), "fx")
    t = Marker(2)
    t(gm)
    (node,) = t.get_transformed_nodes(gm)
    assert node.name == "mul"
    assert t.transformed(node)
    assert not Marker(3).transformed(node)
    t.mark_as_restored(node)
    assert not t.transformed(node)
    with pytest.raises(ValueError, match="'mul' is not marked as transformed by Marker"):
        t.mark_as_restored(node)


def test_two_instances_with_different_arguments_do_not_reverse_each_others_work():
    gm = capture(product(), (X,), "fx")
    before = picture(gm)
    Marker(2)(gm)
    doubled = values_of(picture(gm))
    Marker(5)(gm)
    Marker(5)(gm, reverse=True)
    assert_same(doubled, values_of(picture(gm)))
    Marker(2)(gm, reverse=True)
    assert_same(before, picture(gm))


@pytest.mark.parametrize("form", FORMS)
def test_marks_and_undo_survive_every_copy(form):
    gm = capture(randomise(product()), (X,), form)
    before = values_of(picture(gm))
    t = Marker(2)
    t(gm)
    for other in copies(gm).values():
        assert [node.name for node in t.get_transformed_nodes(other)] == ["mul"]
        assert torch.equal(other(X), gm(X))
        t(other, reverse=True)
        assert_same(before, values_of(picture(other)))
        assert not t.get_transformed_nodes(other)
    assert [node.name for node in t.get_transformed_nodes(gm)] == ["mul"]


def test_without_lint_and_recompile_the_code_waits():
    gm = capture(product(), (X,), "fx")
    code = gm.code
    ChangeMulToAdd()(gm, lint_and_recompile=False)
    assert gm.code == code
    rg.LintAndRecompile()(gm)
    assert gm.code != code


def test_a_transformation_that_returns_another_module():
    gm = capture(product(), (X,), "fx")
    before = picture(gm)
    other = rg.DeepCopy()(gm)
    assert other is not gm
    assert_same(before, picture(gm))
    assert_same(values_of(before), values_of(picture(other)))
    assert other.get_submodule("layer").weight is not gm.get_submodule("layer").weight
    other = rg.compose(rg.DeepCopy(), rg.FuseBiasInLinear())(gm)
    assert_same(before, picture(gm))
    assert other.get_submodule("layer").bias is None
    rg.FuseBiasInLinear()(other, reverse=True)
    assert_same(values_of(before), values_of(picture(other)))


@pytest.mark.parametrize("damage", [scale_weight, write_data, copy_into])
def test_weights_written_in_place_by_a_transformation_come_back_with_undo(damage):
    net = randomise(product())
    gm = capture(net, (X,), "fx")
    before = picture(gm)
    Writes(damage)(gm)
    written = values_of(picture(gm))
    assert written != values_of(before)
    for other in copies(gm).values():
        if other.layer is not gm.layer:
            assert_same(values_of(before), values_of(picture(rg.undo(other))))
    Writes(scale_weight)(gm)
    rg.FuseBiasInLinear()(gm)
    with pytest.raises(rg.ReversalConflict):
        rg.undo(gm, "Writes")
    rg.undo(gm, "FuseBiasInLinear")
    rg.undo(gm)
    assert_same(written, values_of(picture(gm)))
    gm.double()
    gm.float()
    expected = values_of(picture(copy.deepcopy(rg.undo(copy.deepcopy(gm))).double()))
    gm.double()
    rg.undo(gm)
    assert_same(expected, values_of(picture(gm)))
    gm.float()
    assert_same(before, picture(gm))


def test_weights_written_in_place_that_have_changed_since_are_a_conflict():
    gm = capture(randomise(product()), (X,), "fx")
    Writes(scale_weight)(gm)
    with torch.no_grad():
        gm.layer.weight.add_(1)
    for convert in (lambda: gm, lambda: gm.half()):
        convert()
        with pytest.raises(
            rg.ReversalConflict, match=r"'layer\.weight', which it wrote in place, has been changed since"
        ):
            rg.undo(gm)
    assert len(rg.history(gm)) == 1


def test_a_mark_without_another_change_is_undone_too():
    class OnlyMarks(rg.Transformation):
        def transform(self, graph_module):
            self.mark_as_transformed(next(iter(graph_module.graph.nodes)))
            return graph_module

    gm = capture(product(), (X,), "fx")
    t = OnlyMarks()
    t(gm)
    assert len(t.get_transformed_nodes(gm)) == 1
    rg.undo(gm)
    assert not t.get_transformed_nodes(gm)


def test_the_transformation_itself_pickles_and_copies():
    for t in (Marker(2), rg.MergeLinears(), rg.compose(Marker(1), rg.MergeLinears())):
        assert pickle.loads(pickle.dumps(t)).signature == t.signature
        assert copy.deepcopy(t).signature == t.signature
