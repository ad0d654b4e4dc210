"""What is written to in a graph is made anew for oneDNN Graph, wherever nobody could tell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import W8, Of, built, weight
from torch import Tensor, nn
from torch.fx import GraphModule, Proxy, Tracer, symbolic_trace
from torch.nn import functional as F

from helpers import randomise
from regraft.optimize.engines.onednn_forms import Forms
from regraft.optimize.engines.onednn_in_place import out_of_place

aten = torch.ops.aten
X = weight(2, 8, 7, 5)
KERNEL = weight(8, 8, 3, 3)


def conv(x: Tensor) -> Tensor:
    return F.conv2d(x, KERNEL, W8, padding=1)


def traced(function: Callable[..., Any], given: Any, *others: Any, **named: Any) -> Any:
    """A call that torch.fx does not see, or sees as another."""
    if not isinstance(given, Proxy):
        return function(given, *others, **named)
    return given.tracer.create_proxy("call_function", function, (given, *others), named)


def relu_(x: Tensor) -> Tensor:
    return x.mul_(2)


def found(gm: GraphModule) -> dict[str, str]:
    """The nodes that may write elsewhere, and what they would write to."""
    return {node.name: written.name for node, (written, _) in out_of_place(gm).items()}


ANEW: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "method": (lambda x: conv(x).add_(x, alpha=2), ["add_"]),
    "operator": (lambda x: traced(operator.iadd, conv(x), x), ["iadd"]),
    "function of torch": (lambda x: torch.relu_(conv(x)), ["relu_"]),
    "function of torch.nn": (lambda x: F.elu_(conv(x), 0.5), ["elu_"]),
    "operation": (lambda x: traced(aten.add_.Tensor, conv(x), x, alpha=2), ["add__tensor"]),
    "keyword": (lambda x: F.hardswish(conv(x), inplace=True), ["hardswish"]),
    "keyword with others": (lambda x: F.leaky_relu(conv(x), 0.3, inplace=True), ["leaky_relu"]),
    "several": (lambda x: torch.relu_(conv(x).add_(x)).mul_(2), ["add_", "relu_", "mul_"]),
    "read before": (lambda x: (lambda y: y.mean() + y.sub_(x))(conv(x)), ["sub_"]),
    "not of floats": (lambda x: (conv(x) > 0).logical_or_(x > 0) * x, ["logical_or_"]),
    "a part": (lambda x: (lambda y: y[:, :4].relu_() + y[:, 4:])(conv(x)), ["relu_"]),
    "a part of the last axes": (lambda x: (lambda y: y[..., 1:3, :].relu_() + y[..., 3:5, :])(conv(x)), ["relu_"]),
    "each part": (lambda x: (lambda y: y[:, 1:4].relu_() * y[:, 4:7].tanh_())(conv(x)), ["relu_", "tanh_"]),
    "a part of what is read before": (lambda x: (lambda y: y.mean() + y[:2].relu_())(conv(x)), ["relu_"]),
    "nobody reads it": (lambda x: (conv(x).relu_(), x + 1)[1], ["relu_"]),
}


@pytest.mark.parametrize("name", ANEW)
def test_it_is_made_anew(name: str) -> None:
    function, expected = ANEW[name]
    gm = symbolic_trace(Of(function))
    assert list(found(gm)) == expected
    forms, want = Forms(gm, [X]), gm(X)
    assert [node.name for node in forms.known.renewing] == expected
    torch.testing.assert_close(forms.complete(forms(X, *forms.beside))[0], want)
    with torch.no_grad():
        traced_graph = torch.jit.trace(forms, (X, *forms.beside), check_trace=False).inlined_graph
    assert not re.search(r"aten::\w+_\(", str(traced_graph))
    (result,) = built(gm, X)([X])
    torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


STAYS: dict[str, Callable[[Tensor], Any]] = {
    "an input": lambda x: x.add_(1) * 2,
    "read after": lambda x: (lambda y: y.relu_() + y)(conv(x)),
    "read after as another": lambda x: (lambda y: (y.view(2, -1), y.relu_())[0].sum() + y.sum())(conv(x)),
    "a view": lambda x: (lambda y: y.view(-1).relu_() + y.view(-1))(conv(x)),
    "a part that overlaps": lambda x: (lambda y: y[:, :4].relu_() + y[:, 3:7])(conv(x)),
    "a part by another axis": lambda x: (lambda y: y[:, :4].relu_().sum() + y[:, :, 4:])(conv(x)),
    "a part from the other end": lambda x: (lambda y: y[:, 0:4].relu_().sum() + y[..., 4:8])(conv(x)),
    "a part from behind": lambda x: (lambda y: y[:, :-4].relu_().sum() + y[:, 3:])(conv(x)),
    "a part up to a size": lambda x: (lambda y: y[:, : x.size(3)].relu_().sum() + y[:, 4:])(conv(x)),
    "a part, read by an element": lambda x: (lambda y: y[0].relu_() + y[1])(conv(x)),
    "a part of one more axis": lambda x: (lambda y: y[None, :1].relu_().sum() + y[:, 1:4])(conv(x)),
    "a part, read by a mask": lambda x: (lambda y: y[:1, :4].relu_().sum() + y[y.new_ones(2) > 0, 4:])(conv(x)),
    "a part of what is a bound": lambda x: (lambda y: y[:, :1, :].add_(1).sum() + x[:, 1:, y:])(
        torch.zeros_like(x[:1, :1, :1, 0], dtype=torch.long)
    ),
    "a part of what is read after": lambda x: (lambda y: y[:, :4].relu_().sum() + y.mean())(conv(x)),
    "a part of what is seen through a view": lambda x: (lambda y: (y.view(-1), y[:, :4].relu_())[0])(conv(x)),
    "a part of an input": lambda x: x[:, :4].add_(1) + x[:, 4:],
    "a part that is read after": lambda x: (lambda y: y.relu_() + y)(conv(x)[:, :4]),
    "seen through a view": lambda x: (lambda y: (y[:, :4], y.relu_())[0])(conv(x)),
    "twice": lambda x: (lambda y: (y.relu_(), y.mul_(2))[1])(conv(x)),
    "returned": lambda x: (lambda y: (y.relu_(), y))(conv(x)),
    "an element": lambda x: (lambda y: (traced(operator.setitem, y, 0, 1.0), y)[1])(conv(x)),
    "without a counterpart": lambda x: conv(x).zero_() + x,
    "not a write": lambda x: conv(x).requires_grad_(False) + x,
    "an operation that is given its output": lambda x: traced(aten.add.out, x, 1, out=conv(x)),
    "somebody else's": lambda x: traced(relu_, conv(x)),
    "drawn": lambda x: conv(x).bernoulli_(0.5),
    "another output": lambda x: torch.add(x, 1, out=conv(x)),
}


@pytest.mark.parametrize("name", STAYS)
def test_it_stays(name: str) -> None:
    gm = symbolic_trace(Of(STAYS[name]))
    assert not found(gm) or name == "twice"
    if name in ("a part, read by a mask", "a part of what is a bound"):
        with pytest.raises(ValueError, match="of what a tensor holds"):
            Forms(gm, [X])
    elif name not in ("drawn", "an input", "a part of an input"):
        forms = Forms(gm, [X])
        torch.testing.assert_close(forms.complete(forms(X, *forms.beside))[0], _first(gm(X)))


def _first(results: Any) -> Tensor:
    return results if isinstance(results, Tensor) else results[0]


def test_a_weight_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.count.add_(1)

    assert not found(symbolic_trace(Net()))


def test_a_layer_is_copied_and_stays_as_it_is() -> None:
    net = randomise(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.LeakyReLU(0.2, inplace=True)))
    calls: list[Tensor] = []
    net[1].register_forward_hook(lambda layer, given, result: calls.append(result))
    gm = symbolic_trace(net)
    assert found(gm) == {"_1": "_0", "_2": "_1"}
    (_, layer), _ = out_of_place(gm).values()
    given = weight(2, 8, 7, 5)
    before = given.clone()
    assert (layer(given) >= 0).all()
    assert len(calls) == 1
    assert torch.equal(given, before)
    assert net[1].inplace
    torch.testing.assert_close(built(gm, X)([X])[0], net(X), rtol=1e-4, atol=1e-4)


def test_a_layer_of_which_nothing_is_known_stays() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    class Leaf(Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    net = nn.Sequential(nn.Conv2d(8, 8, 1), Mine())
    assert not found(GraphModule(net, Leaf().trace(net)))


def test_a_result_of_another_size_is_written() -> None:
    gm = symbolic_trace(Of(lambda x: (conv(x) * 2).unsqueeze_(0)))
    assert found(gm)
    forms = Forms(gm, [X])
    assert not forms.known.renewing
    torch.testing.assert_close(forms(X, *forms.beside)[0], gm(X))


@pytest.mark.parametrize("later", [lambda x: x, torch.exp, lambda x: x.float()])
def test_a_result_of_another_type_gets_the_type_of_what_would_be_written(later) -> None:
    gm = symbolic_trace(Of(lambda x: later(conv(x).bfloat16().add(1).add_(x))))
    assert len(Forms(gm, [X]).known.renewing) == 1
    run = built(gm, X)
    for _ in range(2):
        torch.testing.assert_close(run([X])[0], gm(X))


def test_a_constant_of_another_type_gets_it_too() -> None:
    gm = symbolic_trace(Of(lambda x: x.bfloat16() + torch.zeros(x.shape[1:], dtype=torch.bfloat16).add_(X[0])))
    steady = Forms(gm, [X]).known.steady
    assert {node.name: tensor.dtype for node, tensor in steady.items()}["add_"] == torch.bfloat16
    torch.testing.assert_close(built(gm, X)([X])[0], gm(X))


LATER: dict[str, Callable[[Tensor], Any]] = {
    "pooled": lambda x: F.max_pool2d(conv(x).relu_().flip(1)[:, :, 1:-1], 3, 1, 1) * 2,
    "padded": lambda x: torch.tanh(F.pad(conv(x).add_(x), (1, 1, 1, 1))[:, :, 1:-1, 1:-1]) * 3,
    "normed": lambda x: F.batch_norm(F.pad(conv(x).add_(x), (1, 1, 1, 1)), W8, W8.abs(), W8, W8) + 1,
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("batch", [1, 2])
def test_what_follows_has_the_order_that_the_trace_saw(name: str, batch: int) -> None:
    gm, x = symbolic_trace(Of(LATER[name])), weight(batch, 8, 7, 5)
    (result,) = built(gm, x)([x])
    torch.testing.assert_close(result, gm(x), rtol=1e-4, atol=1e-4)
