"""What oneDNN Graph must not fuse is kept from it, and what it fuses well is not."""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from test_onednn_graph import W10, Of, built, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from regraft.optimize.engines import onednn_graph, onednn_norms
from regraft.optimize.engines.onednn_forms import Forms
from regraft.optimize.engines.onednn_fusions import called, kept_apart, overwritten, read_twice
from regraft.optimize.engines.onednn_layouts import dense, order

SIZE = (2, 6, 10)
Function = Callable[[Tensor], Tensor]

A, B, C = (weight(*SIZE) + shift for shift in (3, 4, 5))
SQUARE = weight(10, 10) / 3


def layer(x: Tensor) -> Tensor:
    return F.linear(x, SQUARE, W10)


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A processor with AVX-512, or with what a test says."""

    def has(capability: str) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    has("AVX512")
    return has


GATES: dict[str, tuple[Function, set[str]]] = {
    "a gate": (lambda x: torch.relu(layer(x) + x.tanh()) * x, {"x"}),
    "a sum of three": (lambda x: layer(x) + x.tanh() + x, {"x"}),
    "from the left": (lambda x: x + (x.tanh() + layer(x)), {"x"}),
    "divided": (lambda x: torch.sigmoid(layer(x) + x.tanh()) / x, {"x"}),
    "a product": (lambda x: (torch.matmul(x, SQUARE) + x.tanh()) * x, {"x"}),
    "a method": (lambda x: x.matmul(SQUARE).add(x.tanh()).mul(x), {"x"}),
    "of an equal call": (lambda x: (layer(x.sigmoid()) + x.tanh()) * x.sigmoid(), {"sigmoid_1"}),
    "of an equal part": (lambda x: (layer(x[:, :5]) + x[:, 1:]) * x[:, :5], {"getitem_2"}),
    "operators": (lambda x: (x @ SQUARE + x.tanh()) * x, {"x"}),
    "later": (lambda x: F.gelu((layer(x) + x.tanh()) * x.exp()) + x, {"x"}),
    "the other factor": (lambda x: (x @ x.tanh().mT @ x.sigmoid() + x.exp()) * x.sigmoid(), {"sigmoid_1"}),
    "a square": (lambda x: x * x + x.tanh() + x, {"x"}),
    "a gate of a square": (lambda x: torch.relu(x * x + x.tanh()) * x, {"x"}),
    "no sum before": (lambda x: layer(x) * x.tanh() + x, set()),
    "a block": (lambda x: layer(x) + x, set()),
    "of another": (lambda x: (layer(x.exp()) + x.tanh()) * x, set()),
    "across a norm": (lambda x: F.layer_norm(layer(x) + x.tanh(), [10], W10, W10) * x, set()),
}
"""Sums that are joined with what their products were made of, and what the last call has to be given as a copy."""


def a_program(function: Function, *sample: Tensor) -> tuple[torch.fx.GraphModule, Callable[..., Tensor], list[str]]:
    """The graph, its program, and what that one fuses."""
    gm = symbolic_trace(Of(function))
    run = built(gm, *sample)
    (result,) = run(list(sample))
    groups = re.findall(r"with prim::oneDNNFusionGroup.*?return", str(torch.jit.last_executed_optimized_graph()), re.S)
    torch.testing.assert_close(result, Of(function)(*sample), rtol=1e-5, atol=1e-5)
    return gm, lambda *given: run(list(given))[0], ["+".join(re.findall(r"aten::(\w+)\(", group)) for group in groups]


@pytest.mark.parametrize("name", GATES)
def test_what_a_product_was_made_of_is_not_read_twice(name: str) -> None:
    function, copied = GATES[name]
    gm = symbolic_trace(Of(function))
    found = read_twice(gm)
    assert {node.name for nodes in found.values() for node in nodes} == copied
    assert set(found) <= {gm.graph.output_node().all_input_nodes[0]}


def test_values_that_are_equal_are_not_given_one_copy() -> None:
    gm = symbolic_trace(Of(lambda x: layer(x.exp()) + x.tanh() + x.exp() + x.sin() + x.exp()))
    assert [list(copies.values()) for copies in read_twice(gm).values()] == [[1], [2]]


IN_A_PROCESS = """
import torch
from test_onednn_fusions import GATES, A, a_program
for function, _ in GATES.values():
    a_program(function, A)
print("right")
"""


CONVOLUTIONS_IN_A_PROCESS = """
import torch
from torch import nn
from test_onednn_fusions import Forms, onednn_graph, read_twice, symbolic_trace
class Block(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.a, self.b = nn.Conv2d(48, 48, 3, padding=1, groups=groups), nn.Conv2d(48, 48, 1, groups=groups)
    def forward(self, x):
        x = torch.relu(x * 2 + 1)
        return self.a(x) + self.b(x) + x
x = torch.randn(1, 48, 56, 56)
for groups in (48, 1):
    gm = symbolic_trace(Block(groups).eval())
    assert [[a.name for a in copied] for copied in read_twice(gm).values()] == [["relu"]]
    for images in (True, False):
        with torch.no_grad():
            forms = Forms(gm, [x], images)
            result, = forms.complete(onednn_graph._program(forms, (x,))(x, *forms.beside))
            torch.testing.assert_close(result, gm(x), rtol=1e-4, atol=1e-4)
print("right")
"""


COPIES_IN_A_PROCESS = """
import torch
from torch import nn
from test_onednn_fusions import Forms, onednn_graph, symbolic_trace
class OneHead(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layers, self.function = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), function
        self.bias = nn.Parameter(torch.randn(3, 1, 5, 16))
    def forward(self, x):
        heads = [layer(x).view(3, 5, 1, 16).transpose(1, 2) for layer in self.layers]
        return self.function(*heads, self.bias)
x = torch.randn(3, 5, 16)
for function in (
    lambda a, u, v, c: a * u + v + a + u,
    lambda a, u, v, c: a * u + u + v + u,
    lambda a, u, v, c: a * u + v + u + u,
    lambda a, u, v, c: a * c + c + v + c,
    lambda a, u, v, c: a * c + v + c + c,
    lambda a, u, v, c: a @ (v.mT @ u) + u + u + v + u,
):
    gm = symbolic_trace(OneHead(function).eval())
    with torch.no_grad():
        forms = Forms(gm, [x])
        program = onednn_graph._program(forms, (x,))
        for given in (x, -2 * x):
            result, = forms.complete(program(given, *forms.beside))
            torch.testing.assert_close(result, gm(given), rtol=1e-4, atol=1e-4)
print("right")
"""


ONE_ELEMENT_IN_A_PROCESS = """
import torch
from test_onednn_fusions import F, a_program
for size in ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2,)):
    a_program(lambda x: F.gelu(x * 2, approximate="tanh"), torch.randn(size))
print("right")
"""


def test_what_would_end_the_process_does_not() -> None:
    parts = [IN_A_PROCESS, CONVOLUTIONS_IN_A_PROCESS, COPIES_IN_A_PROCESS, ONE_ELEMENT_IN_A_PROCESS]
    command = [sys.executable, "-uc", "\n".join(parts)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.stdout.split() == ["right"] * len(parts), (done.stdout, done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize(("blocks", "copied"), [(3, {"exp"}), (40, set())])
def test_a_value_is_not_remembered_for_ever(blocks: int, copied: set[str]) -> None:
    def stream(x: Tensor) -> Tensor:
        first = y = x.exp()
        for _ in range(blocks):
            x = x + layer(y)
            y = x.exp()
        return x * first

    found = read_twice(symbolic_trace(Of(stream)))
    assert {node.name for nodes in found.values() for node in nodes} == copied


image = weight(1, 8, 6, 6)
KERNEL, SCALE = weight(8, 8, 3, 3) / 9, weight(8).abs() + 0.5

APART: dict[str, tuple[Function, Tensor, set[str], list[str]]] = {
    "a function and a product": (lambda x: torch.relu(x) * B, A, {"relu"}, []),
    "and a number": (lambda x: torch.tanh(x) + 1, A, {"tanh"}, []),
    "a layer and a sum": (nn.Sequential(nn.GELU()), A, {"modules_of_it_0_0"}, []),
    "after a norm": (lambda x: F.gelu(F.layer_norm(x, [10], W10, W10)) * B, A, {"layer_norm", "gelu"}, ["layer_norm"]),
    "after a part": (lambda x: torch.sigmoid(layer(x)[:, :3].contiguous()) * 2, A, {"sigmoid"}, ["linear"]),
    "after a pooling": (
        lambda x: F.relu(F.max_pool2d(x, 3, 1, 1)) * x,
        image,
        {"max_pool2d", "relu"},
        ["max_pool2d"],
    ),
    "after a batch norm": (
        lambda x: F.relu(F.batch_norm(x, SCALE, SCALE, SCALE, SCALE)) + x,
        image,
        {"batch_norm", "relu"},
        [],
    ),
    "read twice": (lambda x: (lambda y: torch.relu(y) + y)(layer(x)), A, {"relu"}, ["linear"]),
    "sigmoid, read thrice": (lambda x: (lambda y: torch.sigmoid(y) * y - y)(layer(x)), A, {"sigmoid"}, ["linear"]),
    "sigmoid, not multiplied": (lambda x: (lambda y: torch.sigmoid(y) + y)(layer(x)), A, {"sigmoid"}, ["linear"]),
    "in the kernel of a layer": (lambda x: torch.relu(layer(x)) * B, A, set(), ["linear+relu+mul"]),
    "of a convolution": (
        lambda x: F.relu(F.conv2d(x, KERNEL, None, 1, 1)) + x,
        image,
        set(),
        ["_convolution+relu+add"],
    ),
    "of a sum": (lambda x: torch.relu(x + B) * C, A, set(), ["add+relu+mul"]),
    "several functions": (lambda x: torch.tanh(torch.relu(layer(x))) * B, A, set(), ["linear+relu+tanh+mul"]),
    "swish": (lambda x: (lambda y: torch.sigmoid(y) * y)(layer(x)), A, set(), ["linear+sigmoid+mul"]),
    "silu": (lambda x: F.silu(layer(x)) * B, A, set(), ["linear+sigmoid+mul+mul"]),
    "silu, before a product": (lambda x: layer(F.silu(layer(x))), A, {"silu"}, ["linear+sigmoid+mul", "linear"]),
    "a factor, before a product": (lambda x: layer(layer(x) * B) + x, A, {"mul"}, ["linear+mul", "linear+add"]),
    "a divisor, before a product": (lambda x: (layer(x) / C) @ SQUARE, A, {"truediv"}, ["linear+div", "matmul"]),
    "a sum, before a product": (lambda x: layer(layer(x) + B).relu(), A, {"add"}, ["linear+add", "linear+relu"]),
    "a factor and a sum": (lambda x: layer(x * B + C).relu(), A, {"add"}, ["mul+add", "linear+relu"]),
    "a sum, read twice": (lambda x: (lambda y: y.relu() + layer(y.exp()))(x + B), A, {"relu", "exp"}, ["linear+add"]),
    "GELU by tanh": (
        lambda x: layer(F.gelu(layer(x), approximate="tanh")),
        A,
        {"gelu"},
        ["linear", "mul+mul+add+mul+sigmoid+mul", "linear"],
    ),
    "a gate by it": (
        lambda x: layer(F.gelu(layer(x), approximate="tanh") * B),
        A,
        {"gelu", "mul"},
        ["linear", "mul+mul+add+mul+sigmoid+mul", "linear"],
    ),
    "of a norm": (
        lambda x: F.gelu(F.layer_norm(x, [10], W10, W10), approximate="tanh") * B,
        A,
        {"layer_norm", "gelu"},
        ["layer_norm", "mul+mul+add+mul+sigmoid+mul"],
    ),
    "GELU by a sigmoid": (
        lambda x: (lambda y: layer(y * torch.sigmoid(1.702 * y)))(layer(x)),
        A,
        {"mul_1"},
        ["linear+mul+sigmoid+mul", "linear"],
    ),
}


@pytest.mark.parametrize("name", APART)
def test_a_function_without_a_kernel_to_go_into_stays_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_norms, "_FEW", {})
    function, sample, apart, fused = APART[name]
    gm, _, groups = a_program(function, sample)
    assert {node.name for node in kept_apart(gm)} == apart
    assert [group for group in groups if "+" in group or group in fused] == fused


def test_an_rms_norm_with_a_weight_is_not_fused() -> None:
    x = weight(1, 16, 12, 10)  # of heads: two factors in one kernel are the reference's, far slower than torch
    _, _, groups = a_program(lambda x: layer(F.rms_norm(x, [10], W10, 0.1)), x)
    assert groups == ["linear"]


def test_names() -> None:
    class Mine(nn.LayerNorm):
        pass

    gm = symbolic_trace(nn.Sequential(nn.LeakyReLU(), nn.Conv2d(8, 8, 1)))
    gm.add_module("mine", Mine(6))
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.call_module("mine", (gm.graph.output_node().args[0],))
    gm.graph.output_node().args = (node,)
    gm.graph.output_node().prev.prev.prev.prev.name = "relu"  # an input is no call, whatever its name
    assert [called(node, gm) for node in gm.graph.nodes] == ["", "leakyrelu", "conv2d", "layernorm", ""]


def tokens_as_image(x: Tensor) -> Tensor:
    return x.transpose(1, 2).view(x.shape[0], 8, 6, 6)


@pytest.mark.parametrize("batch", [1, 2])
def test_an_image_by_itself_whose_channels_lie_last_is_seen_as_one(batch: int) -> None:
    x = weight(batch, 36, 8)
    assert tokens_as_image(x).is_contiguous(memory_format=torch.channels_last)
    gm = symbolic_trace(Of(lambda x: F.conv2d(tokens_as_image(x), KERNEL, None, 1, 1)))
    (result,) = Forms(gm, [x])(x)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert result.stride() == (288, 1, 48, 8)
    torch.testing.assert_close(result, gm(x))


def test_a_part_of_a_single_element_stays_as_it_is() -> None:
    whole = weight(1, 7, 6, 4)
    gm = symbolic_trace(Of(lambda x: x[:, 2:] * 2, lambda x: x + 1))
    forms = Forms(gm, [whole])
    assert not forms.known.viewed
    assert not forms.known.odd
    torch.testing.assert_close(forms(whole)[0], whole[:, 2:] * 2 + 1)
    assert Forms(gm, [weight(2, 7, 6, 4)]).known.odd  # with gaps, a copy is made


@pytest.mark.parametrize("layout", [lambda x: x.permute(0, 3, 1, 2), lambda x: x[..., ::2]])
def test_matrices_without_a_row_or_a_column_in_one_piece_are_gathered(layout) -> None:
    x = weight(2, 6, 6, 8)
    scattered = layout(x)
    assert 1 not in scattered.stride()[-2:]
    other = weight(*scattered.shape[:-2], scattered.shape[-1], 3)
    gm = symbolic_trace(Of(lambda x: torch.matmul(layout(x), other).tanh()))
    forms = Forms(gm, [x])
    (product,) = (node for node in gm.graph.nodes if node.target is torch.matmul)
    assert list(forms.larger[product].values()) == [(scattered.shape, tuple(range(scattered.ndim)))]
    (result,) = built(gm, x)([x])
    torch.testing.assert_close(result, gm(x), rtol=1e-4, atol=1e-4)


POOLED: dict[str, Any] = {
    "average": nn.AvgPool2d(3, 1, 1),
    "largest": nn.MaxPool2d(2),
    "function": lambda x: torch.max_pool2d(x, 3, 2),
    "average as a function": lambda x: torch._C._nn.avg_pool2d(x, 2),
}


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("name", POOLED)
def test_a_part_of_an_image_is_made_dense_before_it_is_pooled(name: str, images: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(8, 8, 1), POOLED[name]

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.conv(x)[:, 2:7]) * 2

    x = weight(2, 8, 6, 5)
    gm = symbolic_trace(Net())
    forms = Forms(gm, [x], images)
    (part,) = (node for node in gm.graph.nodes if node.target is operator.getitem)
    (pooled,) = part.users
    assert forms.larger[pooled] == {part: (torch.Size((2, 5, 6, 5)), (0, 2, 3, 1) if images else (0, 1, 2, 3))}
    torch.testing.assert_close(forms(x)[0], gm(x))
    torch.testing.assert_close(built(gm, x)([x])[0], gm(x), rtol=1e-4, atol=1e-4)
    whole = symbolic_trace(Of(lambda x: torch.max_pool2d(x, 2) * 2))
    assert not any(larger for node, larger in Forms(whole, [x]).larger.items() if "pool" in node.name)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.transpose(-1, -2), lambda x: x.permute(2, 1, 0, 3)])
def test_other_matrices_stay_as_they_are(layout) -> None:
    gm = symbolic_trace(Of(lambda x: torch.matmul(layout(x), layout(x).transpose(-1, -2))))
    forms = Forms(gm, [weight(2, 6, 5, 8)])
    assert not any(forms.larger.values())


@pytest.mark.parametrize("sizes", [(2, 7, 7, 5), (2, 7, 5, 7), (7, 7, 7, 7)])
@pytest.mark.parametrize("axes", permutations(range(4)))
def test_a_product_of_matrices_in_every_order_of_their_axes(axes: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    x = torch.randn([sizes[axis] for axis in axes])
    back = sorted(range(4), key=axes.__getitem__)
    for function in (
        lambda x: x.permute(back) @ weight(*sizes).mT,
        lambda x: weight(*sizes).mT @ x.permute(back),
    ):
        gm = symbolic_trace(Of(function))
        (result,) = built(gm, x)([x])
        torch.testing.assert_close(result, gm(x), rtol=1e-4, atol=1e-4)


MIXED: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "columns first": (lambda x: torch.relu(x.transpose(2, 3) + Y), ["_tensor_constant0"]),
    "columns second": (lambda x: torch.relu(Y + x.transpose(2, 3)), ["_tensor_constant0", "transpose"]),
    "computed": (lambda x: torch.relu(x.transpose(2, 3) + x.relu()), ["relu"]),
    "softmax of columns": (lambda x: x.transpose(2, 3).softmax(-1) * Y, ["_tensor_constant0", "transpose"]),
    "in one order": (lambda x: torch.relu(x.transpose(2, 3) + x.tanh().transpose(2, 3)), []),
    "by itself": (lambda x: x.transpose(2, 3) * 2, []),
    "the largest": (lambda x: x.transpose(2, 3).max() + x.sum(), []),
}
Y = weight(2, 6, 5, 5)


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_several_orders_get_one(name: str) -> None:
    function, expected = MIXED[name]
    x = weight(2, 6, 5, 5) * 0.5
    gm = symbolic_trace(Of(function))
    forms = Forms(gm, [x])
    assert sorted(a.name for larger in forms.larger.values() for a in larger) == expected
    for larger in forms.larger.values():
        for form in larger.values():
            torch.testing.assert_close(dense(x, *form), x, rtol=0, atol=0)
            assert order(dense(x, *form)) == form[1]
    torch.testing.assert_close(built(gm, x)([x])[0], gm(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        ((2, 3, 4), (0, 1, 2)),
        ((2, 3, 4), (1, 2, 0)),
        ((1, 3, 4), (0, 2, 1)),
        ((2, 1, 4), (2, 1, 0)),
        ((5,), (0,)),
        ((), ()),
    ],
)
def test_the_order_of_axes(size: tuple[int, ...], axes: tuple[int, ...]) -> None:
    tensor = dense(weight(*size), torch.Size(size), axes)
    assert order(tensor) == axes
    assert tensor.permute(axes).is_contiguous()


RESIDUALS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "joined with what was made of it": (lambda f, g, h, y: h(torch.cat([g(f(y)) + y, y], 1)[:, :8]), {"relu"}),
    "read by a layer": (lambda f, g, h, y: (h(g(f(y)) + y), f(y))[0] + f(y), {"relu"}),
    "added to the next sum": (lambda f, g, h, y: h(g(f(y)) + y) + y, {"relu"}),
    "read before, in a kernel that ends after": (lambda f, g, h, y: _after(f(y), g(g(f(y)) + y)), {"relu"}),
    "read before alone": (lambda f, g, h, y: h(torch.relu(g(f(y)) + y)), set()),
    "read before twice": (lambda f, g, h, y: h(torch.relu(g(f(y) + h(y)) + y)), set()),
    "a product": (lambda f, g, h, y: h(g(f(y)) * y) * y, set()),
}


def _after(before: Tensor, later: Tensor) -> Tensor:
    return torch.relu(before + later)


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("layer", [lambda: nn.Conv2d(8, 8, 1), lambda: nn.Linear(8, 8)])
def test_a_sum_is_not_written_into_what_is_read_later(name: str, layer: Callable[[], nn.Module]) -> None:
    function, expected = RESIDUALS[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            start, *layers = self.layers
            return function(*layers, torch.relu(start(x)))

    gm, x = symbolic_trace(Net()), weight(2, 8, 8, 8)
    assert {node.name for node in overwritten(gm)} == expected
    with torch.no_grad():
        for images in (True, False):
            forms = Forms(gm, [x], images)
            program = onednn_graph._program(forms, (x,))
            (result,) = forms.complete(program(x, *forms.beside))
            torch.testing.assert_close(result, gm(x), rtol=1e-4, atol=1e-4)


def test_looking_for_later_readers_ends() -> None:
    def long(x: Tensor) -> Tensor:
        y = z = torch.relu(x)
        for _ in range(300):
            z = z * 2
        return z + y

    assert {node.name for node in overwritten(symbolic_trace(long))} == {"relu"}  # as if it were read later


FEW: dict[str, tuple[Function, int, list[str]]] = {
    "after a sum": (lambda x: (x + A) * W10 + W10, 0, []),
    "what is computed": (lambda x: (x + A) * x.mean((1, 2), keepdim=True), 0, []),
    "a single one": (lambda x: x.tanh() - weight(1), 0, []),
    "filled": (lambda x: (x + A).masked_fill(x[:1, :1] > 0, 0.5) - B, 0, []),
    "of half as many": (lambda x: (x + A) * B + weight(6, 10), 1, ["add+mul+add"]),
    "after a product": (lambda x: torch.matmul(x, SQUARE) * W10 + W10, 2, ["matmul+mul+add"]),
    "after a sum with a product": (lambda x: (torch.matmul(x, SQUARE) + x.tanh()) * W10, 1, ["matmul+add+mul"]),
    "after a product that others read": (lambda x: (y := x @ SQUARE) * W10 + y.tanh(), 0, ["matmul"]),
    "larger than a product": (lambda x: (x[:1, :1] @ SQUARE + W10) + x, 0, ["matmul"]),
}


@pytest.mark.parametrize("name", FEW)
def test_few_elements_are_not_made_many_but_in_the_kernel_of_a_product(name: str) -> None:
    """For such a kernel they have to be as many as the result's, and are read from memory in each call."""
    function, number, expected = FEW[name]
    with torch.no_grad():
        gm, run, groups = a_program(function, A)
        assert groups == expected
        forms = Forms(gm, [A])
        made = [(forms.known.forms[a][0], size) for given in forms.larger.values() for a, (size, _) in given.items()]
        assert sum(before.numel() < size.numel() for before, size in made) == number
        for x in (A, torch.randn(SIZE)):
            torch.testing.assert_close(run(x), function(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "expected"), [(1, {"mul"}), (2, set())])
def test_a_factor_of_a_single_pixel_ends_its_kernel(size: int, expected: list[str]) -> None:
    gm = symbolic_trace(Of(lambda x: F.conv2d(x, KERNEL, None, 1, 1).relu() * SCALE[:, None, None] + x))
    x = weight(2, 8, size, size)
    forms = Forms(gm, [x])
    assert {node.name for node in forms.known.viewed} == expected
    torch.testing.assert_close(built(gm, x)([x])[0], gm(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "apart"),
    [
        (lambda x: F.gelu(layer(x)), {"linear", "gelu"}),
        (lambda x: layer(F.silu(layer(x))), {"linear", "silu"}),
        (lambda x: (x @ SQUARE).tanh() + B, {"matmul", "tanh"}),
        (lambda x: F.relu(layer(x)), set()),
        (lambda x: torch.sigmoid(layer(x)), set()),
        (lambda x: F.gelu(layer(x) + x), set()),
        (lambda x: F.gelu(F.conv1d(x, weight(6, 6, 3))), set()),
    ],
)
def test_without_avx_512_an_exponential_is_no_part_of_a_product(processor, function: Function, apart: set[str]) -> None:
    gm = symbolic_trace(Of(function))
    assert {node.name for node in kept_apart(gm)} & {"linear", "matmul", "conv1d"} == set()
    processor("AVX2")
    assert {node.name for node in kept_apart(gm)} == apart
    for given in (A, B - 4):
        torch.testing.assert_close(built(Of(function), A)([given])[0], Of(function)(given), rtol=1e-5, atol=1e-5)
