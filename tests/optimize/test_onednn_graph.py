"""oneDNN Graph computes what torch does, operator by operator, wherever it fuses; what it does not is refused."""

from __future__ import annotations

import copy
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from regraft.core.errors import NotCovered
from regraft.optimize.engines import onednn_graph, onednn_layouts
from regraft.optimize.engines.onednn_forms import Forms

SIZE = (2, 6, 12, 10)
Function = Callable[[Tensor], Tensor]


@cache
def weight(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


W6, W8, W10 = weight(6), weight(8), weight(10)
OPERATORS: dict[str, Function] = {
    "conv": lambda x: F.conv2d(x, weight(8, 6, 3, 3), W8, 2, 1),
    "conv dilated": lambda x: F.conv2d(x, weight(8, 6, 3, 3), None, 1, 2, 2),
    "conv padded to the same": lambda x: F.conv2d(x, weight(8, 6, 3, 3), W8, padding="same"),
    "conv padded by one more after it": lambda x: F.conv2d(x, weight(8, 6, 4, 3), W8, padding="same"),
    "conv padded to the same, dilated": lambda x: F.conv2d(x, weight(8, 6, 3, 2), None, 1, "same", (2, 3)),
    "conv not padded": lambda x: F.conv2d(x, weight(8, 3, 3, 3), W8, (2, 1), "valid", 1, 2),
    "conv in groups": lambda x: F.conv2d(x, weight(8, 3, 3, 3), W8, groups=2),
    "conv by channel": lambda x: F.conv2d(x, weight(6, 1, 3, 3), W6, 1, 1, 1, 6),
    "conv by channel, dilated": lambda x: F.conv2d(x, weight(6, 1, 3, 3), W6, 1, (4, 8), (4, 8), 6),
    "conv by channel over one axis": lambda x: F.relu(F.conv1d(x[:, :, 1], weight(6, 1, 3), W6, 2, 1, 1, 6)),
    "conv by channel over one axis, between others": lambda x: F.conv1d(
        F.conv1d(F.conv1d(x[:, :, 0], weight(6, 6, 1)), weight(6, 1, 3), W6, 1, 1, 1, 6) + x[:, :, 1], weight(8, 6, 1)
    ),
    "conv by channel over one axis, dilated": lambda x: F.conv1d(x[:, :, 0], weight(6, 1, 5), W6, 1, 8, 4, 6),
    "conv dilated beyond the image": lambda x: F.conv2d(x, weight(8, 6, 3, 3), W8, 1, 12, 12),
    "transposed conv": lambda x: F.conv_transpose2d(x, weight(6, 8, 3, 3), W8, 2, 1, 1),
    "batch norm": lambda x: F.batch_norm(x, W6, W6.abs() + 0.1, W6 + 1, W6, eps=1e-2),
    "layer norm": lambda x: F.layer_norm(x, [10], W10, W10, eps=0.3),
    "rms norm": lambda x: F.rms_norm(x, [10], W10, eps=0.3),
    "rms norm without a weight": lambda x: F.rms_norm(x, [10], eps=1e-6),
    "rms norm over two axes": lambda x: F.rms_norm(x, [12, 10], weight(12, 10), 0.02),
    "rms norm of nothing": lambda x: x + F.rms_norm(x[..., :0], [0], eps=0.1).sum(-1, keepdim=True),
    "rms norm of a sum, for a layer": lambda x: F.linear(
        F.rms_norm(x + F.linear(x, weight(10, 10)), [10], W10, 0.1), weight(9, 10)
    ),
    "rms norm with torch's own eps": lambda x: F.rms_norm(x, [10], W10),
    "group norm": lambda x: F.group_norm(x, 3, W6, W6),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max pool dilated": lambda x: F.max_pool2d(x, 3, 1, 1, 2),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average pool without the padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average pool by a divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "add a multiple": lambda x: torch.add(x, x.relu(), alpha=2.5),
    "add a multiple of a number": lambda x: torch.add(x, 1.5, alpha=3),
    "subtract a multiple": lambda x: torch.sub(x, x.tanh(), alpha=2.5),
    "subtract from": lambda x: torch.rsub(x, x.tanh(), alpha=2),
    "add a mean": lambda x: x + x.mean((2, 3), keepdim=True),
    "multiply by a column": lambda x: x * x.mean(3, keepdim=True),
    "divide": lambda x: x / (x.abs() + 1),
    "power": lambda x: (x.abs() + 1) ** -1.5,
    "power of a number": lambda x: 2.0**x,
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(-1),
    "linear": lambda x: F.linear(x, weight(5, 10), weight(5)),
    "matmul": lambda x: x @ x.transpose(2, 3),
    "matmul with fewer axes": lambda x: x @ weight(10, 7),
    "einsum": lambda x: torch.einsum("bchw,bcHw->bchH", x, x),
    "attention": lambda x: ((x @ x.transpose(2, 3)) / 3.1 + torch.ones(12, 12).tril()).softmax(-1) @ x,
    "attention, masked": lambda x: (x @ x.mT * 0.3).masked_fill(torch.ones(12, 12).tril() == 0, -9e9).softmax(-1) @ x,
    "fused attention": lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.7),
    "fused causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "fused attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT),
    "fused attention, some hidden": lambda x: F.scaled_dot_product_attention(x, x, value=x, attn_mask=x @ x.mT > 1),
    "fused attention of whole numbers": lambda x: F.scaled_dot_product_attention(x, x, x, (x @ x.mT > 0).float() - 1),
    "product and a constant": lambda x: F.linear(x, weight(10, 10)) + weight(12, 10),
    "product times a constant": lambda x: weight(10) * F.linear(x, weight(10, 10), W10),
    "product less a part": lambda x: torch.sub(x @ weight(10, 10), W10, alpha=0.3),
    "product with single rows that lie apart": lambda x: torch.matmul(x[..., :3, :1], x[..., 3:4, :]),
    "product with a single key of each head": lambda x: (
        x[..., :1].softmax(-1) @ x.transpose(1, 2)[:, :1].transpose(1, 2)[:, :1]
    ),
    "product in place": lambda x: F.linear(x, weight(10, 10)).mul_(weight(12, 10)),
    "product and an embedding": lambda x: F.linear(x, weight(9, 10)) + F.embedding(torch.arange(12), weight(20, 9)),
    "conv times a constant": lambda x: F.conv2d(x, weight(8, 6, 1, 1)) * weight(8, 1, 1),
    "layer norm without weights": lambda x: F.layer_norm(x, [12, 10], eps=0.3),
    "layer norm without a bias": lambda x: F.layer_norm(x, [10], W10),
    "layer norm without a weight": lambda x: F.layer_norm(x, [10], None, W10),
    "batch norm without weights": lambda x: F.batch_norm(x, W6, W6.abs() + 0.1, eps=1e-2),
    "batch norm without a bias": lambda x: torch.batch_norm(x, W6, None, W6, W6.abs(), False, 0.1, 1e-2, True),
    "joined to nothing": lambda x: torch.cat([x[:, :0], x, torch.zeros(0)], 1),
    "joined to nothing and something": lambda x: torch.cat([x[..., :0], x, x[..., :0], x.tanh()], dim=-1),
    "whole numbers joined": lambda x: x + torch.cat([x.long(), x.argsort(2)], dim=2)[:, :, ::2],
    "whole numbers of one axis joined": lambda x: x * torch.concat([x[0, 0, 0].long(), torch.zeros(0).long()]),
    "booleans joined": lambda x: torch.cat((x > 0, x[..., :3] > 0.1), -1).float(),
    "float64 joined": lambda x: torch.concatenate([x.double(), x, x[:0].double()], axis=0).mean(0),
    "whole numbers joined to nothing": lambda x: x + torch.cat([x[0, 0, 0].long(), torch.zeros(0, dtype=torch.double)]),
    "two of nothing joined": lambda x: x + torch.cat([x[:0], x[:0]]).sum(),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(F.linear(x, weight(10, 10)), approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": lambda x: F.elu(x, 0.3),
    "celu": lambda x: F.celu(x, 0.3),
    "selu": F.selu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.3),
    "prelu": lambda x: F.prelu(x, W6),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "clamp from below": lambda x: x.clamp(min=0.2),
    "clamp from above": lambda x: x.clamp(max=0.2),
    "clamp": lambda x: x.clamp(-0.1, 0.2),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "square root": lambda x: x.abs().sqrt(),
    "square": torch.square,
    "log": lambda x: (x.abs() + 0.1).log(),
    "error function": torch.erf,
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum((1, 2)),
    "largest": lambda x: x.amax(1),
    "larger": lambda x: torch.maximum(x, -x),
    "variance": lambda x: x.var((2, 3)),
    "length": lambda x: x * torch.linalg.vector_norm(x, 2, (1, 2), keepdim=True),
    "length along the last axis": lambda x: x / torch.linalg.vector_norm(x, 2, -1, keepdim=True),
    "permuted": lambda x: x.permute(0, 2, 3, 1).reshape(2, 12, -1),
    "concatenated": lambda x: torch.cat([x, x * 2], 1),
    "chunks": lambda x: torch.add(x.chunk(2, 1)[0], x.chunk(2, 1)[1]),
    "max pooling by windows": lambda x: F.max_pool2d(x, 2),
    "max pooling by named windows": lambda x: torch.max_pool2d(x, kernel_size=(3, 2), padding=1),
    "average pooling by windows": lambda x: F.avg_pool2d(x, (3, 2), None, 1, count_include_pad=False),
    "average pooling with a stride": lambda x: F.avg_pool2d(x, 3, stride=1),
    "clamp between tensors": lambda x: x.clamp(x.mean(1, keepdim=True) - 0.1, max=x.mean()),
    "largest of an axis": lambda x: x.max(1)[0] + torch.max(x.abs(), dim=1)[0],
    "smallest of an axis, kept": lambda x: x * torch.min(x, 2, True)[0] + x.min(dim=-1, keepdim=True)[0],
    "largest of an axis, by its name": lambda x: x.max(1).values - 1,
    "larger and smaller of two": lambda x: torch.max(x, x.roll(1, 0)) + x.min(x.roll(1, 1)),
    "largest of all": lambda x: x / x.max(),
    "filled nowhere": lambda x: x.masked_fill(torch.zeros(12, 10, dtype=torch.bool), 7.0),
    "filled in a place": lambda x: x.masked_fill(torch.arange(10) == 3, 7.0),
    "filled nowhere, and larger": lambda x: x[:1, :, :1].masked_fill(torch.zeros(2, 1, 12, 1) > 0, 7.0).sum((0, 2)),
    "filled where it is negative": lambda x: x.masked_fill(x < 0, 7.0),
    "clamp by a tensor": lambda x: torch.clip(x, max=x.roll(1, 0)),
    "every second": lambda x: x[:, 1::2],
    "expanded": lambda x: x[:1].expand(2, 6, 12, 10),
    "chosen": lambda x: torch.where(x > 0.1, x, -x),
    "padded": lambda x: F.pad(x, (1, 2, 3, 0)),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "shuffled": lambda x: F.pixel_shuffle(x[:, :4], 2),
    "in float64 between": lambda x: (x.double() * 2).float(),
    "times whole numbers": lambda x: x * torch.arange(10),
}
BEFORE: list[Function] = [lambda x: x, lambda x: F.conv2d(x, weight(6, 6, 1, 1)), lambda x: x @ x.mT @ x * 0.1]
AFTER: list[Function] = [lambda y: y * 1.1, F.relu, lambda y: y + y.sigmoid()]


class Of(nn.Module):
    """Functions one after the other."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.functions = functions
        self.modules_of_it = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def built(module: nn.Module, *sample: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
    results = pytree.tree_leaves(module(*sample))  # makes its weights, too, which are not part of the program
    dtypes = [result.dtype for result in results if isinstance(result, Tensor)]
    return onednn_graph.build(SimpleNamespace(module=symbolic_trace(module), sample=list(sample), dtypes=dtypes))


def result_of(forms: Forms, x: Tensor) -> Tensor:
    """What the forms compute, without oneDNN Graph."""
    return forms.complete(forms(x, *forms.beside))[0]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator(name: str) -> None:
    for before, after in zip(BEFORE, AFTER, strict=True):
        module = Of(before, OPERATORS[name], after)
        run = built(module, weight(*SIZE))
        x = torch.randn(SIZE)
        (found,), expected = run([x]), module(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


class Hidden(nn.Module):
    """Of which a graph that takes it for a leaf knows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


EXTREMES: dict[str, tuple[Function, int]] = {
    "largest": (lambda x: x.max(1)[0] + torch.max(x.abs(), dim=1)[0], 0),
    "largest, read twice": (lambda x: (found := x.max(2, True), found[0] * found[0])[-1], 0),
    "largest, and where": (lambda x: (found := x.max(1), found[0] * found[1])[-1], 1),
    "where the smallest is": (lambda x: x.min(dim=3)[1] * 1.5, 1),
    "larger of two": (lambda x: torch.max(x, x.roll(1, 0)), 1),
    "all of it": (lambda x: x.max(1), 1),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_places_that_nobody_reads_are_not_found(name: str) -> None:
    function, left = EXTREMES[name]
    x = torch.randn(SIZE)
    x[0, 0, 0, 0] = math.nan
    forms = Forms(symbolic_trace(Of(function)), [torch.randn(SIZE)])
    program: Any = torch.jit.trace(forms, (torch.randn(SIZE), *forms.beside), check_trace=False)
    kinds = [node.kind() for node in torch.jit.freeze(program.eval()).graph.nodes()]
    assert kinds.count("aten::max") + kinds.count("aten::min") == left
    expected = pytree.tree_leaves(function(x))[0]
    assert torch.equal(result_of(forms, x).nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("name", ["filled nowhere", "filled in a place"])
def test_what_is_filled_nowhere_is_left(name: str) -> None:
    forms = Forms(symbolic_trace(Of(OPERATORS[name])), [torch.randn(SIZE)])
    program: Any = torch.jit.trace(forms, (torch.randn(SIZE), *forms.beside), check_trace=False).graph
    filling = any("masked_fill" in node.kind() for node in program.nodes())
    assert filling is (name == "filled in a place")


def test_gelu_by_tanh_that_is_not_seen_is_refused() -> None:
    root, graph = nn.ModuleDict({"hidden": Hidden()}), torch.fx.Graph()
    graph.output(graph.call_module("hidden", (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule(root, graph)
    with pytest.raises(ValueError, match="GELU by tanh"):
        onednn_graph.build(SimpleNamespace(module=gm, sample=[weight(*SIZE)]))


class Plain(nn.Module):
    """Layers without weights or biases, and tables, whose results are the same in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(6, affine=False), nn.LayerNorm([12, 10], elementwise_affine=False)])
        self.norm, self.table = nn.LayerNorm(10, bias=False), nn.Embedding(12, 10)
        self.products = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.act, self.token = nn.GELU(approximate="tanh"), nn.Parameter(torch.randn(1, 1, 10))
        batch_norm = self.norms[0]
        batch_norm.running_mean.normal_()
        batch_norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        for norm in (*self.norms, self.norm):
            x = self.act(norm(x))
        x = self.products[0](x) + self.table(torch.arange(12))
        return torch.cat([self.token.expand(2, 6, 1, 10).to(x.dtype), self.products[1](x) * self.token.contiguous()], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_without_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Plain().eval()
    exact = copy.deepcopy(model).double()
    model, x = model.to(dtype), weight(*SIZE).to(dtype)
    with torch.no_grad():
        run, trains = built(model, x), [module.training for module in model.modules()]
        for given in (x, torch.randn(SIZE).to(dtype)):
            (found,), expected, right = run([given]), model(given), exact(given.double())
            assert found.dtype is dtype
            assert (found - right).abs().max() <= 2 * (expected - right).abs().max() + torch.finfo(dtype).eps
    assert not any(trains)


def test_the_layers_of_the_graph_stay_in_their_mode() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU()).train()
    built(model, weight(*SIZE))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 6), (2, 6, 7), (2, 6, 7, 5), (1, 6, 3, 2, 4)])
def test_a_batch_norm_in_float32_is_a_product_and_a_sum(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    kinds = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    model = nn.Sequential(kinds[len(sizes) - 2](6, eps=1e-2), nn.ReLU()).eval()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(6) + 0.1 if "var" in name else torch.randn(6))
    exact = copy.deepcopy(model).to(dtype).double()
    model, x = model.to(dtype), weight(*sizes).to(dtype)
    forms = Forms(symbolic_trace(model), [x])
    assert len(forms.known.respelled) == 2 * (dtype is torch.float32)  # the ReLU is written into it
    assert ("addcmul" in str(torch.jit.trace(forms, (x,)).inlined_graph)) == (dtype is torch.float32)
    error = (result_of(forms, x) - exact(x.double())).abs().max()
    assert error <= 2 * (model(x) - exact(x.double())).abs().max() + torch.finfo(dtype).eps
    torch.testing.assert_close(built(model, x)([x * 2])[0], model(x * 2))


def test_a_batch_norm_with_a_weight_that_is_computed() -> None:
    model = Of(lambda x: F.batch_norm(x, W6, W6.abs() + 0.1, x.mean((0, 2, 3)), x.amax((0, 2, 3)), eps=1e-2))
    x = torch.randn(SIZE)
    torch.testing.assert_close(built(model, weight(*SIZE))([x])[0], model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tracked", [False, True])
def test_a_batch_norm_in_training_is_computed_from_its_batch(tracked: bool) -> None:
    model = nn.BatchNorm2d(6, affine=False, track_running_stats=tracked)
    x = weight(*SIZE)
    torch.testing.assert_close(built(Of(model), x)([x])[0], model(x))


def test_gelu_by_tanh_is_rounded_once() -> None:
    def function(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    x = torch.randn(64, 64).bfloat16()
    (found,) = built(Of(function), x)([x])
    assert (found == function(x)).float().mean() > 0.98


def test_gelu_by_tanh_of_a_part_becomes_dense() -> None:
    """Arithmetic on what has gaps is forty times slower."""

    def copies(function: Function) -> int:
        gm, x = symbolic_trace(Of(function, lambda x: F.gelu(x, approximate="tanh"))), torch.randn(3, 4, 8)
        forms = Forms(gm, [x])
        torch.testing.assert_close(result_of(forms, x), gm(x))
        program: Any = torch.jit.trace(forms, (x,), check_trace=False).graph
        return len(program.findAllNodes("aten::clone"))

    assert (copies(lambda x: x.relu()), copies(lambda x: x[..., :5]), copies(lambda x: x.mT)) == (0, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "respelled"),
    [
        (lambda x: torch.linalg.vector_norm(x, 2, (1, 2), keepdim=True), True),
        (lambda x: torch.linalg.vector_norm(x, dim=[-3]), True),
        (lambda x: torch.linalg.vector_norm(x, ord=2.0, dim=(0, -2), keepdim=False), True),
        (lambda x: torch.linalg.vector_norm(x, 2, (1, -1)), False),
        (lambda x: torch.linalg.vector_norm(x.transpose(1, -1), 2, -1, keepdim=True), True),  # as XCiT's, of tokens
        (lambda x: torch.linalg.vector_norm(x.transpose(1, -1), 2, 1), False),
        (lambda x: torch.linalg.vector_norm(x, 2, 1, True), True),
        (lambda x: torch.linalg.vector_norm(x, 1, (1,), keepdim=True), False),
        (lambda x: torch.linalg.vector_norm(x), False),
        (lambda x: torch.linalg.vector_norm(torch.linalg.vector_norm(x), 2, -1), False),
        (lambda x: torch.linalg.vector_norm(x, 2, [1], dtype=torch.float64), False),
    ],
)
def test_a_length_is_the_root_of_a_sum_of_squares(function: Function, respelled: bool, dtype: torch.dtype) -> None:
    gm, x = symbolic_trace(Of(function)), (torch.randn(SIZE) * 3).to(dtype)
    forms = Forms(gm, [x])
    assert bool(forms.known.respelled) == respelled
    found, expected = result_of(forms, x), function(x.double())
    assert (found.shape, found.dtype) == (expected.shape, gm(x).dtype)
    once = 0.51 if dtype is torch.bfloat16 else 2  # in float32 the squares are rounded, too
    torch.testing.assert_close(found.double(), expected, rtol=once * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_an_rms_norm_is_as_near_to_float64_as_torchs(weighted: bool, dtype: torch.dtype) -> None:
    module = Of(nn.RMSNorm(300, eps=1e-3, elementwise_affine=weighted))
    if weighted:
        nn.init.normal_(module.functions[0].weight)
    module, x = module.to(dtype), torch.randn(2, 7, 300, dtype=dtype)
    assert len(Forms(symbolic_trace(module), [x]).known.respelled) == 1
    run = built(module, x)
    for given in (x, 30 * x + 20, x * 1e-3, torch.zeros_like(x)):
        exact = module.double()(given.double())
        found, usual = ((y.double() - exact).norm() for y in (run([given])[0], module.to(dtype)(given)))
        assert found <= 1.1 * usual + 1e-7 * exact.norm()


@pytest.mark.parametrize("weighted", [True, False])
def test_an_rms_norm_is_no_part_of_the_product_that_reads_it(weighted: bool) -> None:
    module, x = (
        Of(lambda x: F.linear(F.rms_norm(x, [10], W10 if weighted else None, 0.1), weight(9, 10))),
        weight(12, 10),
    )
    forms = Forms(symbolic_trace(module), [x])
    program: Any = torch.jit.trace(forms, (x, *forms.beside), check_trace=False).graph
    (product,) = program.findAllNodes("aten::linear")
    assert next(iter(product.inputs())).node().kind() == "aten::alias"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mask_is_made_numbers_once_for_all_layers(dtype: torch.dtype) -> None:
    def attended(x: Tensor) -> Tensor:
        hidden = (x[..., 0] > 0).unsqueeze(2)  # in some heads from all rows, and in any precision the same
        for place in range(3):
            x = F.scaled_dot_product_attention(x.roll(place, 2), x, x * 2, hidden, 0.0, is_causal=False, scale=0.3)
        return x

    module, x = Of(attended), weight(*SIZE).to(dtype)
    x[0, 1] = -1
    run = built(module, x)
    for given in (x, 1 - x, torch.ones_like(x)):
        found, expected, exact = run([given])[0], module(given), module(given.double())
        assert found.dtype == dtype
        assert (found - exact).norm() <= 1.5 * (expected - exact).norm() + 1e-14 * exact.norm()
        program: Any = torch.jit.last_executed_optimized_graph()
        assert len(program.findAllNodes("aten::where")) == 1


def test_a_product_of_one_row_and_a_sum_become_apart() -> None:
    x = torch.randn(1, 6)
    forms = Forms(symbolic_trace(Of(lambda x: torch.addmm(W8, x, weight(6, 8)))), [x])
    assert len(forms.known.respelled) == len(forms.known.rows) == 1
    assert "aten::clone" in str(torch.jit.trace(forms, (x, *forms.beside)).inlined_graph)


def test_a_product_and_a_sum_are_a_layer() -> None:
    for function, layers in (
        (lambda x: torch.addmm(W8, x, weight(6, 8)), 1),
        (lambda x: torch.addmm(weight(5, 8), x, weight(6, 8)), 0),
        (lambda x: torch.addmm(W8, x, weight(6, 8), alpha=2), 0),
        (lambda x: torch.addmm(W6, weight(4, 5), x), 0),
    ):
        x = torch.randn(5, 6)
        forms, gm = Forms(symbolic_trace(Of(function)), [x]), symbolic_trace(Of(function))
        assert len(forms.known.respelled) == layers
        torch.testing.assert_close(result_of(forms, x), gm(x))
        if layers:
            torch.testing.assert_close(built(Of(function), x)([x])[0], gm(x))


def test_results_that_are_always_the_same() -> None:
    kept = nn.Parameter(torch.randn(3))

    class Results(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = kept

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.arange(x.size(1)), x.relu(), self.kept, x.new_zeros(0, 4), x.tanh()

    x = torch.randn(5, 6)
    run = built(Results(), x)
    first = run([x])
    for tensor in (first[0], first[2]):
        tensor.zero_()  # what a call gave is its caller's
    for found, expected in zip(run([x]), Results()(x), strict=True):
        torch.testing.assert_close(found, expected.detach())
    assert kept.detach().abs().max() > 0


def test_joined_whole_numbers_lie_as_they_did() -> None:
    def joined(x: Tensor) -> tuple[Tensor, ...]:
        y = x.long()
        return torch.cat([y, y]), torch.cat([y, y], 2), torch.cat([y, y], -2).view(-1), torch.cat([y[0, 0], y[0, 1]])

    x = torch.randn(3, 4, 5) * 9
    for found, expected in zip(built(Of(joined), x)([x]), joined(x), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_joined_to_nothing_of_another_type() -> None:
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    (found,) = built(Of(lambda x: torch.cat([torch.zeros(0), x.relu()], 0)), x)([x])
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, x.relu().float())


def by_distance(x: Tensor) -> Tensor:
    """T5's buckets: the logarithm is a whole number at 16, 32 and 64; what is a last bit less falls into another."""
    places = torch.arange(x.size(-1))
    distance = (places.unsqueeze(0) - places.unsqueeze(1)).abs().float()
    return x * (torch.log(distance / 8) / math.log(128 / 8) * 8).clamp(min=0).long()


def test_what_depends_on_sizes_alone_is_computed_by_torch() -> None:
    x = torch.ones(80, 80)
    assert torch.equal(built(Of(by_distance), x)([x])[0], by_distance(x))
    for function, constants in (
        (by_distance, 12),
        (lambda x: x * (weight(80) * x.size(-1)), 1),
        (lambda x: (y := torch.arange(x.size(-1)), z := y + 1.0, y.add_(2), x * z * y)[-1], 3),  # read when it is whole
        (lambda x: (y := torch.ones(x.size(-1)), y.copy_(x[0]), x * (y + 1.0))[-1], 0),
        (lambda x: x * torch.rand(x.size(-1)).add_(1).ceil(), 0),
        (lambda x: x * (torch.ones(x.size(-1)).add_(2) + 1), 3),
        (lambda x: x * (torch.ones(x.size(-1)).add_(x[0]) + 1), 0),
        (lambda x: (y := torch.ones(x.size(-1)), x * y, y.add_(2))[1], 0),
        (lambda x: (y := torch.ones(x.size(-1)), z := y[1:], y.add_(2), x[:, 1:] * z)[-1], 3),
        (lambda x: x * x.new_zeros(5)[:1].add_(2), 3),
        (lambda x: x * x.new_zeros(5)[:1].add_(x[0, 0]), 0),
    ):
        forms, gm = Forms(symbolic_trace(Of(function)), [x]), symbolic_trace(Of(function))
        assert sum(node.op != "get_attr" for node in forms.known.steady) == constants
        for _ in range(2):
            x = torch.randn(80, 80)
            assert torch.equal(result_of(forms, x), gm(x))


def test_numbers_that_are_made_of_sizes() -> None:
    def positions(x: Tensor) -> Tensor:  # as MPT looks up the biases of its attention
        return F.linear(x, weight(10, 10)) + x.tanh()[torch.sym_max(x.size(-1) - x.size(2), 0) :]

    module, x = Of(positions), weight(*SIZE)
    torch.testing.assert_close(built(module, x)([x * 2])[0], module(x * 2), rtol=1e-4, atol=1e-4)


def test_other_sizes_are_not_covered() -> None:
    run = built(Of(F.relu), weight(*SIZE))
    with pytest.raises(NotCovered, match=r"\(2, 6, 12, 10\)"):
        run([weight(3, *SIZE[1:])])


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("size", "padding"), [(3, "same"), (4, "same"), (3, "valid")])
def test_padding_that_is_a_word_does_not_keep_a_convolution_from_being_fused(
    layer: bool, size: int, padding: str
) -> None:
    conv, x = nn.Conv2d(6, 6, size, padding=padding).requires_grad_(False), weight(*SIZE)
    called = Of(lambda x: F.relu(F.conv2d(x, conv.weight.data.to(x), padding=padding)))
    module = nn.Sequential(conv, nn.ReLU()) if layer else called
    (found,) = built(module, x)([x])
    program = str(torch.jit.last_executed_optimized_graph())
    assert "convolution" not in program.split("with prim::oneDNNFusionGroup")[0]
    assert "aten::_convolution_mode" not in program
    torch.testing.assert_close(found, module.double()(x.double()).float())


def test_padding_with_what_is_there_stays_as_it_is() -> None:
    conv = nn.Conv2d(6, 6, 3, padding="same", padding_mode="reflect").requires_grad_(False)
    x = weight(*SIZE)
    torch.testing.assert_close(built(nn.Sequential(conv), x)([x])[0], conv(x))


def test_an_image_whose_padding_is_a_word_has_its_channels_last() -> None:
    conv, x = nn.Conv2d(6, 6, 3, padding="same").requires_grad_(False), weight(*SIZE)
    forms = Forms(symbolic_trace(nn.Sequential(conv)), [x])
    program: Any = torch.jit.trace(forms, (x,), check_trace=False).graph
    assert len(program.findAllNodes("aten::contiguous")) == 1


def test_it_is_fused_at_all() -> None:
    built(Of(lambda x: F.relu(F.conv2d(x, weight(6, 6, 1, 1)))), weight(*SIZE))([weight(*SIZE)])
    assert "oneDNNFusionGroup" in str(torch.jit.last_executed_optimized_graph())


CRASHES = """
import torch
from test_onednn_graph import ROWS, Of, built, weight
x, c = weight(4, 6), weight(6)
run = built(Of(lambda x: x * c * c), x)
assert all(run([x])[0].allclose(x * c * c) for _ in range(6))
for size, function, _ in ROWS.values():
    x = torch.randn(*size)
    run = built(Of(function), x)
    assert all(torch.allclose(run([x])[0], function(x), atol=1e-5) for _ in range(6))
print("right")
"""


def up_and_down(x: Tensor) -> Tensor:
    """Two products, as of a decoder's layer; the second is of 2048 numbers."""
    return F.linear(F.linear(x, weight(2048, 768) / 28), weight(768, 2048) / 45)


def heads_up_and_down(x: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x, weight(12, 768, 2048) / 28), weight(12, 2048, 768) / 45)


ROWS: dict[str, tuple[tuple[int, ...], Function, int]] = {
    "add": ((1, 768), lambda x: x + up_and_down(x), 2),
    "add to a vector": ((768,), lambda x: x + up_and_down(x), 2),
    "add by heads": ((1, 1, 768), lambda x: up_and_down(x).view(1, 12, 64) + x.sigmoid().view(1, 12, 64), 2),
    "add in place": ((1, 768), lambda x: (lambda y: y.add_(y.sigmoid()))(up_and_down(x)), 2),
    "batch of rows": ((12, 1, 768), lambda x: x.sigmoid() + heads_up_and_down(x), 2),
    "operator": ((1, 768), lambda x: x + x @ weight(768, 768) / 28, 1),
    "two rows": ((2, 768), lambda x: x + up_and_down(x), 0),
}
"""Products of a single row: their input, the function, how many are set apart."""


def test_what_would_end_the_process_does_not() -> None:
    """oneDNN Graph writes beyond the end of two products with one tensor of fewer axes, and of sums with one row.

    In a process of its own, whose allocator looks at what was written.
    """
    environment = {**os.environ, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "85"}
    command = [sys.executable, "-c", CRASHES]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize("name", ROWS)
def test_products_of_a_single_row_become_apart(name: str) -> None:
    size, function, count = ROWS[name]
    x = torch.randn(size)
    gm = symbolic_trace(Of(function))
    forms = Forms(gm, [x])
    assert len(forms.known.rows) == count
    assert torch.equal(result_of(forms, x), gm(x))
    assert str(torch.jit.trace(forms, (x, *forms.beside)).inlined_graph).count("aten::clone") >= count


def test_layers_have_products_too() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
    for rows, count in ((1, 2), (2, 0)):
        assert len(Forms(symbolic_trace(model), [torch.randn(rows, 8)]).known.rows) == count


@pytest.mark.parametrize(("size", "bias", "refused"), [((1, 6), "x", True), ((1, 6), "w", False), ((2, 6), "x", False)])
def test_a_product_of_one_row_added_to_what_is_computed_is_refused(size, bias: str, refused: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.addmm(x if bias == "x" else weight(6), x, weight(6, 6))

    gm, x = symbolic_trace(Of(function)), torch.randn(size)
    if refused:
        with pytest.raises(ValueError, match="addmm adds a product of one row"):
            Forms(gm, [x])
    else:
        torch.testing.assert_close(result_of(Forms(gm, [x]), x), gm(x))


def test_both_sides_become_apart() -> None:
    half = weight(6, 12, 10)

    def function(x: Tensor) -> Tensor:
        repeated = x[:, :1].expand(2, 6, 12, 10)
        return (x + repeated) * half + x.sigmoid() * x.size(1)

    x = weight(*SIZE)
    gm = symbolic_trace(Of(function))
    forms = Forms(gm, [x])
    larger = [
        (node.name, [n.name for n in given], {size for size, _ in given.values()})
        for node, given in forms.larger.items()
        if given
    ]
    assert larger == [("add", ["expand"], {x.shape}), ("mul", ["_tensor_constant0"], {x.shape})]
    assert torch.equal(result_of(forms, x), gm(x))


def gate(x: Tensor) -> Tensor:
    return F.conv2d(x.mean((2, 3), keepdim=True), weight(6, 6, 1, 1)).sigmoid() + 0.1


SCALED: list[tuple[Function, int]] = [
    (lambda x: x.relu() * gate(x), 1),
    (lambda x: gate(x) * F.conv2d(x, weight(6, 6, 1, 1), W6), 1),
    (lambda x: F.conv2d(x.tanh() / gate(x), weight(6, 6, 1, 1)) + x, 1),
    (lambda x: F.conv2d(x, weight(6, 6, 1, 1)).mul_(gate(x)) * gate(x * 2), 2),
    (lambda x: F.conv2d(x, weight(6, 6, 1, 1)) * weight(2, 6, 1, 1), 0),  # which a kernel takes in
    (lambda x: x * gate(x)[:1], 1),  # as whatever else has few elements
    (lambda x: x * gate(x)[:, :1], 1),
    (lambda x: x + gate(x), 1),
    (lambda x: gate(x) * gate(x + 1), 0),
    (lambda x: gate(x) * 2, 0),
]


@pytest.mark.parametrize(("function", "number"), SCALED)
def test_an_image_times_a_number_for_each_channel(function: Function, number: int) -> None:
    module, x = Of(function), torch.randn(SIZE)
    forms = Forms(symbolic_trace(module), [weight(*SIZE)])
    assert len(forms.known.by_torch) == number
    assert not any(forms.larger.get(node) for node in forms.known.by_torch)
    apart = {other for node in forms.known.by_torch for other in (node, *node.all_input_nodes)}
    assert apart <= forms.known.viewed  # a kernel that took it in would read beyond the numbers
    (found,) = built(module, weight(*SIZE))([x])
    torch.testing.assert_close(found, module(x), rtol=0, atol=1e-5 * float(module(x).abs().max()))


def merged(x: Tensor) -> Tensor:
    """The parts of a merged layer's result."""
    return F.linear(x, weight(16, 10))


GATED: list[tuple[Function, int]] = [
    (lambda x: F.linear(F.silu(merged(x)[..., :8]) * merged(x)[..., 8:], weight(10, 8)), 0),
    (lambda x: F.linear(merged(x)[..., :8] * merged(x)[..., 8:].tanh(), weight(10, 8)), 0),
    (lambda x: F.linear(merged(x)[..., :8] * merged(x)[..., 8:], weight(10, 8)), 0),
    (lambda x: F.linear(F.silu(merged(x)[..., :8]) * x[..., :8], weight(10, 8)), 0),
    (lambda x: F.silu(merged(x)[..., :8]) * merged(x)[..., 8:], 1),  # its result may be fused with what follows
    (lambda x: F.linear(F.silu(merged(x)[..., :8]) + merged(x)[..., 8:], weight(10, 8)), 1),
    (lambda x: F.linear(merged(x)[..., :8] * F.linear(x, weight(8, 10)), weight(10, 8)), 1),  # with what comes before
    (lambda x: F.linear(merged(x)[..., :8] * weight(2, 6, 12, 8), weight(10, 8)), 2),  # a constant
    (lambda x: F.linear(merged(x)[..., :8] * weight(8), weight(10, 8)), 0),  # of few elements
    (lambda x: F.linear(merged(x)[..., :8].mul_(merged(x)[..., 8:]), weight(10, 8)), 0),
    (lambda x: (y := merged(x), F.linear(y[..., :8].mul_(merged(x)[..., 8:]), weight(10, 8)), y)[1:], 1),  # it stays
]


@pytest.mark.parametrize(("function", "copies"), GATED)
def test_a_gate_is_given_parts_of_merged_layers(function: Function, copies: int) -> None:
    module, x = Of(function), weight(*SIZE)
    forms = Forms(symbolic_trace(module), [x])
    assert sum(map(len, forms.larger.values())) == copies
    run = built(module, x)
    for given in (x, 1 - x):
        expected = module(given)
        first = expected if isinstance(expected, Tensor) else expected[0]
        torch.testing.assert_close(run([given])[0], first, rtol=1e-4, atol=1e-4)


def test_an_image_of_which_others_see_what_is_written_is_not_taken_out() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.tanh()
        part = y[:, :3]
        part.mul_(part.mean((2, 3), keepdim=True))
        return y

    x = weight(*SIZE)
    forms = Forms(symbolic_trace(Of(function)), [x])
    assert not forms.known.by_torch
    torch.testing.assert_close(result_of(forms, x), function(x))


def heads_of_a_token(x: Tensor) -> Tensor:
    return x[:1, :1, :1].reshape(1, 1, 5, 2).transpose(1, 2)


@pytest.mark.parametrize("length", [17, 5])
def test_keys_whose_batch_of_one_is_their_second_axis(length: int) -> None:
    """As in XLNet. Once compiled rightly for these sizes it would stay right, so no other test has them."""
    gm = symbolic_trace(Of(lambda x: x.permute(1, 2, 0, 3) @ (x * 2).permute(1, 2, 0, 3).mT))
    x = torch.randn(length, 1, 3, 9)
    (found,) = built(gm, x)([x])
    torch.testing.assert_close(found, gm(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(heads_of_a_token(x) * weight(1, 1, 1, 2)),
        lambda x: torch.relu(heads_of_a_token(x) * 2 + 1),
        lambda x: heads_of_a_token(x) + heads_of_a_token(x).exp(),
        lambda x: heads_of_a_token(x.tanh()).add_(heads_of_a_token(x * 2)) * 3,
    ],
)
def test_an_axis_of_one_element_with_a_step_of_its_own(function: Function) -> None:
    module, x = Of(function), weight(*SIZE)
    run = built(module, x)
    for _ in range(3):
        torch.testing.assert_close(run([x])[0], module(x))


def test_what_lies_oddly() -> None:
    x = torch.randn(2, 3, 4)
    odd = onednn_layouts.lies_oddly
    assert not any(map(odd, (x, x.mT, x[:, None], x[..., None], x[:1], x[:1].permute(0, 2, 1), x[0, 0, 0], x[0, :2])))
    assert all(map(odd, (x[:, :2], x[..., :3], x[..., ::2], x[:, 1:].permute(2, 0, 1))))  # with gaps
    assert odd(x[:, :1].expand(2, 3, 4))
    assert odd(torch.randn(1, 1, 12, 64).transpose(1, 2))
    assert not odd(torch.randn(1, 8, 6, 6).to(memory_format=torch.channels_last))


def test_a_graph_inside_of_a_graph_is_refused() -> None:
    gm = symbolic_trace(Of(F.relu))
    gm.add_module("inner", symbolic_trace(Of(F.relu)))
    Forms(gm, [weight(*SIZE)])  # nobody calls it
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_module("inner", (gm.graph.find_nodes(op="placeholder")[0],))
    with pytest.raises(ValueError, match="graphs inside"):
        Forms(gm, [weight(*SIZE)])


@pytest.mark.parametrize("after", [lambda y: y + weight(*SIZE), lambda y: weight(*SIZE) - y, lambda y: y * W10])
@pytest.mark.parametrize("norm", [nn.LayerNorm(10), lambda x: F.layer_norm(x, [10], W10, W10)])
def test_a_layer_norm_that_a_tensor_is_added_to(norm: Function, after: Function) -> None:
    module, x = Of(norm, after), weight(*SIZE)
    (found,) = built(module, x)([x])
    torch.testing.assert_close(found, module(x), rtol=0, atol=1e-5)


def test_a_largest_element_is_not_of_the_size_of_the_others() -> None:
    module, x = Of(lambda x: x.max() + x.amax(1, keepdim=True) + torch.max(x, x.tanh())), weight(*SIZE)
    torch.testing.assert_close(built(module, x)([x])[0], module(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((x > 0) == True) & True,  # noqa: E712
        lambda x: torch.where(x > 0, True, x < -1) | False,
        lambda x: torch.where(x > 0, x, False),
        lambda x: (x > 0).masked_fill(x > 1, False),
        lambda x: (x > 0).masked_fill(mask=x > 1, value=False),
        lambda x: (x > 0).masked_fill_(x > 1, False),
        lambda x: torch.scatter(x > 0, -1, x.argmax(-1, keepdim=True), True),
        lambda x: (x > 0).scatter_(-1, x.argmin(-1, keepdim=True), value=True),
        lambda x: (x > 0).index_fill(0, torch.tensor([0]), True),
        lambda x: ((x > 0) != False) ^ True,  # noqa: E712
    ],
)
def test_true_and_false_among_numbers(function: Function) -> None:
    module, x = Of(function), weight(*SIZE)
    for given in (x, -x):
        (found,) = built(module, x)([given])
        assert found.dtype == function(given).dtype
        assert torch.equal(found, function(given))


@pytest.mark.parametrize("of", [lambda x: torch.arange(x.shape[0]).repeat(2, 1), lambda x: x.transpose(0, 1)[::2]])
def test_the_largest_element_of_what_is_always_the_same_or_lies_oddly(of: Function) -> None:
    module, x = Of(lambda x: x * (torch.max(of(x)) + 1) - of(x).min()), weight(*SIZE)
    torch.testing.assert_close(built(module, x)([x])[0], module(x))


class Grown(nn.Module):
    """Operators in a row, each with the places of the values that it reads; the last value is the result."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        sizes = [rng.choice((1, 1, 2, 3, 6)) for _ in range(rng.randint(2, 4))]
        self.values = [torch.randn(sizes, generator=torch.Generator().manual_seed(seed))]
        self.steps: list[tuple[Callable[..., Tensor], list[int]]] = []
        for _ in range(rng.randint(3, 8)):
            self._grow(rng, rng.choice((len(self.values) - 1, rng.randrange(len(self.values)))))
        self.sample = self.values[0]

    def _grow(self, rng: random.Random, place: int) -> None:
        value = self.values[place]
        sizes, last, axes = tuple(value.shape), value.shape[-1], rng.sample(range(value.ndim), 2)
        shorter = [p for p, v in enumerate(self.values) if _fits(v, value)]
        wide, other = weight(rng.choice((1, 4, 6)), last), rng.choice(shorter)
        join = rng.choice((torch.add, torch.sub, torch.mul, torch.maximum))
        step, places = rng.choice(
            [
                *((f, [place]) for f in (torch.relu, torch.sigmoid, torch.tanh, F.gelu, F.silu, lambda v: v * 2 + 1)),
                *(((lambda v: F.linear(v, wide)), [place]), ((lambda v: F.layer_norm(v, (last,))), [place])),
                *((join, [place, other]), (join, [other, place]), ((lambda v: join(v, weight(last))), [place])),
                ((lambda v: v.softmax(-1)), [place]),
                ((lambda v: torch.cat([v, v.tanh()], axes[0])), [place]),
                ((lambda v: v.transpose(*axes)), [place]),
                ((lambda v: v[..., : (last + 1) // 2]), [place]),
                ((lambda v: v.narrow(axes[0], 0, 1).expand(sizes)), [place]),
            ]
        )
        self.steps.append((step, places))
        self.values.append(step(*(self.values[p] for p in places)))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step, places in self.steps:
            values.append(step(*(values[p] for p in places)))
        return values[-1]


def _fits(value: Tensor, other: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(value.shape, other.shape) == other.shape
    except RuntimeError:
        return False


@pytest.mark.parametrize("seed", range(60))
def test_a_random_network(seed: int) -> None:
    """With views, branches and tensors of fewer axes, at which oneDNN Graph has ended the process or been wrong."""
    net = Grown(seed)
    try:
        run = built(net, net.sample)
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"it cannot run it: {str(error).splitlines()[-1]}")
    expected = net(net.sample)
    for _ in range(3):
        torch.testing.assert_close(run([net.sample])[0], expected, rtol=0, atol=1e-5 * float(expected.abs().max() + 1))


def test_a_norm_over_sizes_that_are_asked_for() -> None:
    module = Of(lambda x: F.layer_norm(F.linear(x, weight(10, 10)), x.shape[-1:]) + 1)
    gm = symbolic_trace(module)
    assert [node.name for node in Forms(gm, [weight(*SIZE)]).known.respelled] == ["layer_norm"]
    run = built(module, weight(*SIZE))
    torch.testing.assert_close(run([weight(*SIZE)])[0], module(weight(*SIZE)), rtol=1e-4, atol=1e-4)


def test_a_program_runs_without_gradients_whatever_the_call_records(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    make = onednn_graph._program

    def spied(forms: Forms, sample: tuple[Tensor, ...]) -> Callable[..., Any]:
        program = make(forms, sample)
        return lambda *given: modes.append(torch.is_grad_enabled()) or program(*given)

    monkeypatch.setattr(onednn_graph, "_program", spied)
    run = built(Of(lambda x: F.linear(x, W10[None]).relu()), weight(*SIZE))
    modes.clear()
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            run([weight(*SIZE)])
    assert modes == [False, False]


@pytest.mark.parametrize(
    ("function", "apart"),
    [
        (lambda x, table: F.linear(x, W10[None]).relu(), True),
        (lambda x, table: (x.tanh(), F.linear(x, weight(10, 10)) + table), True),
        (lambda x, table: (x.tanh(), x.view(-1)), False),
        (lambda x, table: (y := F.linear(x, weight(10, 10)), y[:, 0]), False),
        (lambda x, table: (x.tanh(), table.expand_as(x)), False),
        (lambda x, table: (x.tanh(), torch.broadcast_tensors(x, table)[1]), False),
    ],
)
def test_what_is_written_to_results_in_shared_memory_is_counted(
    function: Callable[[Tensor, Tensor], Any], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[bool] = []
    below = onednn_graph.below_autograd
    monkeypatch.setattr(onednn_graph, "below_autograd", lambda: entered.append(True) or below())
    x, table = weight(*SIZE).clone(), weight(*SIZE) + 1
    expected = [leaf.clone() for leaf in pytree.tree_leaves(function(x, table))]
    found = built(Of(lambda x: function(x, table)), x)([x])
    assert bool(entered) is apart
    torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=1e-5)
    everybody = [x, table, *found]
    for tensor in found:
        before = [each._version for each in everybody]
        tensor.add_(1)
        shared = [each.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for each in everybody]
        assert [new._version - old for new, old in zip(everybody, before, strict=True)] == [int(s) for s in shared]


def test_a_result_without_a_storage_of_its_own_is_no_obstacle() -> None:
    x = weight(*SIZE)
    dense, sparse = built(Of(lambda x: (F.linear(x, weight(10, 10)), x[0, 0].to_sparse())), x)([x])
    torch.testing.assert_close(dense, F.linear(x, weight(10, 10)), rtol=1e-5, atol=1e-5)
    assert torch.equal(sparse.to_dense(), x[0, 0])
