"""RemoveUnreadRows: through what rows are followed, what reads them, and where all of them are computed still."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap, assert_matches_float64, assert_same, check_applied, check_refused, picture, randomise
from regraft.optimize.presets import resolve

RULE = rg.RemoveUnreadRows()
TOKENS = (torch.randn(2, 5, 6),)
Function = Callable[[Any, Any], Any]


def net(function: Function, **parts: nn.Module) -> nn.Module:
    given = {"layer": nn.Linear(6, 6), "other": nn.Linear(6, 6), "norm": nn.LayerNorm(6), **parts}
    return randomise(Wrap(function, **given)).eval()


def check(function: Function, sentence: str = "", inputs: tuple[Any, ...] = TOKENS, **parts: nn.Module) -> GraphModule:
    gm = check_applied(RULE, net(function, **parts), inputs, "trace")
    said = rg.history(gm)[-1].applied[0].sentence
    assert said.startswith(sentence), said
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert_fake_is_right(gm, node, inputs)
    return gm


def assert_fake_is_right(gm: GraphModule, node: torch.fx.Node, inputs: tuple[Any, ...]) -> None:
    """What the graph says of the size of a value is what it is."""
    found: list[Any] = []

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if n is node:
                found.append(value)
            return value

    Watch(gm).run(*inputs)
    assert found[0].shape == node.meta["val"].shape, node.name


def untouched(function: Function, inputs: tuple[Any, ...] = TOKENS, **parts: nn.Module) -> None:
    gm = RULE(rg.trace(net(function, **parts), inputs))
    assert not rg.history(gm)[-1].applied
    assert not rg.history(gm)[-1].refused


READS: dict[str, tuple[Function, int]] = {
    "a number": (lambda m, x: m.layer(x)[:, 0], 1),
    "the last": (lambda m, x: m.layer(x)[:, -1], 1),
    "a slice": (lambda m, x: m.layer(x)[:, 1:3], 2),
    "the last as a slice": (lambda m, x: m.layer(x)[:, -1:, :], 1),
    "an open slice": (lambda m, x: m.layer(x)[:, 2:], 3),
    "beyond the end": (lambda m, x: m.layer(x)[:, 3:99], 2),
    "an ellipsis": (lambda m, x: m.layer(x)[..., 2, :], 1),
    "of the first axis": (lambda m, x: m.layer(x)[1], 1),
    "of two axes": (lambda m, x: m.layer(x)[1, 2:4], 1),
    "one element": (lambda m, x: m.layer(x)[1, 2, 3], 1),
    "and columns": (lambda m, x: m.layer(x)[:, 2, 1:3], 1),
    "select": (lambda m, x: m.layer(x).select(1, -2), 1),
    "torch.select": (lambda m, x: torch.select(m.layer(x), -2, 2), 1),
    "narrow": (lambda m, x: m.layer(x).narrow(1, 1, 2), 2),
    "narrow, from behind": (lambda m, x: m.layer(x).narrow(-2, -3, 2), 2),
    "aten's slice": (lambda m, x: torch.ops.aten.slice.Tensor(m.layer(x), 1, 1, 4), 3),
    "two neighbours": (lambda m, x: (lambda y: y[:, 0] * 2 + y[:, 1])(m.layer(x)), 2),
    "two slices": (lambda m, x: (lambda y: (y[:, 1:3], y[:, 2:4].relu()))(m.layer(x)), 3),
    "two that are apart": (lambda m, x: (lambda y: y[:, 1] - y[:, 3])(m.layer(x)), 3),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    function, length = READS[name]
    gm = check(function, f"1 nodes compute {length} of ")
    (layer,) = gm.graph.find_nodes(op="call_module")
    assert length in layer.meta["val"].shape
    if "slice" in name and "two" not in name:
        assert [user.op for user in layer.users] == ["output"]


THROUGH: dict[str, tuple[Function, int]] = {
    "sums": (lambda m, x: (m.layer(x) + x)[:, 0], 2),
    "a bias": (lambda m, x: (m.layer(x) - torch.ones(6))[:, 0], 2),
    "a number": (lambda m, x: (2.0 * m.layer(x) / 3)[:, 0], 3),
    "one row for all": (lambda m, x: (m.layer(x) * m.other(x[:, 3:4]))[:, 0], 2),
    "a sum with a tensor of fewer axes": (lambda m, x: (m.layer(x) + x[0])[:, 0], 2),
    "activations": (lambda m, x: F.gelu(m.layer(x)).relu().tanh()[:, 0], 4),
    "casts": (lambda m, x: m.layer(x).double().float()[:, 0], 3),
    "two layers": (lambda m, x: m.other(m.layer(x))[:, 0], 2),
    "a norm": (lambda m, x: m.norm(m.layer(x))[:, 0], 2),
    "an RMS norm": (lambda m, x: F.rms_norm(m.layer(x), (6,))[:, 0], 2),
    "a norm written out": (lambda m, x: (lambda y: y * (y.pow(2).mean(-1, True) + 1).rsqrt())(m.layer(x))[:, 0], 6),
    "a variance": (lambda m, x: m.layer(x).var(-1, keepdim=True).sqrt()[:, 0], 3),
    "a softmax": (lambda m, x: m.layer(x).softmax(-1)[:, 0], 2),
    "masks": (lambda m, x: torch.where(x > 0, m.layer(x).masked_fill(x > 1, 3.0), x)[:, 0], 3),
    "transpositions": (lambda m, x: m.layer(x).transpose(1, 2).relu()[..., 0], 3),
    "a permutation": (lambda m, x: m.layer(x).permute(1, 2, 0)[0], 2),
    "unsqueezing": (lambda m, x: m.layer(x).unsqueeze(1)[:, :, 0], 2),
    "unsqueezing behind": (lambda m, x: m.layer(x).unsqueeze(-1)[:, 0], 2),
    "heads": (lambda m, x: m.layer(x).view(2, 5, 3, 2).transpose(1, 2)[:, :, 4], 3),
    "heads and back": (lambda m, x: m.layer(x).reshape(2, -1, 3, 2).flatten(2)[:, 0], 3),
    "a copy": (lambda m, x: m.layer(x).transpose(0, 1).contiguous()[0], 3),
    "joined columns": (lambda m, x: torch.cat([m.layer(x), x, m.other(x)], -1)[:, 0], 3),
    "joined along the first axis": (lambda m, x: torch.cat([m.layer(x), x])[:, 0], 2),
    "halves": (lambda m, x: torch.cat([-m.layer(x)[..., 3:], x[..., :3]], dim=-1)[:, 0], 5),
    "parts": (lambda m, x: (lambda a, b: a.relu() * b)(*m.layer(x).chunk(2, dim=-1))[:, 0], 6),
    "parts of other sizes": (lambda m, x: (lambda a, b: a * b)(*m.layer(x).split([1, 5], -1))[:, 0], 5),
    "a product": (lambda m, x: (m.layer(x) @ x.mT)[:, 0], 2),
    "a sum and a product": (lambda m, x: torch.addmm(m.layer.bias, x[0], m.other.weight)[2], 1),
    "rows of one matrix": (lambda m, x: m.layer(x.reshape(-1, 6)).view(1, 10, 6)[:, 0], 2),
}


@pytest.mark.parametrize("name", THROUGH)
def test_through(name: str) -> None:
    function, nodes = THROUGH[name]
    check(function, f"{nodes} nodes compute 1 of ")


NOT_THROUGH: dict[str, Function] = {
    "all rows": lambda m, x: m.layer(x)[:, :],
    "all rows by two reads": lambda m, x: (lambda y: y[:, :3].sum() + y[:, 3:])(m.layer(x)),
    "the columns of a layer": lambda m, x: m.layer(x)[..., 0],
    "the columns of a norm": lambda m, x: m.norm(m.layer(x))[..., :3],
    "a softmax over rows": lambda m, x: m.layer(x).softmax(1)[:, 0],
    "a mean of rows": lambda m, x: m.layer(x).mean(1, keepdim=True)[:, :, 0],
    "a mean that loses its axis": lambda m, x: m.layer(x).mean(0)[0],
    "joined rows": lambda m, x: torch.cat([m.layer(x), x], 1)[:, 0],
    "split rows": lambda m, x: m.layer(x).chunk(2, 1)[0][:, 0],
    "rows taken together": lambda m, x: m.layer(x).view(2, 15, 2)[:, 0],
    "narrow, to the end from behind": lambda m, x: m.layer(x).narrow(1, -2, 2),
    "numbers of another kind": lambda m, x: m.layer(x).view(torch.int32)[:, 0],
    "a stride": lambda m, x: m.layer(x)[:, 1:4:2],
    "nothing": lambda m, x: m.layer(x)[:, 3:3],
    "an index of another": lambda m, x: x[m.layer(x * 0).long()],
    "itself as an index": lambda m, x: (lambda y: y[y > 0].sum())(m.layer(x)),
    "numbers in a tensor": lambda m, x: m.layer(x)[:, torch.tensor([0, 1])],
    "an order of rows": lambda m, x: m.layer(x).flip(1)[:, 0],
    "what is read whole, too": lambda m, x: (lambda y: (y[:, 0], y))(m.layer(x)),
    "a norm of all rows": lambda m, x: F.layer_norm(m.layer(x), (5, 6))[:, 0],
    "an axis as long, elsewhere": lambda m, x: m.layer(x).view(5, 2, 6)[:, 0],
    "a sum of all rows and a product": lambda m, x: torch.addmm(x[1], x[0], m.other.weight)[2],
    "the columns of a sum and a product": lambda m, x: torch.addmm(m.layer.bias, x[0], m.other.weight)[:, 2],
    "no layer": lambda m, x: (x * 2).relu()[:, 0],
    "the other factor of a product": lambda m, x: (x.mT @ m.layer(x))[:, :, 0],
    "one row": lambda m, x: m.layer(x[:, :1])[:, 0],
}


@pytest.mark.parametrize("name", NOT_THROUGH)
def test_not_through(name: str) -> None:
    untouched(NOT_THROUGH[name])


def test_a_mean_whose_axis_is_gone() -> None:
    untouched(lambda m, x: m.layer(x).mean(0)[:, 1], (torch.randn(2, 6, 6),))


def heads(x: Any) -> Any:
    return x.view(2, 5, 3, 2).transpose(1, 2)


def attention(m: Any, x: Any, mask: Any = None, **settings: Any) -> Any:
    result = F.scaled_dot_product_attention(heads(m.layer(x)), heads(m.other(x)), heads(x), mask, **settings)
    return result.transpose(1, 2).reshape(2, 5, 6)


def test_attention() -> None:
    gm = check(lambda m, x: attention(m, x)[:, 1], "6 nodes compute 1 of 5 rows")
    sizes = {node.target: node.meta["val"].shape[1] for node in gm.graph.find_nodes(op="call_module")}
    assert sizes == {"layer": 1, "other": 5}  # keys are those of all


@pytest.mark.parametrize("size", [(5, 5), (2, 1, 5, 5), (1, 5), (3, 1, 5)])
def test_masks_of_attention(size: tuple[int, ...]) -> None:
    mask = torch.randn(size)
    model = net(lambda m, x: attention(m, x, m.mask)[:, 3])
    model.register_buffer("mask", mask)
    check_applied(RULE, model, TOKENS, "trace")


@pytest.mark.parametrize("rows", [slice(-1, None), slice(4, 5), -1, 4])
def test_the_last_row_sees_all(rows: Any) -> None:
    gm = check(lambda m, x: attention(m, x, is_causal=True)[:, rows], "6 nodes")
    (node,) = [node for node in gm.graph.nodes if "attention" in node.name]
    assert not node.kwargs.get("is_causal")


@pytest.mark.parametrize("rows", [0, 3, slice(3, None), slice(0, 1)])
def test_other_rows_do_not(rows: Any) -> None:
    """They stay behind attention: what comes after it is computed for them alone."""
    untouched(lambda m, x: attention(m, x, is_causal=True)[:, rows])
    check(lambda m, x: m.norm(m.layer(attention(m, x, is_causal=True)))[:, rows], "4 nodes")


def test_causal_attention_of_other_keys() -> None:
    """Where there are more keys than queries, the last row sees only as many as there are queries."""
    untouched(lambda m, x: F.scaled_dot_product_attention(m.layer(x[:, :3]), x, x, is_causal=True)[:, -1])


def test_attention_of_a_tensor_with_itself() -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.layer(x)
        return m.other(F.scaled_dot_product_attention(y, y, y))[:, 0]

    check(function, "1 nodes")


def test_a_layer_that_keys_need() -> None:
    """A value of which one reader needs some rows and another all is computed whole."""

    def function(m: Any, x: Any) -> Any:
        y = m.norm(m.layer(x))
        return (F.scaled_dot_product_attention(m.other(y), y, y) + y)[:, 0]

    gm = check(function, "3 nodes")
    assert {n.target: n.meta["val"].shape[1] for n in gm.graph.find_nodes(op="call_module")} == {
        "layer": 5,
        "norm": 5,
        "other": 1,
    }


def test_two_axes_of_one_value() -> None:
    """Rows of a product with its own transpose: as rows it would be needed along one axis, as columns along another."""
    square = (torch.randn(2, 6, 6),)
    check(lambda m, x: (lambda y: m.other(y + y.transpose(1, 2)))(m.layer(x))[:, 0], "3 nodes", square)


def test_sizes_that_vary() -> None:
    model = net(lambda m, x: m.other(m.norm(m.layer(x)).relu() + x)[:, 0])
    gm = RULE(rg.trace(model, TOKENS, dynamic_shapes="auto"))
    assert rg.history(gm)[-1].applied[0].sentence.startswith("5 nodes compute 1 of s")
    for size in ((2, 5, 6), (3, 7, 6), (2, 2, 6)):
        assert_matches_float64(model, gm, (torch.randn(size),))


@pytest.mark.parametrize("rows", [-1, slice(-1, None)])
def test_the_last_of_sizes_that_vary(rows: Any) -> None:
    def function(m: Any, x: Any) -> Any:
        query, key = (layer(x).unflatten(-1, (3, 2)).transpose(1, 2) for layer in (m.layer, m.other))
        return F.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2).flatten(2)[:, rows]

    model = net(function)
    gm = RULE(rg.trace(model, TOKENS, dynamic_shapes="auto"))
    assert rg.history(gm)[-1].applied
    for size in ((2, 5, 6), (3, 7, 6), (2, 2, 6)):
        assert_matches_float64(model, gm, (torch.randn(size),))


def test_an_open_slice_of_a_size_that_varies_is_left() -> None:
    gm = RULE(rg.trace(net(lambda m, x: m.layer(x)[:, :4]), TOKENS, dynamic_shapes="auto"))
    assert not rg.history(gm)[-1].applied


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ends_that_the_graph_computes_are_left(place: int) -> None:
    gm = rg.trace(net(lambda m, x: m.layer(x)[:, 1:3]), TOKENS)
    (read,) = (node for node in gm.graph.nodes if node.name == "getitem")
    with gm.graph.inserting_before(read):
        one = gm.graph.call_function(int, (1.0,))
    ends = [1, 3, 1]
    ends[place] = one
    read.args = (read.args[0], (slice(None), slice(*ends)))
    gm.recompile()
    assert not rg.history(RULE(gm))[-1].applied


def test_graphs_without_sizes_are_left() -> None:
    gm = RULE(rg.symbolic_trace(net(lambda m, x: m.layer(x)[:, 0])))
    assert not rg.history(gm)[-1].applied


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: m.drop(m.layer(x))[:, 0], "training mode"),
        (lambda m, x: F.dropout(m.layer(x), 0.5, True)[:, 0], "draws random numbers"),
        (lambda m, x: m.hooked(x)[:, 0], "hooks"),
    ],
)
def test_refused(function: Function, words: str) -> None:
    hooked = nn.Linear(6, 6)
    model = net(function, drop=nn.Dropout(0.5), hooked=hooked)
    hooked.register_forward_hook(lambda module, args, result: result * 2)
    model.get_submodule("drop").train()
    check_refused(RULE, model, TOKENS, "trace", words)


def test_what_is_written_to_later() -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.layer(x)[:, :2]
        y.add_(1)
        return y * 2

    check_refused(RULE, net(function), TOKENS, "trace", "changes 'layer' in place")


@pytest.mark.parametrize("preset", ["exact", "fast", "compile"])
def test_presets_have_it_before_queries_are_merged_with_keys(preset: str) -> None:
    gm = rg.compose(*resolve(preset))(rg.trace(net(lambda m, x: attention(m, x)[:, 0]), TOKENS))
    assert [len(step.applied) for step in rg.history(gm) if step.transformation == "RemoveUnreadRows"] == [1]
    assert not [step for step in rg.history(gm) if step.transformation == "MergeLinears" and step.applied]


def test_layers_that_are_called_twice() -> None:
    check(lambda m, x: m.layer(m.layer(x).relu())[:, 0], "3 nodes")


def test_gradients() -> None:
    model = net(lambda m, x: m.other(m.norm(m.layer(x)))[:, 0]).train()
    gm = RULE(rg.trace(model, TOKENS))
    assert rg.history(gm)[-1].applied
    gm(*TOKENS).square().sum().backward()
    found = {name: weight.grad.clone() for name, weight in gm.named_parameters() if weight.grad is not None}
    model.zero_grad()
    model(*TOKENS).square().sum().backward()
    wanted = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


ROWWISE: tuple[Function, ...] = (
    lambda m, x: m.layer(x),
    lambda m, x: m.other(F.gelu(x)),
    lambda m, x: m.norm(x),
    lambda m, x: attention(m, x),
    lambda m, x: attention(m, x, is_causal=True),
    lambda m, x: (lambda a, b: torch.cat([a * b, b], -1))(*m.layer(x).chunk(2, -1)),
    lambda m, x: x.transpose(0, 1).contiguous().relu().transpose(0, 1),
    lambda m, x: x.view(2, 5, 3, 2).permute(2, 0, 1, 3).softmax(0).permute(1, 2, 0, 3).reshape(2, 5, 6),
    lambda m, x: x - x.mean(1, keepdim=True),
    lambda m, x: x * x.mean(-1, keepdim=True),
    lambda m, x: m.layer(x.transpose(1, 2).reshape(2, 5, 6)),
    lambda m, x: x.flip(1),
)
JOINING: tuple[Function, ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: (x @ y.mT) @ x,
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: x + y[:, :1],
)
ENDS: tuple[Function, ...] = (
    *(lambda m, x: x[:, 0], lambda m, x: x[:, -1:], lambda m, x: x[1], lambda m, x: (x[:, 1], x[:, 2:4])),
    *(lambda m, x: m.layer(x[:, 1:3]).relu()[:, 0], lambda m, x: x[0, 2:].sum()),
)


@settings(max_examples=int(os.environ.get("REGRAFT_FUZZ", "40")), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((*ROWWISE, *JOINING)), st.integers(0, 3), st.integers(0, 3)), max_size=7),
    st.sampled_from(ENDS),
)
def test_any_graph(steps: list[tuple[Function, int, int]], end: Function) -> None:
    """Values are made of the four before them; what is read of the last is right, and all of it is taken back."""

    def function(m: Any, x: Any) -> Any:
        values = [m.layer(x)] * 4
        for step, first, second in steps:
            one, other = values[first], values[second]
            values = [*values[1:], step(m, one) if step in ROWWISE else step(one, other)]
        return end(m, values[-1])

    model = net(function)
    gm = rg.trace(model, TOKENS)
    before = picture(gm)
    RULE(gm)
    assert_matches_float64(model, gm, TOKENS, slack=8.0)
    assert_same(before, picture(RULE(gm, reverse=True)))
