"""A forward that sets something of a layer and calls it so: its graph computes what was computed, or there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import regraft as rg

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Some layers, with weights and statistics that hide nothing, and a forward that is given."""

    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool, self.act, self.dropout = nn.MaxPool2d(2), nn.LeakyReLU(0.1), nn.Dropout(0.5)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.function = [function]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


def stays(m: Model, x: Tensor) -> Tensor:
    m.conv.stride = (2, 2)
    return m.norm(m.conv(x))


def is_put_back(m: Model, x: Tensor) -> Tensor:
    m.conv.stride = (2, 2)
    y = m.conv(x)
    m.conv.stride = (1, 1)
    return m.norm(y)


def by_size(m: Model, x: Tensor) -> Tensor:
    m.pool.kernel_size = m.pool.stride = x.shape[-1] // 2
    return m.pool(m.conv(x))


def slope(m: Model, x: Tensor) -> Tensor:
    m.act.negative_slope = 0.3
    return m.act(m.conv(x))


def twice(m: Model, x: Tensor) -> Tensor:
    y = m.conv(x)
    m.norm.eps, eps = 0.5, m.norm.eps
    z = m.norm(y)
    m.norm.eps = eps
    return z + m.norm(y)


def evaluated(m: Model, x: Tensor) -> Tensor:
    m.norm.eval()
    y = m.norm(m.conv(x))
    m.norm.train()
    return y


def trained(m: Model, x: Tensor) -> Tensor:
    m.norm.train()
    y = m.norm(m.conv(x))
    m.norm.eval()
    return y


def of_its_own(m: Model, x: Tensor) -> Tensor:
    m.act.forward = lambda y: y * 2
    y = m.act(m.conv(x))
    del m.act.forward
    return y


def hooked(m: Model, x: Tensor) -> Tensor:
    handles = [m.conv.register_forward_pre_hook(lambda _, args: (args[0] * 2,))]
    handles += [m.dropout.register_forward_hook(lambda *call: call[-1] + 1)]
    y = m.dropout(m.conv(x))
    for handle in handles:
        handle.remove()
    return y


def hooked_all(m: Model, x: Tensor) -> Tensor:
    handle = register_module_forward_hook(lambda module, _, y: y * 2 if module is m.conv else None)
    y = m.conv(x)
    handle.remove()
    return y


def without_bias(m: Model, x: Tensor) -> Tensor:
    bias, m.conv.bias = m.conv.bias, None
    y = m.conv(x)
    m.conv.bias = bias
    return y


def other_weight(m: Model, x: Tensor) -> Tensor:
    weight, m.conv.weight = m.conv.weight, nn.Parameter(m.conv.weight * 2)
    y = m.conv(x)
    m.conv.weight = weight
    return y


def within(m: Model, x: Tensor) -> Tensor:
    """Something within what torch.fx takes for one layer."""
    handle = m.encoder.linear1.register_forward_hook(lambda *call: call[-1] * 3)
    y = m.encoder(x[:, 0])
    handle.remove()
    return y


FORWARDS = [stays, is_put_back, by_size, slope, twice, evaluated, trained, of_its_own, hooked, hooked_all]
FORWARDS += [without_bias, other_weight, within]
REFUSED = {"symbolic": {twice, evaluated, trained, without_bias, other_weight, within}}
"""What torch.fx cannot follow without an example: a norm that counts its calls, weights that are made of others."""

HOW: dict[str, Callable[[Model], Any]] = {
    "fixed": lambda model: rg.trace(model, (X,)),
    "auto": lambda model: rg.trace(model, (X,), dynamic_shapes="auto"),
    "symbolic": rg.symbolic_trace,
    "optimize": lambda model: rg.optimize(model, (X,), keep="all", engine="eager", seconds=0.01).model,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("function", FORWARDS)
def test_what_is_set_of_a_layer_is_in_its_graph_or_refused(function: Callable[..., Tensor], how: str) -> None:
    model = Model(function).train(function is evaluated)
    model.encoder.eval()
    original = copy.deepcopy(model)
    try:
        captured = HOW[how](model)
    except rg.CaptureError:
        assert function in REFUSED.get(how, ())
        return
    for x in (X, X * 2):
        given = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(captured(given), original(x.clone()))


def test_layers_of_which_nothing_is_set_are_called() -> None:
    gm = rg.trace(Model(is_put_back).eval(), (X,))
    assert [str(node.target) for node in gm.graph.find_nodes(op="call_module")] == ["norm"]
    assert not torch.nn.modules.module._global_forward_pre_hooks
