"""Bisection on the engine itself: many sites of several rules, one of which is wrong; and the script that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import regraft as rg

LAYERS = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.q(x) * torch.sigmoid(self.k(x)) / 3 + self.v(x)


def rewritten() -> tuple[nn.Module, torch.fx.GraphModule]:
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).eval()
    gm = rg.trace(model, (torch.randn(2, 6),))
    return model, rg.compose(rg.MergeLinears(), rg.ChangeTrueDivToMulByInverse(), rg.FuseBiasInLinear())(gm)


def test_the_wrong_site_among_many_is_named() -> None:
    model, gm = rewritten()
    wrong = next(node for node in gm.graph.nodes if node.name == "truediv_7")
    site = next(s for s in rg.history(gm)[1].applied if ("", "truediv_7") in s.changes.nodes)
    # planted: the rewrite of this division is off, and the journal takes it for what the rewrite made
    wrong.args = (wrong.args[0], 0.3)
    before, after = site.changes.nodes["", "truediv_7"]
    assert after is not None
    site.changes.nodes["", "truediv_7"] = (before, type(after).of(wrong))
    gm.recompile()

    culprit = rg.bisect(model, gm, (torch.randn(2, 6),))
    assert culprit.transformation == "ChangeTrueDivToMulByInverse"
    assert culprit.where == site.where
    sites = sum(len(step.applied) for step in rg.history(gm))
    assert sites == 3 * LAYERS
    assert culprit.runs <= 10  # log2(36) and the checks at both ends


def test_the_script_runs_and_shows_the_failure_and_the_cure(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()

    class Break(rg.Transformation):
        def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
            for node in graph_module.graph.find_nodes(op="call_module"):
                if node.target == "1":
                    node.op, node.target = "call_function", torch.sigmoid
            return graph_module

    gm = Break()(rg.trace(model, (torch.randn(3, 4),)))
    culprit = rg.bisect(model, gm, (torch.randn(3, 4),))
    assert culprit.transformation == "Break"
    script = culprit.write(tmp_path / "culprit.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    # it asserts itself that the result is wrong with the culprit, and right without it
    assert done.returncode == 0, done.stderr
    assert "assert not wrong.ok" in script.read_text("utf-8")
    assert "verified on" in done.stdout
