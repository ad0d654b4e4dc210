from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import regraft as rg
from regraft.optimize import optimize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_of_a_long_name, self.key_of_a_long_name, self.value_of_a_long_name = (
            nn.Linear(8, 8) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query_of_a_long_name(x) @ self.key_of_a_long_name(x).transpose(-1, -2) / 3.0
        return torch.softmax(scores, -1) @ self.value_of_a_long_name(x)


class Encoder(nn.Module):
    """A model with sites of every kind, one that is refused among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.intermediate_with_a_name_longer_than_a_phone_is_wide = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8))
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.right.weight = self.left.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.norm(self.conv(x)))
        x = self.intermediate_with_a_name_longer_than_a_phone_is_wide(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return {"left": self.left(x), "<right> & more": self.right(x)}


@pytest.fixture(scope="session")
def result() -> Any:
    torch.manual_seed(0)
    model = Encoder().eval()
    for tensor in (model.norm.running_mean, model.norm.running_var, model.norm.weight, model.norm.bias):
        nn.init.uniform_(tensor, 0.5, 1.5)
    parts = [rg.FoldBatchNorm(), rg.ChangeTrueDivToMulByInverse(), rg.MergeLinears()]
    return optimize(model, (torch.randn(2, 4, 5),), transformations=parts, keep="all", seconds=0.02)
