"""Models and inputs that the tests name on the command line, as `zoo:net`."""

from __future__ import annotations

import torch
from torch import nn

import regraft as rg
from regraft.core.vocabulary import LINEAR


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 3.0
        return torch.softmax(scores, -1) @ self.value(x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.a(first) + self.b(second)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Attention(), Attention())


def conv() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    for tensor in (model[1].running_mean, model[1].running_var, model[1].weight, model[1].bias):
        nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def with_example() -> nn.Module:
    model = Two()
    model.example_inputs = lambda: (torch.randn(3, 4), torch.randn(3, 4))
    return model


instance = Two()
not_a_model = 3


def breaks() -> nn.Module:
    raise RuntimeError("no luck\nin two lines")


def slow() -> nn.Module:
    raise AssertionError("the work has begun")


def makes_text() -> str:
    return "text"


def needs(width: int) -> nn.Module:
    return nn.Linear(width, width)


def x() -> torch.Tensor:
    return torch.randn(2, 5, 4)


def wide() -> torch.Tensor:
    return torch.randn(2, 5, 7)


def misspelt() -> dict[str, torch.Tensor]:
    return {"inputt": torch.randn(2, 5, 4)}


def one_more() -> dict[str, torch.Tensor]:
    return {"input": torch.randn(2, 5, 4), "more": torch.randn(2, 5, 4)}


class Many(nn.Module):
    """Called as models of transformers are: by name, with twenty that have defaults."""

    def forward(self, ids: torch.Tensor, mask=None, a=None, b=None, c=None, d=None, e=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return ids


class Rows(nn.Module):
    def forward(self, *rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(rows)


many, rows = Many(), Rows()


def traced() -> nn.Module:
    return torch.jit.trace(net().eval(), x())


CHEAPER = {nn.GELU: nn.ReLU}


def gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


class Undocumented(rg.ReplaceActivation):
    pass


class NegateLinear(rg.Rewrite):
    """Put a negation in the place of a linear layer: wrong, though it claims to preserve the computation.

    Args:
        only: the end of the layers' names.
    """

    preserves_computation = True
    pattern = rg.Calls(LINEAR)

    def __init__(self, only: str) -> None:
        self.only = only

    def rewrite(self, match: rg.Match, edit: rg.Edit, facts: rg.Facts) -> str:
        call = match.call
        rg.require(rg.that(call.where.endswith(self.only), f"{call.where} does not end with {self.only}"))

        edit.replace(call.node, torch.neg, call.input)
        return "negated"


class ReturnsNothing(rg.Transformation):
    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:  # type: ignore[return]
        pass


class NoPattern(rg.Rewrite):
    def rewrite(self, match: rg.Match, edit: rg.Edit, facts: rg.Facts) -> str:
        return "nothing"
