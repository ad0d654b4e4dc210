"""What engines are given in the place of formulas that overflow."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg
from regraft.optimize.engines import wanted
from regraft.optimize.engines.stable import STABLE

aten = torch.ops.aten
NUMBERS = torch.tensor([0.0, 1, -1, 100, -100, 1e30, -1e30, math.inf, -math.inf, math.nan])


@pytest.mark.parametrize("target", [aten.log_sigmoid.default, aten.logaddexp.default, aten.logaddexp2.default])
def test_a_formula_is_right_for_every_number(target: Any) -> None:
    pairs = torch.meshgrid(NUMBERS, NUMBERS, indexing="ij")[: len(target._schema.arguments)]
    exact = target(*(each.double() for each in pairs)).float()
    torch.testing.assert_close(STABLE[target](*pairs), exact, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_the_loss_is_torchs_with_every_setting() -> None:
    x, target, weight, more = torch.randn(5, 4) * 100, torch.rand(5, 4), torch.rand(4), torch.rand(4) * 3
    loss = aten.binary_cross_entropy_with_logits.default
    for given, positive, reduction in itertools.product((None, weight), (None, more), range(3)):
        settings = (target, given, positive, reduction)
        torch.testing.assert_close(STABLE[loss](x, *settings), loss(x, *settings))


class OfLogarithms(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none")
        return F.logsigmoid(x), torch.logaddexp(x, y), torch.logaddexp2(x, y), loss


class OfSums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.logcumsumexp(x, -1), torch.special.log_ndtr(y)


@pytest.mark.parametrize("model", [OfLogarithms(), OfSums()], ids=["spelled", "refused"])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_engine_is_right_for_large_numbers(engine: str, model: nn.Module) -> None:
    if wanted.missing_packages(engine):
        pytest.skip(f"{engine} is not installed")
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    result = rg.optimize(model.eval(), (x, y), engine=engine, keep="all", seconds=0.01)
    assert (result.graphs[0].engine.engine == engine) is isinstance(model, OfLogarithms)
    for scale in (1, 100, 1e5):
        with torch.no_grad():
            torch.testing.assert_close(result.model(x * scale, y * scale), model(x * scale, y * scale))
