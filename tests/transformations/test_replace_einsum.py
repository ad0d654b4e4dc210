"""ReplaceEinsum: what a matrix product is, in every order of its axes, and what is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import regraft as rg
from helpers import check_applied, check_refused, run
from regraft.transformations._einsum import MatrixProduct

RULE = rg.ReplaceEinsum()
SIZES = {"a": 2, "b": 3, "i": 5, "j": 6, "d": 4, "e": 7}


class Of(nn.Module):
    """A model that is a function of two tensors."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


def einsum(equation: str) -> Of:
    return Of(lambda x, y: torch.einsum(equation, x, y))


def tensors(equation: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    terms = equation.partition("->")[0].replace(" ", "").replace("...", "ab").split(",")
    return tuple(torch.randn([SIZES[letter] for letter in term]).to(dtype) for term in terms)


@pytest.mark.parametrize(
    "equation",
    [
        "aid,ajd->aij",
        "aid,adj->aij",
        "id,jd->ij",
        "id, dj -> ji",
        "aibd,ajbd->abij",
        "abij,ajbd->aibd",
        "iabd,jabd->abij",  # XLNet's
        "...id,...jd->...ij",
        "...id,...jd->ij...",
        "abd,dij->abij",  # XLNet's with its weights
        "abij,dij->abd",
        "iad,djb->iajb",
        "dab,jid->jaib",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products(equation: str, dtype: torch.dtype) -> None:
    gm = check_applied(RULE, einsum(equation), tensors(equation, dtype), "trace")
    assert not [node for node in gm.graph.nodes if "einsum" in str(node.target)]


def assert_replaced_with_its_strides(equation: str) -> None:
    model, given = einsum(equation), tensors(equation)
    gm = RULE(rg.trace(model, given))
    assert len(rg.history(gm)[-1].applied) == 1
    (found,), (wanted,) = run(gm, given), run(model, given)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


@settings(max_examples=60, deadline=None)
@given(*(st.permutations(letters) for letters in ("abid", "abjd", "abij")))
def test_every_order_of_the_axes_with_the_strides_of_einsum(left, right, result) -> None:
    equation = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    assert_replaced_with_its_strides(equation)


@st.composite
def equations(draw: st.DrawFn) -> str:
    """Equations of one to two axes of rows, of columns, and that are summed over, in every order."""
    rows, columns, summed = (draw(st.permutations(pair))[: draw(st.integers(1, 2))] for pair in ("ab", "ij", "de"))
    left, right, result = (draw(st.permutations(axes)) for axes in (rows + summed, columns + summed, rows + columns))
    return f"{''.join(left)},{''.join(right)}->{''.join(result)}"


@settings(max_examples=100, deadline=None)
@given(equations())
def test_several_axes_in_the_place_of_one_with_the_strides_of_einsum(equation: str) -> None:
    assert_replaced_with_its_strides(equation)


def test_several_columns_whose_sizes_are_symbols() -> None:
    given = tensors("abd,dij->abij")
    gm = rg.trace(einsum("abd,dij->abij"), given, dynamic_shapes="auto")
    RULE(gm)
    (refusal,) = rg.history(gm)[-1].refused
    assert "the size of one of them is not known" in refusal.reason
    gm = RULE(rg.trace(einsum("abd,dj->abj"), tensors("abd,dj->abj"), dynamic_shapes="auto"))
    assert len(rg.history(gm)[-1].applied) == 1
    for sizes in (2, 3), (5, 4):
        more = torch.randn(*sizes, 4), torch.randn(4, 6)
        torch.testing.assert_close(run(gm, more), run(einsum("abd,dj->abj"), more))


def test_a_list_of_tensors_in_a_graph_of_one_s_own() -> None:
    given = tensors("id,jd->ij")
    gm = torch.fx.symbolic_trace(Of(lambda x, y: torch.einsum("id,jd->ij", [x, y])))
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["val"] = value.to("meta")
    wanted = run(gm, given)
    assert RULE.explain(gm).applied == 1
    torch.testing.assert_close(run(RULE(gm), given), wanted)


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("aid,ajd->aijd", "no product of two matrices"),
        ("aid,ajd->ai", "no product"),  # j is summed by itself
        ("ad,ajd->aj", "no product"),  # a vector
        ("aid,ad->ai", "no product"),
        ("biad,bjd->biaj", "no product"),  # two axes of rows in each batch
        ("bide,bjde->bij", "no product"),  # two that are summed over
        ("ida,jd->ij", "no product"),  # a is summed by itself, too
        ("aid,ajd->aji", None),
        ("id,jd", "no product"),  # what it results in is left to torch
        ("iid,jd->ij", "no product"),  # a diagonal
    ],
)
def test_what_is_no_product(equation: str, why: str | None) -> None:
    given = tensors(equation)
    if why is None:
        check_applied(RULE, einsum(equation), given, "trace")
    else:
        check_refused(RULE, einsum(equation), given, "trace", why)


def test_an_axis_of_one_element_that_einsum_repeats() -> None:
    for x, y in [((5, 1), (6, 4)), ((5, 4), (6, 1))]:
        check_refused(RULE, einsum("id,jd->ij"), (torch.randn(x), torch.randn(y)), "trace", "no product")
    given = torch.randn(1, 5, 4), torch.randn(2, 6, 4)
    check_refused(RULE, einsum("aid,ajd->aij"), given, "trace", "no product")


def test_other_numbers_of_axes() -> None:
    given = torch.randn(2, 5, 4), torch.randn(6, 4)
    check_refused(RULE, einsum("...id,...jd->...ij"), given, "trace", "no product")
    assert MatrixProduct.of("aid,ajd->aij", [(2, 5, 4), (2, 6)]) is None


def test_other_numbers_of_tensors() -> None:
    given = tensors("id,jd->ij")
    three = Of(lambda x, y: torch.einsum("id,jd,j->ij", x, y, y.sum(1)))
    check_refused(RULE, three, given, "trace", "an einsum of 3 tensors")
    check_refused(RULE, Of(lambda x, y: y + torch.einsum("id->", x)), given, "trace", "an einsum of 1 tensors")


def test_shapes_that_are_not_known() -> None:
    check_refused(RULE, einsum("id,jd->ij"), tensors("id,jd->ij"), "fx", "capture with rg.trace")


def test_attention_that_is_written_with_einsum_is_fused() -> None:
    def attention(q, kv):
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, kv) * 0.3, -1)
        return torch.einsum("bhij,bjhd->bihd", weights, kv.tanh()).reshape(2, 5, -1)

    given = torch.randn(2, 5, 3, 4), torch.randn(2, 6, 3, 4)
    gm = check_applied(RULE, Of(attention), given, "trace", sites=2)
    rg.FuseAttention()(gm)
    assert [node for node in gm.graph.nodes if "scaled_dot_product" in str(node.target)]
    torch.testing.assert_close(run(gm, given), run(Of(attention), given))
