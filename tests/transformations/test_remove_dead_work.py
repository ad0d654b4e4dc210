"""RemoveDeadWork: what goes, and everything that must stay."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, assert_same, capture, check_applied, check_refused, picture, randomise, run

X = (torch.randn(3, 4),)

_BACK = torch.ops.aten.reshape_as.default


def with_shapes(model: nn.Module) -> torch.fx.GraphModule:
    """A graph as `torch.fx` makes it, before capture has cleaned it, with fake values."""
    gm = capture(model, X, "fx")
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*X)
    return gm


NOTHING: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "cast": (lambda m, x: x.to(torch.float32).float() * 2, 2),
    "type_as": (lambda m, x: x.type_as(x) * 2, 1),
    "view": (lambda m, x: (x + 1).view(3, 4) * 2, 1),
    "view and back": (lambda m, x: (x + 1).view(12).view(3, 4) * 2, 2),
    "reshape": (lambda m, x: torch.reshape(x, (3, -1)) * 2, 1),
    "flatten": (lambda m, x: torch.flatten(x, 1) * 2, 1),
    "flattened and back": (lambda m, x: (lambda y: m.l(y.flatten().reshape_as(y) * 2))(x + 1), 2),
    "flattened and back, by operators": (lambda m, x: (lambda y: m.l(_BACK(torch.flatten(y), y) * 2))(x + 1), 2),
    "flattened and back behind a layer": (lambda m, x: m.l(x).flatten().reshape(3, 4) * 2, 2),
    "viewed and flattened back": (lambda m, x: x.sum(1).view(3, 1).flatten() * 2, 2),
    "expand": (lambda m, x: x.expand(3, 4) * 2, 1),
    "permute": (lambda m, x: x.permute(0, 1) * 2, 1),
    "permute by one argument": (lambda m, x: x.permute((0, 1)) * 2, 1),
    "permute by keyword": (lambda m, x: x.permute(dims=(0, 1)) * 2, 1),
    "permute by keywords alone": (lambda m, x: torch.permute(input=x, dims=(0, 1)) * 2, 1),
    "transpose": (lambda m, x: x.transpose(1, -1) * 2, 1),
    "slice": (lambda m, x: x[:, :] * 2, 1),
    "ellipsis": (lambda m, x: x[...] * 2, 1),
    "clone": (lambda m, x: x.clone() * 2, 1),
    "contiguous of linear": (lambda m, x: m.l(x).contiguous().view(-1), 1),
    "contiguous before reshape": (lambda m, x: m.l((x * 2).t().contiguous().reshape(3, 4) * 2), 1),
    "contiguous of what was dropped out of a linear": (
        lambda m, x: F.dropout(m.l(x), 0.1, False).contiguous().view(-1) * 2,
        2,
    ),
    "contiguous before what was dropped out and a reshape": (
        lambda m, x: m.l(F.dropout((x * 2).t().contiguous(), 0.1, False).reshape(3, 4)),
        2,
    ),
    "contiguous twice": (lambda m, x: x.t().contiguous().contiguous().view(-1) * 2, 1),
    "squeeze": (lambda m, x: x.squeeze(-1) * 2, 1),
    "pad": (lambda m, x: torch.nn.functional.pad(x, (0, 0, 0, 0)) * 2, 1),
    "pad by another mode": (lambda m, x: torch.nn.functional.pad(x[None], [0, 0], "reflect") * 2, 1),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_changes_nothing_goes(name: str) -> None:
    function, sites = NOTHING[name]
    model = randomise(Wrap(function, l=nn.Linear(4, 4)))
    gm = with_shapes(model)
    rg.RemoveDeadWork()(gm)
    assert len(rg.history(gm)[-1].applied) == sites
    assert torch.equal(gm(*X), model(*X))


@pytest.mark.parametrize(
    ("squeeze", "removed"),
    [
        (lambda x: x.squeeze(0), False),
        (lambda x: x.squeeze(-2), False),
        (lambda x: x.squeeze((0, 1)), False),
        (lambda x: torch.squeeze(x, dim=0), False),
        (lambda x: x.squeeze(), False),
        (lambda x: x.squeeze(1), True),
        (lambda x: x.squeeze((-1,)), True),
    ],
)
def test_a_size_that_may_be_one_is_squeezed(squeeze: Callable[[Any], Any], removed: bool) -> None:
    """The symbol of a batch stands for a single row, too."""
    model, x = Wrap(lambda m, x: squeeze(m.l(x)) * 2, l=nn.Linear(4, 5)).eval(), torch.randn(3, 4)
    gm = rg.trace(model, (x,), dynamic_shapes="auto")
    rg.RemoveDeadWork()(gm)
    assert bool(rg.history(gm)[-1].applied) == removed
    for rows in (1, 2, 3):
        x = torch.randn(rows, 4)
        assert model(x).shape == gm(x).shape
        assert torch.equal(model(x), gm(x))


@pytest.mark.parametrize("name", ["permute", "transpose"])
def test_without_shapes_too(name: str) -> None:
    if name == "transpose":
        model = Wrap(lambda m, x: x.transpose(1, 1) * 2)
    else:
        model = Wrap(NOTHING[name][0])
    check_applied(rg.RemoveDeadWork(), model, X, "fx", marks=False)


KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "a cast": lambda m, x: x.double() * 2,
    "a view": lambda m, x: x.view(4, 3) * 2,
    "a turn and a reshape": lambda m, x: x.permute(1, 0).reshape(3, 4) * 2,
    "a permute": lambda m, x: x.permute(1, 0) * 2,
    "a permute by keywords alone": lambda m, x: torch.permute(input=x, dims=(1, 0)) * 2,
    "a transpose": lambda m, x: x.transpose(0, 1) * 2,
    "a transpose by keywords": lambda m, x: x.transpose(dim0=0, dim1=1) * 2,
    "a slice": lambda m, x: x[:, :3] * 2,
    "rows in another order": lambda m, x: x[[2, 1, 0]] * 2,
    "a pad that shifts": lambda m, x: F.pad(x, (1, -1)) * 2,
    "contiguous before view": lambda m, x: (x * 2).t().contiguous().view(2, 6),
    "contiguous before a sum and a view of it": lambda m, x: ((x * 2).t().contiguous() + 1).view(2, 6),
    "contiguous before a reshape, a sum and a view of it": lambda m, x: (
        (x * 2).t().contiguous().reshape(4, 3, 1) + 1
    ).view(2, 6),
    "contiguous before a reshape, a copy and a view of it": lambda m, x: (
        (x * 2).t().contiguous().reshape(4, 1, 3).clone().view(2, 6)
    ),
    "contiguous before what the caller gets": lambda m, x: (x * 2).t().contiguous().reshape(4, 3, 1) + 1,
    "contiguous before many sums": lambda m, x: (
        functools.reduce(operator.add, range(450), (x * 2).t().contiguous().reshape(3, 4)) @ x.t()
    ),
    "a reshape and back before a view": lambda m, x: ((x * 2).t().reshape(12).reshape(4, 3) + 1).view(2, 6),
    "a reshape and back of a sum before a view": lambda m, x: ((x.t() * 2).flatten().view(4, 3) + 1).view(2, 6),
    "contiguous in another format": lambda m, x: (
        x.view(1, 3, 2, 2).contiguous().contiguous(memory_format=torch.channels_last) * 2
    ),
    "an unsqueeze": lambda m, x: x.unsqueeze(0) * 2,
    "a dead random number": lambda m, x: (torch.rand_like(x), x * 2)[1],
    "a dropout in training": lambda m, x: F.dropout(x, 0.5, True),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_does_something_stays(name: str) -> None:
    model = Wrap(KEPT[name])
    gm = with_shapes(model)
    before = gm.code
    rg.RemoveDeadWork()(gm)
    assert gm.code == before


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.Identity(), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)])
def test_modules_that_pass_on(module: nn.Module) -> None:
    model = Wrap(lambda m, x: m.act(m.drop(x)), act=nn.ReLU(), drop=module).eval()
    gm = check_applied(rg.RemoveDeadWork(), model, X, "fx", marks=False)
    assert "drop" not in dict(gm.named_modules())


def test_dropout_in_training_is_refused() -> None:
    model = Wrap(lambda m, x: m.drop(x) * 2, drop=nn.Dropout(0.5)).train()
    check_refused(rg.RemoveDeadWork(), model, X, "fx", "drop is in training mode")


def test_an_identity_with_a_hook_is_refused() -> None:
    identity = nn.Identity()
    identity.register_forward_hook(lambda module, args, result: result + 1)
    check_refused(rg.RemoveDeadWork(), Wrap(lambda m, x: m.i(x) * 2, i=identity).eval(), X, "fx", "hooks")


REPEATED: dict[str, Callable[[Any, Any], Any]] = {
    "function": lambda m, x: torch.sin(x) + torch.sin(x),
    "method": lambda m, x: x.sin() + x.sin(),
    "module": lambda m, x: m.linear(x) + m.linear(x),
    "sizes": lambda m, x: x.view(x.size(0), 2, 2) + x.view(x.size(0), 2, 2),
    "nested arguments": lambda m, x: torch.cat([x, x], 1) + torch.cat([x, x], 1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_work_is_done_once(name: str) -> None:
    model = randomise(Wrap(REPEATED[name], linear=nn.Linear(4, 4), w=nn.Parameter(torch.randn(4))).eval())
    gm = capture(model, X, "fx")
    count = len(gm.graph.nodes)
    sites = {"sizes": 2}.get(name, 1)
    gm = check_applied(rg.RemoveDeadWork(), model, X, "fx", sites, marks=False)
    assert len(gm.graph.nodes) == count - sites
    assert torch.equal(gm(*X), model(*X))


def test_a_chain_of_repeated_work_goes_whole() -> None:
    model = Wrap(lambda m, x: (x.sin().cos() + 1) * (x.sin().cos() + 1))
    check_applied(rg.RemoveDeadWork(), model, X, "fx", 3, marks=False)


DIFFERENT: dict[str, Callable[[Any, Any], Any]] = {
    "1 and 1.0": lambda m, x: torch.full((2,), 1) + torch.full((2,), 1.0),
    "0.0 and -0.0": lambda m, x: (x.abs() / 0.0) + (x.abs() / -0.0),
    "slices": lambda m, x: x[:, :2] + x[:, 2:],
    "keywords": lambda m, x: x.sum(0, keepdim=True) + x.sum(0, keepdim=False),
    "random": lambda m, x: torch.rand_like(x) + torch.rand_like(x),
    "fresh memory, written": lambda m, x: torch.zeros_like(x).add_(x) + torch.zeros_like(x).add_(2 * x),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("form", ["fx", "trace"])
def test_different_work_is_not_confused(name: str, form: str) -> None:
    model = Wrap(DIFFERENT[name])
    gm = capture(model, X, form)
    torch.manual_seed(3)
    expected = run(gm, X)
    rg.RemoveDeadWork()(gm)
    torch.manual_seed(3)
    for got, want in zip(run(gm, X), expected, strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def _written_between(m: Any, x: Any) -> Any:
    a = x.sin()
    x.add_(1)
    return a + x.sin()


def _result_written(m: Any, x: Any) -> Any:
    a, b = x.sin(), x.sin()
    a.add_(1)
    return a + b


def _clone_protects(m: Any, x: Any) -> Any:
    y = x * 2
    kept = torch.clone(y)
    y.add_(1)
    return y * kept


def _reshaped_copy_is_written(m: Any, x: Any) -> Any:
    turned = (x * 2).t()
    turned.reshape(12).view(4, 3).add_(1)
    return turned * 2


def _product_is_written(m: Any, x: Any) -> Any:
    y = x * 2
    y.mul(1).add_(1)
    return y * 2


def _clone_is_written(m: Any, x: Any) -> Any:
    copy = torch.clone(x)
    copy.mul_(2)
    return copy + x


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "written between": (_written_between, "in place"),
    "result written": (_result_written, "in place"),
    "both returned": (lambda m, x: (x.sin(), x.sin()), "the caller gets both"),
    "both returned, one as a view": (lambda m, x: (x.sin().view(-1), x.sin()), "the caller gets both"),
    "random": (lambda m, x: torch.rand_like(x) + torch.rand_like(x) * 2, "random"),
    "module in training": (lambda m, x: m.b(x) + m.b(x) * 2, "training"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    model = Wrap(function, b=nn.BatchNorm1d(4))
    check_refused(rg.RemoveDeadWork(), model, X, "fx", word)


@pytest.mark.parametrize("function", [_reshaped_copy_is_written, _product_is_written])
def test_what_may_have_copied_protects(function: Callable[[Any, Any], Any]) -> None:
    model = Wrap(function)
    gm = rg.RemoveDeadWork()(with_shapes(model))
    assert torch.equal(gm(*X), model(*X))
    assert any("in place" in r.reason for r in rg.history(gm)[-1].refused)


@pytest.mark.parametrize("function", [_clone_protects, _clone_is_written, lambda m, x: (x, torch.clone(x))])
def test_a_clone_that_protects_stays(function: Callable[[Any, Any], Any]) -> None:
    gm = capture(Wrap(function), X, "trace")
    rg.RemoveDeadWork()(gm)
    assert [n for n in gm.graph.nodes if n.target in (torch.clone, torch.ops.aten.clone.default)]
    assert any("in place" in r.reason or "others see" in r.reason for r in rg.history(gm)[-1].refused)


LAID_OUT: dict[str, Callable[[Any, Any], Any]] = {
    "a copied slice, viewed": lambda m, x: x[:, :2].clone().view(-1) * 2,
    "a copied slice, viewed as a part of another view": lambda m, x: x[:, :2].clone().unsqueeze(0).view(-1) * 2,
    "an input of any strides, viewed": lambda m, x: x.clone().view(-1) * 2,
    "a product by one, viewed": lambda m, x: (x[:, :2] * 1).view(-1) * 2,
    "a slice padded by nothing, viewed": lambda m, x: F.pad(x[:, :2], (0, 0)).view(-1) * 2,
    "copied rows that were one, viewed": lambda m, x: x.sum(1, keepdim=True).expand(-1, 4).clone().view(-1) * 2,
    "the same, added to what is turned": lambda m, x: (
        x.sum(1, keepdim=True).expand(-1, 3).clone() + x[:, :3].sin().mT
    ).view(-1),
    "rows that were one, returned": lambda m, x: x.sum(1, keepdim=True).expand(-1, 4).clone(),
    "a copied slice, returned": lambda m, x: x.sin()[:, :2].clone(),
}


@pytest.mark.parametrize("function", LAID_OUT.values(), ids=LAID_OUT)
def test_a_copy_stays_whose_strides_matter(function: Callable[[Any, Any], Any]) -> None:
    model = Wrap(function)
    gm = rg.RemoveDeadWork()(with_shapes(model))
    wide = torch.randn(3, 8)[:, ::2]
    for x in (X[0], wide):
        found, expected = gm(x), model(x)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        found.add_(1)  # no two of its elements are one
    assert any("strides" in r.reason or "in which order" in r.reason for r in rg.history(gm)[-1].refused)


def test_a_copy_goes_where_nobody_asks_for_strides() -> None:
    model = Wrap(lambda m, x: x[:, :2].clone() * x.sin().clone().view(-1, 2)[:3])
    gm = rg.RemoveDeadWork()(with_shapes(model))
    assert torch.equal(gm(*X), model(*X))
    assert not [node for node in gm.graph.nodes if "clone" in node.name]


def test_dead_nodes_go_and_their_weights_stay_for_checkpoints() -> None:
    model = randomise(Wrap(lambda m, x: (m.linear(x).sin(), x * 2)[1], linear=nn.Linear(4, 4)).eval())
    gm = check_applied(rg.RemoveDeadWork(), model, X, "fx", 2, marks=False)
    assert list(gm.state_dict()) == list(model.state_dict())


def test_a_dead_write_stays() -> None:
    def write(m: Any, x: Any) -> Any:
        y = x + 1
        torch.sin_(y)
        y.add_(1)
        return y

    gm = capture(Wrap(write), X, "fx")
    expected = run(gm, X)[0]
    rg.RemoveDeadWork()(gm)
    assert torch.equal(run(gm, X)[0], expected)


def _bias(m: Any, x: Any) -> Any:
    return x + m.table[m.index].view(4) * 2


@pytest.mark.parametrize("trained", [True, False])
def test_constants_are_computed_once(trained: bool) -> None:
    table = nn.Parameter(torch.randn(7), requires_grad=trained)
    model = Wrap(_bias, table=table, index=torch.tensor([[3, 1], [0, 6]]))
    gm = check_applied(rg.RemoveDeadWork(), model, X, "trace")
    folded = gm.get_parameter("mul_constant") if trained else gm.get_buffer("mul_constant")
    assert folded.requires_grad is trained
    assert len(gm.graph.nodes) == (5 if trained else 4)


def test_a_trained_constant_asks_for_gradients_only_where_they_are_recorded() -> None:
    # attention on the CPU takes its slow way for a mask that asks for gradients
    model = Wrap(_bias, table=nn.Parameter(torch.randn(7)), index=torch.tensor([[3, 1], [0, 6]]))
    gm = rg.RemoveDeadWork()(rg.trace(model, X))
    add = next(node for node in gm.graph.nodes if node.name == "add")
    gm.graph.output_node().args = (add.args[1],)
    gm.recompile()
    assert gm(*X).requires_grad
    with torch.no_grad():
        assert not gm(*X).requires_grad


def test_constants_follow_the_size_limit() -> None:
    model = Wrap(lambda m, x: x + torch.arange(4) * 2)
    gm = rg.trace(model, X)
    rg.RemoveDeadWork(largest_constant=8)(gm)
    assert "32 bytes" in rg.history(gm)[-1].refused[0].reason
    rg.RemoveDeadWork()(gm)
    assert rg.history(gm)[-1].applied


def test_below_a_constant_that_is_too_large_what_is_small_enough_is_folded() -> None:
    model = Wrap(lambda m, x: x + (torch.arange(3.0)[:, None] * 2) * torch.arange(4.0).sin())
    gm = rg.trace(model, X)
    rg.RemoveDeadWork(largest_constant=40)(gm)
    (step,) = rg.history(gm)
    assert ["48 bytes" in refusal.reason for refusal in step.refused] == [True]
    assert [node.op for node in gm.graph.nodes if "constant" in node.name] == ["get_attr", "get_attr"]
    assert torch.equal(gm(*X), model(*X))


def test_a_constant_of_no_fixed_size() -> None:
    def chosen(m: Any, x: Any) -> Any:
        places = m.mask.nonzero()
        return x + places.sum(), x.sum() + places

    model = Wrap(chosen, mask=torch.arange(400_000) % 3 == 0)
    gm = rg.trace(model, X)
    rg.RemoveDeadWork()(gm)
    (step,) = rg.history(gm)
    assert [node.name for node in gm.graph.nodes if "constant" in node.name] == ["sum_1_constant"]
    assert any("no fixed size" in refusal.reason for refusal in step.refused)
    assert all(map(torch.equal, gm(*X), model(*X)))


def test_a_trained_constant_read_elsewhere_is_refused() -> None:
    model = Wrap(lambda m, x: x * (m.w + 1) + m.w, w=nn.Parameter(torch.randn(4)))
    gm = rg.trace(model, X)
    rg.RemoveDeadWork()(gm)
    assert any("one parameter" in r.reason for r in rg.history(gm)[-1].refused)


def test_a_constant_behind_an_identity_is_folded_in_one_go() -> None:
    model = Wrap(lambda m, x: x + (m.w * 2).expand(4).view(4), w=torch.randn(4))
    gm = check_applied(rg.RemoveDeadWork(), model, X, "trace", sites=3)
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]


def test_a_constant_inside_another_is_folded_too_where_it_is_read() -> None:
    def both(m: Any, x: Any) -> Any:
        inner = torch.arange(4) * m.w
        return x * inner + inner.sin()

    gm = check_applied(rg.RemoveDeadWork(), Wrap(both, w=torch.randn(4)), X, "trace", sites=2)
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["mul_1", "add"]
    trained = rg.RemoveDeadWork()(rg.trace(Wrap(both, w=nn.Parameter(torch.randn(4))), X))
    read = [node.target for node in trained.graph.nodes if node.op == "get_attr"]
    assert read == ["mul_constant"]  # one parameter, so that it is trained as one


def test_a_returned_constant_is_refused() -> None:
    model = Wrap(lambda m, x: (x * 2, m.w + 1), w=torch.randn(4))
    check_refused(rg.RemoveDeadWork(), model, X, "trace", "returned to the caller")


class _Offsets(nn.Module):
    """A constant made of a buffer and of a tensor that the graph itself makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.table + torch.arange(5)) * 2


def test_a_dry_run_folds_constants_on_any_device() -> None:
    gm = rg.trace(_Offsets(), (torch.randn(3, 5),))
    said = rg.RemoveDeadWork().explain(gm).rows()
    assert any("once" in sentence for *_, sentence in said)
    rg.RemoveDeadWork()(gm)
    assert rg.Report("", rg.history(gm)).rows() == said


class ProxiedBuffers(torch.fx.Tracer):
    """Buffers are read by nodes, as parameters are; and by a new one each time, as graphs written by hand may do."""

    proxy_buffer_attributes = True

    def getattr(self, attr, attr_val, parameter_proxy_cache):
        return super().getattr(attr, attr_val, {})


class Counting(nn.Module):
    """Counts its calls in a buffer, which it reads by another node than the one that writes."""

    def __init__(self, use) -> None:
        super().__init__()
        self.use, self.linear = use, nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("calls", torch.full((4,), 2.0))
        self.register_buffer("view", self.calls[:2])

    def forward(self, x):
        self.calls.add_(1)
        return self.use(self, self.linear(x))


@pytest.mark.parametrize(
    "use",
    [
        lambda m, y: y + m.calls.sin() * 3,
        lambda m, y: y + m.view.sin().sum(),
        lambda m, y: y * m.calls,
        lambda m, y: y / m.calls,
        lambda m, y: torch.nn.functional.linear(y, m.calls.reshape(1, 4)),
    ],
)
@pytest.mark.parametrize("rule", rg.TRANSFORMATIONS, ids=lambda rule: rule.__name__)
def test_a_buffer_that_another_node_writes_is_no_constant(rule, use) -> None:
    if not rule.preserves_computation or rule is rg.DeepCopy:
        pytest.skip("of another kind")
    x = torch.randn(3, 4)
    model, twin = Counting(use).eval(), Counting(use).eval()
    twin.linear.load_state_dict(model.linear.state_dict())
    gm = torch.fx.GraphModule(model, ProxiedBuffers().trace(model))
    for node in gm.graph.nodes:
        if node.target in ("calls", "view"):
            node.meta["val"] = torch.empty(4 if node.target == "calls" else 2)
        elif node.op in ("call_method", "call_function") and node.target != "reshape":
            node.meta["val"] = torch.empty(4)
    rule()(gm)
    for _ in range(3):
        torch.testing.assert_close(gm(x), twin(x))


@pytest.mark.parametrize("function", [lambda t: t == 0, lambda t: t.argmax(), lambda t: torch.all(t > -9)])
def test_what_is_folded_from_a_trained_weight_may_be_no_number_to_train(function) -> None:
    table, index = nn.Parameter(torch.randn(7)), torch.tensor([[3, 1], [0, 6]])
    model = Wrap(lambda m, x: x + function(m.table[m.index].view(4) * 2), table=table, index=index)
    gm = check_applied(rg.RemoveDeadWork(), model, X, "trace")
    (folded,) = gm.graph.find_nodes(op="get_attr")
    constant = gm.get_buffer(folded.target)
    assert not constant.is_floating_point()
    assert not constant.requires_grad


class Doubled(nn.Linear):
    """A layer of one's own, which `torch.fx` traces into: its weights become nodes."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_whose_dead_reader_stays_is_no_constant(form: str) -> None:
    def forward(m, x):
        m.linear(x)
        x.add_(1)
        m.linear(x)  # dead as well, and not what the first one gave
        return m.other(x)

    model = randomise(Wrap(forward, linear=Doubled(4, 2).requires_grad_(False), other=nn.Linear(4, 2))).eval()
    gm = capture(model, (torch.randn(3, 4),), form)
    x = torch.randn(3, 4)
    wanted = model(x.clone())
    rg.RemoveDeadWork()(gm)
    torch.testing.assert_close(gm(x.clone()), wanted)


def test_a_copy_that_had_to_stay_goes_with_its_last_reader():
    def forward(self, x):
        y = x * 2
        copied = y.clone()  # what is written to below, as far as is known when its turn comes
        dropped = F.dropout(y, 0.5, False, inplace=True)
        copied.relu()  # which nobody reads
        return dropped + 1

    gm = with_shapes(Wrap(forward))
    rule = rg.RemoveDeadWork()
    before = picture(gm)
    rule(gm)
    assert [node.name for node in gm.graph.nodes] == ["x", "mul", "add", "output"]
    rule(gm)
    assert not rg.history(gm)[-1].applied
    rule(gm, reverse=True)
    assert_same(before, picture(gm))


@pytest.mark.parametrize(("given", "error"), [("a", TypeError), (None, TypeError), (-1, ValueError)])
def test_a_limit_that_is_none(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"largest_constant=.*: RemoveDeadWork\(largest_constant=1 << 22\)"):
        rg.RemoveDeadWork(largest_constant=given)
