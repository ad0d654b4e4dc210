"""Of a product the columns are computed that a gather reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_onednn_graph import Of, built, weight
from torch import Tensor
from torch.fx import symbolic_trace
from torch.nn import functional as F

from regraft.optimize.engines.onednn_columns import of_columns_read
from regraft.optimize.engines.onednn_forms import Forms

X = weight(3, 7, 6)
KEYS = weight(3, 6, 40)


def places(x: Tensor, furthest: int = 20) -> Tensor:
    """For each pair of rows the column of their distance."""
    rows = torch.arange(x.size(1))
    return (rows[:, None] - rows).clamp(-furthest, furthest - 1).add(furthest).expand(x.size(0), -1, -1)


READ_IN_PART: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (lambda x: torch.gather(torch.bmm(x, KEYS), -1, places(x)), 13),
    (lambda x: torch.gather(x @ KEYS[0], dim=2, index=places(x)).mT * 2, 13),
    (lambda x: (x.tanh()).bmm(KEYS).gather(-1, index=places(x)) + x.sum(-1, keepdim=True), 13),
    (lambda x: torch.mm(x[0], KEYS[1]).gather(1, places(x)[0, :4] + 3), 10),
    (lambda x: torch.matmul(x[:, None], KEYS[:, None]).gather(3, places(x)[:, None]), 13),
    (lambda x: torch.bmm(x.bfloat16(), KEYS.bfloat16()).gather(-1, places(x)), 13),
]


@pytest.mark.parametrize(("function", "width"), READ_IN_PART)
def test_columns_that_nobody_reads_are_not_computed(function: Callable[[Tensor], Tensor], width: int) -> None:
    module = Of(function)
    known = Forms(symbolic_trace(module), [X]).known
    (product,) = [node for node in known.respelled if node in known.products]
    first = next(node for node in product.all_input_nodes if node not in known.steady)
    given = torch.ones(known.forms[first][0], dtype=function(X).dtype)
    assert known.respelled[product]({first: given}).shape[-1] == width
    run = built(module, X)
    for sign in (1, -1):
        found, expected = run([sign * X])[0], module(sign * X)
        # where the processor has no instructions for halves, the columns are summed in float32
        atol = 2 * torch.finfo(found.dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.gather(torch.bmm(x, KEYS[..., :25]), -1, places(x, 12)),  # more than half are read
        lambda x: torch.gather(torch.bmm(x, KEYS), -1, places(x)[..., :0]).sum() + x,  # none
        lambda x: torch.gather(x, -1, places(x)[..., :6] % 6),  # no product
        lambda x: torch.index_select(torch.bmm(x, KEYS), -1, torch.arange(x.size(1)) * 3),  # no gather
        lambda x: torch.gather(torch.matmul(x, KEYS[0, :, 0]), -1, places(x)[:, 0, :5] % 2),  # a vector
        lambda x: torch.gather(torch.bmm(x, KEYS), 1, places(x)[:, :, :5] % 7),  # rows
        lambda x: (y := torch.bmm(x, KEYS)).gather(-1, places(x)) + y.sum(),  # read by others, too
        lambda x: torch.gather(torch.bmm(x, KEYS), -1, x.long().abs()),  # an index that is computed
        lambda x: torch.gather(torch.bmm(x, x.mT @ x @ KEYS), -1, places(x)),  # a matrix that is computed
        lambda x: torch.gather(F.linear(x, KEYS[0].mT.contiguous(), KEYS[0, 0]), -1, places(x)),  # a layer
        lambda x: torch.gather(torch.bmm(torch.ones(x.shape), KEYS), -1, places(x)) * x[..., :1],  # always the same
    ],
)
def test_others_stay_as_they_are(function: Callable[[Tensor], Tensor]) -> None:
    module = Of(function)
    known = Forms(symbolic_trace(module), [X]).known
    assert known.products.isdisjoint(known.respelled)
    torch.testing.assert_close(built(module, X)([X])[0], module(X))


def test_a_product_into_a_given_tensor_stays() -> None:
    gm = symbolic_trace(Of(lambda x: torch.gather(torch.bmm(x, KEYS, out=x.new_zeros((3, 7, 40))), -1, places(x))))
    nodes = {node.name: node for node in gm.graph.nodes}
    steady = {nodes["_tensor_constant0"]: KEYS, nodes["expand"]: places(X)}
    assert not of_columns_read(nodes["gather"], gm, steady)
    nodes["bmm"].kwargs = {}
    assert set(of_columns_read(nodes["gather"], gm, steady)) == {nodes["bmm"], nodes["gather"]}
