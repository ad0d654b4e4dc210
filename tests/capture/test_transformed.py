"""Models that transform functions, take gradients, mix devices or use `.data`: captured and right, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A layer, a scale, and a forward that is given."""

    def __init__(self, function: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))
        self.function = [function]

    def forward(self, x: Tensor) -> Any:
        return self.function[0](self, x)


def energy(m: Model, x: Tensor) -> Tensor:
    return m.layer(x).tanh().sum()


def gradient(x: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(value(x), x)[0]


TRANSFORMED: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "vmap of a layer": lambda m, x: torch.vmap(m.layer)(x),
    "vmap of a function": lambda m, x: torch.vmap(lambda a, b: (a * b).sum())(m.layer(x), x),
    "vmap, its argument read for its shape alone": lambda m, x: torch.vmap(lambda r: r.new_ones([]) * r.sum())(x),
    "grad of a layer": lambda m, x: torch.func.grad(lambda x: energy(m, x))(x),
    "grad without weights": lambda m, x: torch.func.grad(lambda x: (x**3).sum())(x),
    "jacrev": lambda m, x: torch.func.jacrev(lambda x: m.layer(x).tanh())(x),
    "jvp": lambda m, x: torch.func.jvp(lambda x: m.layer(x).tanh(), (x,), (torch.ones_like(x),))[1],
    "vmap of grad": lambda m, x: torch.vmap(torch.func.grad(lambda row: energy(m, row)))(x),
}


@pytest.mark.parametrize("how", [rg.trace, rg.optimize])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transformed_function_is_refused_and_not_half_captured(name: str, how: Callable[..., object]) -> None:
    with pytest.raises(rg.CaptureError, match=r"torch\.vmap vectorises with broadcasting.*torch\.func derives"):
        how(Model(TRANSFORMED[name]).eval(), (X,))


def test_a_gradient_inside_of_a_forward_is_captured_where_export_derives_it() -> None:
    model = Model(lambda m, x: gradient(x, lambda x: (m.scale * x).sin().sum())).eval()
    gm = rg.trace(model, (X,))
    other = torch.randn(3, 4)
    torch.testing.assert_close(gm(other), model(other))


def test_a_gradient_inside_of_a_forward_is_refused_where_it_does_not() -> None:
    model = Model(lambda m, x: gradient(x, lambda x: energy(m, x))).eval()
    with pytest.raises(rg.CaptureError, match=r"torch\.autograd\.grad.*as a formula"):
        rg.trace(model, (X,))


ASSIGNED: dict[str, Callable[[Model], Tensor]] = {
    "of itself": lambda m: m.layer.weight.detach() * m.scale,
    "of others": lambda m: m.scale.detach().diag(),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_a_weight_whose_data_is_assigned_in_a_forward_is_refused_and_stays(name: str) -> None:
    def call(m: Model, x: Tensor) -> Tensor:
        m.layer.weight.data = ASSIGNED[name](m)
        return m.layer(x)

    model = Model(call).eval()
    before = model.layer.weight.clone()
    with pytest.raises(rg.CaptureError, match=r"assigned to the \.data of a tensor.*\n.*F\.linear\(x, weight, bias\)"):
        rg.trace(model, (X,))
    torch.testing.assert_close(model.layer.weight, before, rtol=0, atol=0)


def within(m: Model, x: Tensor) -> Tensor:
    y = m.layer(x)
    memory = y.data
    y = y + 1
    memory[:, 1:].mul_(2)
    return y - memory


def written(m: Model, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return m.layer(x)


def padded(m: Model, x: Tensor) -> Tensor:
    """As the positions of CogVideoX are made, behind those of its text."""
    places = x.new_zeros(x.shape[0] + 2, 4)
    places.data[2:].copy_(torch.arange(x.shape[0] * 4).view(x.shape))
    return m.layer(torch.cat([x[:2], x]) + places)


DATA: dict[str, Callable[[Model, Tensor], Any]] = {
    "a weight that is read": lambda m, x: F.linear(x, m.layer.weight.data, m.layer.bias),
    "a weight that is written to": lambda m, x: m.layer(x) if m.layer.weight.data.mul_(1.5) is not None else x,
    "a part of a weight": lambda m, x: m.layer(x) if m.layer.weight.data[1].clamp_(0, 0.25) is not None else x,
    "what is computed": within,
    "the input": written,
    "what is made in the forward": padded,
    "what is returned": lambda m, x: (m.layer(x), m.layer.weight.data, x.data),
}


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("name", DATA)
def test_the_data_of_a_tensor_is_its_memory(name: str, sizes: str | None) -> None:
    model = Model(DATA[name]).eval()
    before = copy.deepcopy(model)
    gm = rg.trace(model, (X.clone(),), dynamic_shapes=sizes)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    for x in (X, X * 2) if sizes is None else (X, X.repeat(3, 1)):
        inputs = x.clone(), x.clone()
        with torch.no_grad():
            found, wanted = gm(inputs[0]), before(inputs[1])
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*inputs, rtol=0, atol=0)
        torch.testing.assert_close(dict(gm.state_dict()), dict(before.state_dict()), rtol=0, atol=0)


def test_other_weights_by_functional_call_are_captured() -> None:
    def call(m: Model, x: Tensor) -> Tensor:
        return torch.func.functional_call(m.layer, {"weight": m.layer.weight * m.scale}, (x,))

    model = Model(call).eval()
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    for x in (X, X.repeat(3, 1)):
        torch.testing.assert_close(gm(x), model(x))


META: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "of no use": lambda m, x: m.layer(x),
    "read for its shape": lambda m, x: m.layer(x) * m.scale.shape[0] + torch.empty(3, device="meta").numel(),
}


@pytest.mark.parametrize("name", META)
def test_a_weight_on_the_meta_device_that_is_not_computed_with(name: str) -> None:
    model = Model(META[name]).eval()
    model.scale = nn.Parameter(model.scale.to("meta"))
    for gm in (rg.trace(model, (X,)), rg.optimize(model, (X,)).model):
        with torch.no_grad():
            torch.testing.assert_close(gm(X), model(X))


def test_a_weight_on_the_meta_device_is_named_as_the_cause() -> None:
    model = Model(lambda m, x: m.layer(x) * m.scale).eval()
    model.scale = nn.Parameter(model.scale.to("meta"))
    with pytest.raises(rg.CaptureError, match=r"meta device has no values: load the weights"):
        rg.trace(model, (X,))
    gm = rg.trace(model.to("meta"), (X.to("meta"),))
    assert gm(X.to("meta")).is_meta
