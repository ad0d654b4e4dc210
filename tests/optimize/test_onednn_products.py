"""Batches of products are compiled by oneDNN Graph, and are the same products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import Of, built
from torch import Tensor
from torch.fx import symbolic_trace

from regraft.optimize.engines import onednn_products
from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor], Tensor]
BATCH, ROWS, INNER, COLUMNS = 4, 6, 8, 10
SECOND = torch.randn(BATCH, INNER, COLUMNS)
KEYS = torch.randn(BATCH, COLUMNS, INNER)


def second(x: Tensor) -> Tensor:
    return SECOND.to(x.dtype) + x[:, :1, :1] * 0


def keys(x: Tensor) -> Tensor:
    return KEYS.to(x.dtype) + x[:, :1, :1] * 0


def batch_second(x: Tensor) -> Tensor:
    """In memory the batch is the second axis, as where `nn.MultiheadAttention` parts its heads."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_products, "_SMALL", 0)
    monkeypatch.setattr(onednn_products, "_FEW", 0)


COMPILED: dict[str, tuple[str, Function]] = {
    "a batch": ("matmul", lambda x: torch.bmm(x, second(x))),
    "an operator": ("matmul", lambda x: x @ second(x)),
    "a method": ("matmul", lambda x: x.bmm(second(x)).softmax(-1)),
    "a transposed matrix": ("matmul", lambda x: torch.matmul(x, keys(x).transpose(1, 2))),
    "the batch second": ("matmul", lambda x: torch.bmm(batch_second(x), batch_second(keys(x)).mT)),
    "the batch second, of values": ("matmul", lambda x: torch.bmm(batch_second(x), batch_second(second(x)))),
    "a transposed first matrix": ("matmul", lambda x: torch.bmm(x.mT.contiguous().mT, second(x))),
    "parts": ("matmul", lambda x: torch.bmm(x[..., :4], second(x)[:, 4:])),
    "a batch of one": ("matmul", lambda x: torch.bmm(x[1:2], second(x)[1:2])),
    "read twice": ("matmul", lambda x: (lambda y: y * 0.5 + y.softmax(-1))(x @ second(x))),
    "scaled": ("bmm", lambda x: torch.bmm(x, second(x)) * 0.3),
    "an operator, scaled": ("bmm", lambda x: (x @ second(x)) / 3),
    "an operator, and a mask": ("bmm", lambda x: x @ keys(x).mT * 0.3 + second(x)[:, :ROWS]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMPILED)
def test_a_batch_of_products_is_compiled(name: str, dtype: torch.dtype) -> None:
    kind, function = COMPILED[name]
    x = torch.randn(BATCH, ROWS, INNER).to(dtype)
    forms = Forms(symbolic_trace(Of(function)), [x])
    graph: Any = torch.jit.trace(forms, (x, *forms.beside), check_trace=False).inlined_graph
    assert [node.kind() for node in graph.nodes() if "mm" in node.kind() or "matmul" in node.kind()] == [
        f"aten::{kind}"
    ]
    run = built(Of(function), x)
    run([x])
    outside = {node.kind() for node in torch.jit.last_executed_optimized_graph().nodes()}
    assert f"aten::{kind}" not in outside
    for given in (x, -x):
        (found,), plain = run([given]), function(given)
        expected = function(given.double())
        assert (found.dtype, found.shape) == (dtype, plain.shape)
        error, own = ((result.double() - expected).abs().max() for result in (found, plain))
        assert error <= 2 * own + torch.finfo(dtype).eps


OTHERS: dict[str, Function] = {
    "a single row": lambda x: torch.bmm(x[:, :1], second(x)),
    "a single column": lambda x: torch.bmm(x, second(x)[..., :1]),
    "a single product": lambda x: torch.bmm(x[..., :1], second(x)[:, :1]),
    "one matrix for all": lambda x: torch.matmul(x, SECOND[:1].to(x.dtype)),
    "a matrix, as long as the batch": lambda x: x[..., :BATCH] @ SECOND[0, :BATCH].to(x.dtype),
    "two axes": lambda x: x[0] @ SECOND[0].to(x.dtype),
    "four axes": lambda x: x[None] @ second(x)[None],
    "in float64": lambda x: torch.bmm(x.double(), second(x.double())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    function, x = OTHERS[name], torch.randn(BATCH, ROWS, INNER)
    forms = Forms(symbolic_trace(Of(function)), [x])
    assert not forms.known.respelled
    torch.testing.assert_close(built(Of(function), x)([-x])[0], function(-x))


@pytest.mark.parametrize(("small", "few", "stays"), [(1920, 0, False), (1921, 0, True), (0, 60, False), (0, 61, True)])
def test_small_ones_are_left_to_torch(small: int, few: int, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_products, "_SMALL", small)
    monkeypatch.setattr(onednn_products, "_FEW", few)
    x = torch.randn(BATCH, ROWS, INNER)
    of_keys = Forms(symbolic_trace(Of(lambda x: torch.bmm(x, keys(x).mT))), [x])
    assert (not of_keys.known.respelled) == stays
    plain = Forms(symbolic_trace(Of(lambda x: torch.bmm(x, second(x)))), [x])
    assert (not plain.known.respelled) == (stays and few == 0)
    halves = Forms(symbolic_trace(Of(lambda x: torch.bmm(x, keys(x).mT))), [x.bfloat16()])
    assert (not halves.known.respelled) == (stays and few == 0)
