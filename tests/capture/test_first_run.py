"""What a model caches outside of itself is real after a capture; see `regraft.capture.first_run`."""

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import Wrap

TABLES: dict[int, torch.Tensor] = {}


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length).float()


def tabled(length: int) -> torch.Tensor:
    if length not in TABLES:
        TABLES[length] = torch.arange(length).float()
    return TABLES[length]


class Method(nn.Module):
    @functools.lru_cache  # noqa: B019
    def mask(self, length: int) -> torch.Tensor:
        return torch.ones(3, length).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask(x.shape[-1])


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize(
    "model",
    [
        Wrap(lambda self, x: x + positions(x.shape[-1])),
        Wrap(lambda self, x: x + tabled(x.shape[-1])),
        Method(),
    ],
    ids=["a function", "a dictionary", "a method"],
)
def test_what_a_forward_caches_is_no_stand_in(model: nn.Module, sizes: str | None) -> None:
    positions.cache_clear()
    TABLES.clear()
    Method.mask.cache_clear()
    x = torch.randn(3, 5)
    gm = rg.trace(model.eval(), (x,), dynamic_shapes=sizes)
    assert type(model(x)) is torch.Tensor
    assert torch.equal(gm(x), model(x))
    assert torch.equal(gm(-x), model(-x))


def test_so_it_is_where_a_model_cannot_be_captured() -> None:
    positions.cache_clear()
    model = Wrap(lambda self, x: (x + positions(x.shape[-1])).numpy()).eval()
    x = torch.randn(3, 5)
    with pytest.raises(rg.CaptureError):
        rg.trace(model, (x,))
    assert type(positions(5)) is torch.Tensor
    model(x)


class Writes(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.layer = nn.Linear(4, 4)
        self.plain = [torch.zeros(2)]
        self.register_buffer("count", torch.zeros(2))
        self.norm = nn.BatchNorm1d(4).train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plain[0].add_(1)
        self.count.add_(1)
        self.layer.weight.mul_(2)
        self.norm(x)
        if self.fails:
            self.layer.bias.data = self.layer.bias.data * 3
        return self.norm(self.layer(x)) + self.count.sum() + self.plain[0].sum()


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_run_writes_is_put_back(fails: bool) -> None:
    model = Writes(fails)
    tensors = [*model.parameters(), *model.buffers(), *model.plain]
    were = [(tensor.detach().clone(), tensor.data_ptr()) for tensor in tensors]
    with pytest.raises(rg.CaptureError) if fails else contextlib.nullcontext():
        rg.trace(model, (torch.randn(2, 4),))
    for tensor, (value, where) in zip(tensors, were, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.data_ptr() == where


@pytest.mark.parametrize("function", [rg.trace, rg.optimize])
def test_lazy_layers_are_not_made_by_it(function: Callable[..., object]) -> None:
    model = nn.Sequential(nn.LazyLinear(3)).eval()
    with pytest.raises(rg.CaptureError, match="call the model once"):
        function(model, (torch.randn(2, 4),))
    assert nn.parameter.is_lazy(model[0].weight)
