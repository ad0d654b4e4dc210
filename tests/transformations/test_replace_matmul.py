"""ReplaceMatmul: products with weights in every spelling, what is added to them, and what stays a product."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, assert_matches_float64, check_applied, check_refused, randomise, run
from regraft.core.graph_module import adopt
from regraft.transformations._factor import AsLinear

RULE = rg.ReplaceMatmul()
X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))


def model(function, *shapes: tuple[int, ...], **others) -> nn.Module:
    """A model of a function of itself and `x`, with a parameter `w` of the first of the shapes, `b` and `c`."""
    parts = {name: nn.Parameter(torch.empty(shape)) for name, shape in zip("wbc", shapes)}
    return randomise(Wrap(function, **parts, **others)).eval()


def linears(gm) -> list[nn.Linear]:
    return [module for module in gm.modules() if type(module) is nn.Linear]


PRODUCTS = {
    "@": (lambda m, x: x @ m.w, (4, 6)),
    "matmul": (lambda m, x: torch.matmul(x, m.w), (4, 6)),
    "a method": (lambda m, x: x.matmul(m.w), (4, 6)),
    "mm": (lambda m, x: torch.mm(x[0], m.w), (4, 6)),
    "mm, a method": (lambda m, x: x[1].mm(m.w), (4, 6)),
    "a vector": (lambda m, x: x[0, 0] @ m.w, (4, 6)),
    "t": (lambda m, x: x @ m.w.t(), (6, 4)),
    "t of t": (lambda m, x: x @ torch.t(torch.t(m.w)), (4, 6)),
    "transpose": (lambda m, x: x @ m.w.transpose(0, 1), (6, 4)),
    "permute": (lambda m, x: x @ m.w.permute(1, 0), (6, 4)),
    "adjoint": (lambda m, x: x @ torch.adjoint(m.w), (6, 4)),
    "view": (lambda m, x: x @ m.w.view(4, 6), (4, 2, 3)),
    "reshape": (lambda m, x: x @ torch.reshape(m.w, (4, -1)), (2, 2, 6)),
    "flatten": (lambda m, x: x @ m.w.flatten(1), (4, 2, 3)),
    "flattened and transposed": (lambda m, x: x @ m.w.flatten(0, 1).t(), (2, 3, 4)),
    "heads first": (lambda m, x: x @ m.w.permute(2, 0, 1).flatten(1), (2, 3, 4)),
    "viewed when transposed": (lambda m, x: x @ m.w.t().reshape(6, 4).t(), (1, 24)),
    "one input": (lambda m, x: x[..., :1] @ m.w, (1, 6)),
    "one output": (lambda m, x: x @ m.w, (4, 1)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_weight(name: str, form: str) -> None:
    function, shape = PRODUCTS[name]
    gm = check_applied(RULE, model(function, shape), (X,), form)
    (layer,) = linears(gm)
    assert layer.bias is None
    assert layer.weight.is_contiguous()
    assert layer.weight.requires_grad
    assert not [node for node in gm.graph.nodes if node.op == "get_attr"]
    assert not dict(gm.named_parameters()).keys() & {"w"}


def test_properties_of_a_captured_model() -> None:
    for function, shape in [(lambda m, x: x @ m.w.T, (6, 4)), (lambda m, x: x @ m.w.mT, (6, 4))]:
        check_applied(RULE, model(function, shape), (X,), "trace")


SUMS = {
    "behind": lambda m, x: x @ m.w + m.b,
    "before": lambda m, x: m.b + x @ m.w,
    "add": lambda m, x: torch.add(x.matmul(m.w), m.b),
    "addmm": lambda m, x: torch.addmm(m.b, x[0], m.w),
    "addmm by name": lambda m, x: torch.addmm(m.b, x[0], m.w, beta=1, alpha=1),
    "addmm, a method": lambda m, x: m.b.addmm(x[0], m.w),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SUMS)
def test_what_is_added_becomes_the_bias(name: str, form: str, dtype: torch.dtype) -> None:
    gm = check_applied(RULE, model(SUMS[name], (4, 6), (6,)).to(dtype), (X.to(dtype),), form)
    (layer,) = linears(gm)
    assert layer.bias is not None
    assert [node.op for node in gm.graph.nodes if node.op != "call_function"][-2:] == ["call_module", "output"]
    assert not [node for node in gm.graph.nodes if "add" in str(node.target)]


NO_BIAS = {
    "of another size": (lambda m, x: x @ m.w + m.b, (1,)),
    "of two axes": (lambda m, x: x @ m.w + m.b, (5, 6)),
    "that enlarges the result": (lambda m, x: x @ m.w + m.b, (3, 1, 5, 6)),
    "multiplied": (lambda m, x: torch.add(x @ m.w, m.b, alpha=2), (6,)),
    "computed": (lambda m, x: x @ m.w + m.b.tanh(), (6,)),
    "a number": (lambda m, x: x @ m.w + 2.5, (6,)),
    "twice": (lambda m, x: (lambda y: y + y)(x @ m.w), (6,)),
    "beside another reader": (lambda m, x: (lambda y: (y + m.b) * y)(x @ m.w), (6,)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NO_BIAS)
def test_what_is_added_and_is_no_bias(name: str, form: str) -> None:
    function, shape = NO_BIAS[name]
    gm = check_applied(RULE, model(function, (4, 6), shape), (X,), form)
    (layer,) = linears(gm)
    assert layer.bias is None
    assert [node for node in gm.graph.nodes if "add" in str(node.target)]


def test_a_sum_of_another_type_is_no_bias() -> None:
    wide = model(lambda m, x: x @ m.w + m.b, (4, 6), (6,))
    wide.b.data = wide.b.data.double()
    gm = check_applied(RULE, wide, (X,), "trace")
    assert linears(gm)[0].bias is None
    assert gm(X).dtype == torch.float64


REFUSED = {
    "batches of matrices": (lambda m, x: x @ m.w, [(2, 4, 6)], "no matrix"),
    "a vector": (lambda m, x: x @ m.w, [(4,)], "no matrix"),
    "rows that are put together": (lambda m, x: x @ m.w.permute(1, 0, 2).reshape(4, 6), [(2, 4, 3)], "put together"),
    "flattened columns": (lambda m, x: x @ m.w.transpose(0, 2).flatten(1), [(3, 2, 4)], "put together"),
    "alpha": (lambda m, x: torch.addmm(m.b, x[0], m.w, alpha=2), [(4, 6), (6,)], "alpha=2"),
    "beta": (lambda m, x: torch.addmm(m.b, x[0], m.w, beta=0), [(4, 6), (6,)], "beta=0"),
    "a matrix is added": (lambda m, x: torch.addmm(m.b, x[0], m.w), [(4, 6), (5, 6)], "not one number"),
    "one number is added": (lambda m, x: torch.addmm(m.b, x[0], m.w), [(4, 6), (1,)], "not one number"),
    "what is added is computed": (lambda m, x: torch.addmm(m.b.tanh(), x[0], m.w), [(4, 6), (6,)], "no weight"),
    "read elsewhere": (lambda m, x: x @ m.w + m.w.sum(), [(4, 6)], "is read by"),
    "viewed elsewhere": (lambda m, x: (lambda w: x @ w + w.sum())(m.w.t()), [(6, 4)], "also used by"),
    "a bias that is read elsewhere": (lambda m, x: x @ m.w + m.b - m.b.exp(), [(4, 6), (6,)], "is read by"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_a_product(name: str, form: str) -> None:
    function, shapes, why = REFUSED[name]
    check_refused(RULE, model(function, *shapes), (X,), form, why)


def test_bits_that_are_read_as_another_type() -> None:
    halves = model(lambda m, x: x @ m.w.view(torch.bfloat16), (4, 6)).half()
    check_refused(RULE, halves, (X.bfloat16(),), "fx", "no matrix")


def test_what_is_read_twice() -> None:
    twice = model(lambda m, x: (x @ m.w) * (x.tanh() @ m.w), (4, 6))
    check_refused(RULE, twice, (X,), "trace", "w is read by", sites=2)


def test_tied_weights() -> None:
    tied = model(lambda m, x: (x @ m.w.t()) * 2 + F.embedding(torch.tensor([1]), m.table.weight).sum(), (6, 4))
    tied.table = nn.Embedding(6, 4)
    tied.table.weight = tied.w
    check_refused(RULE, tied, (X,), "trace", "tied")


def test_a_frozen_weight_beside_a_trained_bias() -> None:
    mixed = model(lambda m, x: x @ m.w + m.b, (4, 6), (6,))
    mixed.w.requires_grad_(False)
    check_refused(RULE, mixed, (X,), "trace", "one parameter cannot be both")


def test_a_weight_that_the_graph_writes_to() -> None:
    def forward(m, x):
        result = x @ m.table
        m.table.add_(1)
        return result

    check_refused(RULE, Wrap(forward, table=torch.randn(4, 6)).eval(), (X,), "trace", "in place")


def test_products_of_computed_tensors_and_of_weights_alone_are_no_candidates() -> None:
    for function in (lambda m, x: x @ x.mT @ x, lambda m, x: m.w @ x.mT, lambda m, x: x @ (m.w @ m.b)):
        gm = RULE(rg.trace(model(function, (4, 4), (4, 4)), (X,)))
        assert not rg.history(gm)[-1].applied
        assert not rg.history(gm)[-1].refused


def test_results_that_are_written_elsewhere() -> None:
    place = torch.empty(5, 6)
    for function in (
        lambda m, x: torch.mm(x[0], m.w, out=place),
        lambda m, x: torch.addmm(m.b, x[0], m.w, out=place),
    ):
        check_refused(RULE, model(function, (4, 6), (6,)), (X,), "fx", "in place")
    gm = RULE(torch.fx.symbolic_trace(model(lambda m, x: torch.add(x[0] @ m.w, m.b, out=place), (4, 6), (6,))))
    assert linears(gm)[0].bias is None
    with torch.no_grad():
        assert gm(X).data_ptr() == place.data_ptr()


def test_weights_whose_view_is_of_a_computed_size() -> None:
    gm = RULE(torch.fx.symbolic_trace(model(lambda m, x: x @ m.w.view(x.size(-1), 6), (24,))))
    assert not rg.history(gm)[-1].applied
    assert not rg.history(gm)[-1].refused


def test_complex_weights() -> None:
    numbers = model(lambda m, x: x @ torch.adjoint(m.w), (6, 4)).to(torch.complex64)
    check_refused(RULE, numbers, (X.to(torch.complex64),), "trace", "complex")


def test_a_product_with_no_inputs() -> None:
    check_applied(RULE, model(lambda m, x: x[..., :0] @ m.w + m.b, (0, 6), (6,)), (X,), "trace")


class Conv1D(nn.Module):
    """GPT-2's layer: rows, a product and a sum, and the axes again."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(given, made)), nn.Parameter(torch.empty(made))

    def forward(self, x):
        size = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


def gpt2_block(between=lambda x: x) -> nn.Module:
    def forward(m, x):
        return x + m.project(between(F.gelu(m.expand(x), approximate="tanh")))

    return randomise(Wrap(forward, expand=Conv1D(4, 16), project=Conv1D(16, 4))).eval()


def test_conv1d_of_gpt2_takes_its_input_without_views() -> None:
    gm = check_applied(RULE, gpt2_block(), (X,), "trace", sites=2)
    assert [str(n.target) for n in gm.graph.nodes if n.op == "call_module"] == ["expand_linear", "project_linear"]
    assert not [n for n in gm.graph.nodes if n.target == "view"]
    gm = RULE(rg.trace(gpt2_block(), (X,), dynamic_shapes="auto"))
    assert not [n for n in gm.graph.nodes if n.target == "view"]
    for size in (2, 5, 4), (3, 2, 4), (2, 7, 4):
        assert_matches_float64(gpt2_block(), gm, (torch.randn(size),))


def test_rows_that_are_not_viewed_as_before_stay() -> None:
    def forward(m, x):
        return torch.addmm(m.b, x.view(-1, 4), m.w).view(5, 2, 6)

    gm = check_applied(RULE, model(forward, (4, 6), (6,)), (X,), "trace")
    assert len([n for n in gm.graph.nodes if n.target == "view"]) == 2


def test_other_rows_than_the_input_has_stay() -> None:
    def forward(m, x):
        return torch.addmm(m.b, x.reshape(-1, 2), m.w).view(2, 10, 6)

    gm = check_applied(RULE, model(forward, (2, 6), (6,)), (X,), "trace")
    assert len([n for n in gm.graph.nodes if n.target in ("view", torch.reshape)]) == 2


def test_an_input_that_is_written_to_behind_its_view() -> None:
    def forward(m, x):
        rows = x.exp()
        flat = rows.view(-1, 4)
        rows.mul_(2)
        return torch.addmm(m.b, flat, m.w).view(2, 5, 6)

    gm = check_applied(RULE, model(forward, (4, 6), (6,)), (X,), "trace")
    assert len([n for n in gm.graph.nodes if n.target == "view"]) == 2


class Noting(torch.fx.Interpreter):
    """Notes the shapes of a graph that was made without them."""

    def run_node(self, n: torch.fx.Node):
        result = super().run_node(n)
        n.meta["val"] = result.detach().to("meta") if isinstance(result, torch.Tensor) else result
        return result


def test_a_view_of_something_else_as_the_result_stays() -> None:
    def forward(m, x):
        result = torch.addmm(m.b, x.view(5, 4), m.w)
        return (x.exp() @ m.c).reshape(6, 5).view_as(result)

    other = model(forward, (4, 6), (6,), (4, 6))
    gm = adopt(torch.fx.symbolic_trace(other))
    Noting(gm).run(X[0])
    assert len(rg.history(RULE(gm))[-1].applied) == 2
    torch.testing.assert_close(run(gm, (X[0],)), run(other, (X[0],)))


def test_it_is_merged_as_layers_are() -> None:
    heads = model(lambda m, x: (x @ m.w.flatten(1)).sum() + (x @ m.c), (4, 2, 3), (1,), (4, 8))
    gm = rg.MergeLinears()(RULE(rg.trace(heads, (X,))))
    assert len(rg.history(gm)[-1].applied) == 1
    assert_matches_float64(heads, gm, (X,))


def test_xlnet_einsums_become_layers() -> None:
    def forward(m, x):
        q = torch.einsum("ibh,hnd->ibnd", x, m.w)
        return torch.einsum("ibnd,hnd->ibh", q.tanh(), m.b)

    xlnet = model(forward, (4, 2, 3), (4, 2, 3))
    gm = RULE(rg.ReplaceEinsum()(rg.trace(xlnet, (X,))))
    assert len(rg.history(gm)[-1].applied) == 2
    assert [tuple(layer.weight.shape) for layer in linears(gm)] == [(6, 4), (4, 6)]
    assert_matches_float64(xlnet, gm, (X,))


def test_what_was_trained_since_comes_back() -> None:
    original = model(lambda m, x: x @ m.w.permute(2, 0, 1).flatten(1) + m.b, (2, 3, 4), (6,))
    gm = RULE(rg.trace(original, (X,)))
    gm(X).square().sum().backward()
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter -= 0.1 * parameter.grad
    trained = gm(X)
    RULE(gm, reverse=True)
    torch.testing.assert_close(gm(X), trained)
    assert gm.w.shape == (2, 3, 4)


def test_a_checkpoint_of_the_original_loads() -> None:
    original, other = (model(lambda m, x: x @ m.w + m.b, (4, 6), (6,)) for _ in range(2))
    randomise(other, seed=1)
    gm = RULE(rg.trace(original, (X,)))
    assert rg.original_state_dict(gm).keys() == original.state_dict().keys()
    rg.load_original_state_dict(gm, other.state_dict())
    torch.testing.assert_close(gm(X), other(X))


@pytest.mark.parametrize("transposed", [True, False])
def test_the_weight_there_and_back(transposed: bool) -> None:
    how = AsLinear((2, 3, 4), (6, 4), transposed)
    given = torch.randn(2, 3, 4).transpose(0, 1).contiguous().transpose(0, 1)  # it may lie in memory as it likes
    made = how.compute(given)
    torch.testing.assert_close(made, given.reshape(6, 4).t() if transposed else given.reshape(6, 4), rtol=0, atol=0)
    (back,) = how.invert(made) or ()
    torch.testing.assert_close(back, given, rtol=0, atol=0)
