"""Models small enough to capture in a second, with weights that hide nothing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regraft.optimize.engines import choosing

WIDTH = 16


def every_engine(monkeypatch: pytest.MonkeyPatch, build: object) -> None:
    """Let all engines be built so. Only what chooses them sees it: torch imports parts of itself while it captures."""
    adapter = SimpleNamespace(build=build)
    monkeypatch.setattr(choosing, "importlib", SimpleNamespace(import_module=lambda _: adapter, util=importlib.util))


class Pair(nn.Module):
    """Two layers, for a forward that does more than to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Padded(nn.Conv2d):
    """A layer of torch's that is only made otherwise."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding="same")


class Head(nn.Linear):
    """Another."""

    def __init__(self, width: int) -> None:
        super().__init__(8, width)


class Heads(nn.Module):
    """Two projections of one input behind a convolution and a norm: something for each of the usual rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = Padded(3, 8), nn.BatchNorm2d(8)
        self.q, self.k = Head(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        q, k = self.q(y), self.k(y)
        return (q, k) if scale is None else (q * scale, k)


def heads() -> Heads:
    torch.manual_seed(0)
    model = Heads()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1.0)
    return model.eval()


def image(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(batch))


def ids(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(length))
