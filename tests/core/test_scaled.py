"""`scaled`, which folds scales into large weights block by block."""

from __future__ import annotations

import pytest
import torch

from regraft.core import weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (6, 4, 3, 3), (3, 40), (5, 1 << 16)])
@pytest.mark.parametrize("block", [1, 8, 30, 1 << 18])
@pytest.mark.parametrize("along", ["rows", "columns", "both"])
def test_blocks_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...], block: int, along: str
) -> None:
    monkeypatch.setattr(weights, "_BLOCK", block)
    weight = torch.randn(shape).to(dtype)
    rows, columns = (shape[0] if along != "columns" else 1), (shape[1] if along != "rows" else 1)
    factors = torch.randn((rows, columns, *(1,) * (len(shape) - 2)), dtype=weights.wider(dtype))
    expected = (weight.to(factors.dtype) * factors).to(dtype)
    assert torch.equal(weights.scaled(weight, factors), expected)
    assert torch.equal(
        weights.scaled(weight.flip(0).transpose(0, 1).transpose(0, 1), factors),
        (weight.flip(0).to(factors.dtype) * factors).to(dtype),
    )
