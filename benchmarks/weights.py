"""Weights and memory: how long merging and folding large layers takes, and how much memory they need at their peak.

    OMP_NUM_THREADS=1 python benchmarks/weights.py

Time, the process's own, is a ratio to one plain `torch.cat` of the same bytes, in turn; the bound aimed at is 1.3.
Memory is the peak of the process above the model itself, in multiples of the largest group of weights that is rewritten
at once; each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regraft as rg

WIDTH, LAYERS, ROUNDS = 4096, 4, 5


class Projections(nn.Module):
    """Three linear layers on one input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Their sum."""
        return self.q(x) + self.k(x) + self.v(x)


def convolution(width: int) -> nn.Module:
    """A convolution and its batch norm, whose scales are below and above one, as those of trained models are."""
    norm = nn.BatchNorm2d(width)
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    nn.init.normal_(norm.running_mean, 0, 0.1)
    return nn.Sequential(nn.Conv2d(width, width, 3, bias=False), norm)


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "merge three linear layers": (lambda: Projections(WIDTH), rg.MergeLinears),
    "fold a batch norm into a convolution": (lambda: convolution(WIDTH // 2), rg.FuseBatchNorm2dInConv2d),
    "fuse a bias into a linear layer": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), rg.FuseBiasInLinear),
}


def seconds(function: Callable[[], Any]) -> float:
    """The process's own time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def ratio(name: str, dtype: torch.dtype) -> float:
    """Median time of a rewrite over that of `torch.cat` of the bytes that it writes."""
    make, transformation = CASES[name]
    model = make().to(dtype).eval()
    largest = [p.detach() for p in model.parameters() if p.ndim > 1]
    ratios = []
    for _ in range(ROUNDS):
        gm = rg.symbolic_trace(model)
        rewriting = seconds(lambda gm=gm: transformation()(gm))
        halves = [half for weight in largest for half in weight.chunk(2)] if len(largest) == 1 else largest
        ratios.append(rewriting / seconds(lambda halves=halves: torch.cat(halves)))
    return statistics.median(ratios[1:])


def peak(consume: bool) -> None:
    """In a process of its own: print the peak above the model, over the size of one group, of merging all layers."""
    model = nn.Sequential(*(Projections(WIDTH // 2) for _ in range(LAYERS)))
    gm = rg.symbolic_trace(model)
    group = sum(p.nbytes for p in model[0].parameters())
    del model
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    rg.MergeLinears()(gm, consume=consume)
    print(f"{(memory('VmHWM') - before) / group:.2f}")


def memory(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="time and memory of rewriting large weights")
    parser.add_argument("--peak", choices=["keep", "consume"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("regraft").setLevel(logging.ERROR)
    if options.peak:
        peak(options.peak == "consume")
        return
    print("| weights | time over torch.cat, float32 | bfloat16 |\n|---|---|---|")
    for name in CASES:
        print(f"| {name} | {ratio(name, torch.float32):.2f} | {ratio(name, torch.bfloat16):.2f} |", flush=True)
    print(f"\n| memory, {LAYERS} groups of three linear layers | peak above the model, in groups |\n|---|---|")
    for mode in ("keep", "consume"):
        command = [sys.executable, __file__, "--peak", mode]
        result = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        print(f"| {'consume=True' if mode == 'consume' else 'as it is'} | {result} |", flush=True)


if __name__ == "__main__":
    main()
