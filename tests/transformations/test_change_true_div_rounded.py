"""`ChangeTrueDivToMulByInverse`: what makes a whole step of a last bit, wherever it lies behind the quotient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, capture, check_applied, check_refused
from regraft.core.graph_module import adopt

INVERT = rg.ChangeTrueDivToMulByInverse()
X = torch.arange(98.0).view(14, 7)[torch.randperm(14)]
C = torch.tensor(3 / 7)

STEPS: dict[str, Callable[[Any], Any]] = {
    "heaviside": lambda y: torch.heaviside(y - C, torch.zeros(1)),
    "fmod": lambda y: torch.fmod(y, 1 / 7),
    "remainder": lambda y: torch.remainder(y * 7, 1),
    "hardshrink": lambda y: F.hardshrink(y, 3 / 7),
    "threshold": lambda y: F.threshold(y, float(C), 0.0),
    "sign": lambda y: (y - C).sign(),
    "sgn": lambda y: torch.sgn(y - C),
    "signbit": lambda y: torch.signbit(y - C),
    "frac": lambda y: (y * 7).frac(),
    "copysign": lambda y: torch.copysign(torch.ones(1), y - C),
    "arc cosine": lambda y: (y - C + 1).clamp(0).acos(),
    "isclose": lambda y: torch.isclose(y, C, rtol=0.0, atol=0.0),
    "count_nonzero": lambda y: (y - C).count_nonzero(),
    "nonzero": lambda y: (y - C).nonzero(),
    "logical_not": lambda y: torch.logical_not(y - C),
    "logical_and": lambda y: torch.logical_and(y - C, y),
    "logical_or": lambda y: torch.logical_or(y - C, y),
    "logical_xor": lambda y: torch.logical_xor(y - C, y),
    "argsort": lambda y: (y - C).abs().argsort(),
    "sort": lambda y: torch.stack([y, y * 0 + C]).sort(0)[1],
    "sort, by name": lambda y: torch.stack([y, y * 0 + C]).sort(0).indices,
    "topk": lambda y: torch.stack([y, y * 0 + C]).topk(1, 0)[1],
    "max": lambda y: torch.stack([y, y * 0 + C]).max(0)[1],
    "histc": lambda y: torch.histc(y, 98, 0, 14),
    "fake_quantize": lambda y: torch.fake_quantize_per_tensor_affine(y * 3.5, 1.0, 0, -128, 127),
    "unique": lambda y: torch.unique(y),
    "nearest pixel": lambda y: F.grid_sample(
        torch.arange(16.0).view(1, 1, 4, 4),
        torch.stack([y, y], -1)[None] * 0.0625,
        mode="nearest",
        align_corners=False,
    ),
    "another type": lambda y: (y * 7).to(torch.uint8),
    "summed as whole numbers": lambda y: (y * 7).sum(dtype=torch.int64),
}
PATHS: dict[str, Callable[[Any], Any]] = {
    "cat": lambda y: torch.cat([y, y]),
    "stack": lambda y: torch.stack([y]),
    "chunk": lambda y: y.chunk(2)[0],
    "t": lambda y: y.t(),
    "mT": lambda y: y.mT,
    "roll": lambda y: y.roll(1),
    "pad": lambda y: F.pad(y, (1, 1)),
    "detach": lambda y: y.detach(),
    "cpu": lambda y: y.cpu(),
    "nan_to_num": lambda y: y.nan_to_num(),
    "maximum": lambda y: torch.maximum(y, torch.zeros(1)),
    "minimum": lambda y: torch.minimum(y, torch.full((1,), 100.0)),
    "amax": lambda y: y.amax(1),
    "amin": lambda y: y.amin(1),
    "clamp_min": lambda y: torch.clamp_min(y, 0),
    "clamp_max": lambda y: torch.clamp_max(y, 100),
    "hardtanh": lambda y: F.hardtanh(y, 0, 100),
    "leaky_relu": lambda y: F.leaky_relu(y),
    "lerp": lambda y: torch.lerp(y, y, 0.5),
    "addcmul": lambda y: torch.addcmul(y, y, torch.zeros(1)),
    "einsum": lambda y: torch.einsum("ij->ji", y),
    "matmul": lambda y: y @ torch.eye(7, dtype=y.dtype if isinstance(y, Tensor) else None),
    "linear": lambda y: F.linear(y, torch.eye(7, dtype=y.dtype if isinstance(y, Tensor) else None)),
    "where": lambda y: torch.where(torch.ones(1) > 0, y, 0),
    "the values of a pair": lambda y: y.sort(0)[0],
    "dropout": lambda y: F.dropout(y, 0.5, False),
    "rsub": lambda y: torch.rsub(y, 0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_behind_the_quotient(name: str, form: str) -> None:
    check_refused(INVERT, Wrap(lambda m, x: STEPS[name](x / 7)), (X,), form, "rounded or compared")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PATHS)
def test_every_function_passes_a_last_bit_on(name: str, form: str) -> None:
    check_refused(INVERT, Wrap(lambda m, x: PATHS[name](x / 7 * 7).floor()), (X,), form, "rounded or compared")
    check_applied(INVERT, Wrap(lambda m, x: PATHS[name](x / 7 * 7)), (X,), form)


def _written(m: Any, x: Any) -> Any:
    out = torch.zeros_like(x)
    out[0].copy_((x / 7 * 7)[1])
    return out.t().floor()


def _set(m: Any, x: Any) -> Any:
    out = torch.zeros_like(x)
    out[0] = (x / 7 * 7)[1]
    return out.floor()


def test_what_is_written_into_memory_is_read_there() -> None:
    for function in (_written, _set):
        check_refused(INVERT, Wrap(function), (X,), "trace", "rounded or compared")


def attention(m: Any, x: Any) -> Any:
    """With a mask that is compared, and cast back."""
    weights = (m.q(x) @ m.k(x).transpose(-1, -2)) / 7**0.5
    weights = weights.masked_fill(torch.arange(14) == 3, -1e9)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(x.dtype)
    return m.norm(x + F.gelu(m.o(weights @ x)))[:, 0]


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_still_rewritten(form: str) -> None:
    parts = {name: nn.Linear(7, 7) for name in "qko"}
    check_applied(INVERT, Wrap(attention, norm=nn.LayerNorm(7), **parts).eval(), (X[None] / 98,), form)
    ranked = Wrap(lambda m, x: attention(m, x).argmax(-1), norm=nn.LayerNorm(7), **parts).eval()
    check_refused(INVERT, ranked, (X[None] / 98,), form, "rounded or compared by node 'argmax'")


@torch.fx.wrap
def outside(x: Tensor) -> Tensor:
    return x


class Deep(nn.Module):
    """A quotient in a graph module of its own."""

    def __init__(self, end: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.end = torch.fx.symbolic_trace(Wrap(lambda m, x: x / 7 * 7)), end

    def forward(self, x: Any) -> Any:
        return self.end(self.inner(x))


class Keep(torch.fx.Tracer):
    """Leaves graph modules whole."""

    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, torch.fx.GraphModule) or super().is_leaf_module(m, name)


@pytest.mark.parametrize(("end", "sites"), [(torch.floor, 0), (torch.relu, 1), (torch.cos, 1)])
def test_a_graph_module_in_another(end: Callable[[Any], Any], sites: int) -> None:
    net = Deep(end)
    gm = INVERT(adopt(torch.fx.GraphModule(net, Keep().trace(net))))
    assert len(rg.history(gm)[-1].applied) == sites


def test_of_a_function_that_is_not_torchs_nothing_is_known() -> None:
    gm = capture(Wrap(lambda m, x: outside(x / 7)), (X,), "fx")
    INVERT(gm)
    assert (
        "may, for all that is known, be rounded or compared by node 'outside'" in rg.history(gm)[-1].refused[0].reason
    )
