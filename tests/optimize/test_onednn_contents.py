"""What a program would take from its sample for all calls, since tensors hold it, is left to the graph."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

import regraft as rg
from regraft.optimize.engines import onednn_graph
from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor, Tensor], Any]
W = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
OF_CONTENTS: dict[str, Function] = {
    "number": lambda x, y: y * x.sum().item(),
    "numbers": lambda x, y: torch.cat(y.split((x[:, 0] > 0).to(torch.long).tolist())),
    "number of an operator": lambda x, y: y * torch.ops.aten.item.default(x.sum()),
    "whether two are equal": lambda x, y: y * torch.equal(x, y),
    "places": lambda x, y: (y > 0).nonzero(),
    "those that are so": lambda x, y: y[x > 0],
    "rows that are so": lambda x, y: y[x[:, 0] > 0] + 1,
    "those of a mask": lambda x, y: torch.masked_select(y, x > 0),
    "as often as told": lambda x, y: y.repeat_interleave((x[:, 0] > 0).long() + 1, 0),
    "each once": lambda x, y: torch.unique((y * 3).long()),
}
OF_SIZES: dict[str, Function] = {
    "size": lambda x, y: y * x.size(0) / x.dim(),
    "by places": lambda x, y: y[(x[:, 0] > 0).long()],
    "a mask of zeros": lambda x, y: y.masked_fill(x > 0, 0.0),
    "written where it is so": lambda x, y: torch.index_put(y, (x > 0,), torch.tensor(2.0)),
    "known places": lambda x, y: y[(torch.ones_like(y[:, 0]) > 0).nonzero().squeeze(1)],
    "a known number": lambda x, y: y * torch.ones_like(y).sum().item(),
    "whether a mask hides all": lambda x, y: (
        F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None], (x > -9)[None, None]).relu() + 1
    ),
    "both of it": lambda x, y: torch.topk(x, 2)[0] + y[:, :2],
}


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, torch.relu(F.linear(x, W)))


def graph(function: Function) -> torch.fx.GraphModule:
    return symbolic_trace(Of(function))


@pytest.mark.parametrize("name", OF_CONTENTS)
def test_what_is_made_of_contents_is_refused(name: str) -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"makes numbers or sizes of what a tensor holds"):
        Forms(graph(OF_CONTENTS[name]), [x])


@pytest.mark.parametrize("name", OF_SIZES)
def test_what_is_the_same_in_each_call_or_a_tensor_is_not(name: str) -> None:
    x, other = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    model = Of(OF_SIZES[name])
    program = onednn_graph.build(SimpleNamespace(module=graph(OF_SIZES[name]), sample=[x]))
    for given in (x, other):
        torch.testing.assert_close(program([given])[0], model(given))


class Experts(nn.Module):
    """Tokens in groups, one for each expert: how many are in each, the tokens tell (as JetMoE has it)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen, order = self.gate(x).argmax(-1).sort()
        groups = x[order].split(torch.zeros(3, dtype=torch.long).index_add(0, chosen, torch.ones_like(chosen)).tolist())
        found = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        return torch.zeros_like(x).index_add(0, order, found)


def test_experts_get_the_tokens_of_the_call() -> None:
    torch.manual_seed(0)
    model, x = Experts().eval(), torch.randn(20, 16)
    result = rg.optimize(model, (x,), keep="all", transformations=[], engine="onednn", seconds=0.01)
    assert "of what a tensor holds" in str(result.graphs[0].engine)
    with torch.no_grad():
        for _ in range(3):
            other = torch.randn(20, 16)
            torch.testing.assert_close(result.model(other), model(other))
