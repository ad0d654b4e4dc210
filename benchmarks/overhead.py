"""What a call costs in Python: models so small that the arithmetic is nothing beside it.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Microseconds of one call, the best block of many, in rotated order: of the model itself, of its graph as captured, of
the graph rewritten with the preset "exact", and of the drop-in that `optimize` returns.

Then, of networks of real size that an engine runs: what a call takes beside the engine's program, the median over many
calls. It is more than the same questions take by themselves, since the program has emptied the caches.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from inference import MODELS as LARGE
from torch import Tensor, nn

import regraft as rg
from regraft.dropin import grafts_of


def _mlp() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), (torch.randn(4, 16),), {}


def _convolutions() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(10)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 64, 4)), (torch.randn(1, 8, 8, 8),), {}


def _bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 12}
    ids = torch.randint(0, 100, (1, 8))
    return (
        BertModel(BertConfig(**sizes, vocab_size=100)),
        (),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    )


MODELS = {"two linear layers": _mlp, "ten convolutions": _convolutions, "BERT, 12 layers of width 32": _bert}


def microseconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The best block of each, which nothing else disturbed."""
    number = {name: max(1, int(0.02 / (timeit.timeit(call, number=5) / 5))) for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            best[name] = min(best[name], timeit.timeit(calls[name], number=number[name]) / number[name])
    return {name: seconds * 1e6 for name, seconds in best.items()}


def beside_the_program(dropin: nn.Module, kwargs: dict[str, Any], calls: int = 300) -> float:
    """Microseconds of a call that are not those of the program that its engine runs."""
    grafts = grafts_of(dropin)
    if grafts is None or grafts.entries[0].engine is None:
        return float("nan")
    engine = grafts.entries[0].engine
    run, inside, outside = engine._run, [], []

    def timed(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        start = time.perf_counter()
        results: Sequence[Tensor] = run(inputs)
        inside.append(time.perf_counter() - start)
        return results

    engine._run = timed
    for _ in range(calls):
        start = time.perf_counter()
        dropin(**kwargs)
        outside.append(time.perf_counter() - start)
    return 1e6 * statistics.median(whole - part for whole, part in zip(outside, inside, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--large", nargs="*", choices=LARGE, default=["mobilenetv2", "minilm", "t5-small"])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("regraft").setLevel(logging.ERROR)
    print("| model | eager µs | captured | rewritten | drop-in |\n|---|---|---|---|---|")
    for said, make in MODELS.items():
        torch.manual_seed(0)
        model, args, kwargs = make()
        model.eval()
        with torch.no_grad():
            captured = rg.trace(model, args, kwargs)
            result = rg.optimize(model, args, kwargs, keep="all")
            programs = (model, captured, result.graph_module, result.model)
            calls = {str(i): partial(program, *args, **kwargs) for i, program in enumerate(programs)}
            times = list(microseconds(calls, arguments.rounds).values())
        print(f"| {said} | " + " | ".join(f"{time:.0f}" for time in times) + " |", flush=True)
    print("\n| model | beside the program, µs | frozen |\n|---|---|---|")
    for name in arguments.large:
        torch.manual_seed(0)
        model, kwargs = LARGE[name](1)
        with torch.no_grad():
            dropins = (rg.optimize(model.eval(), kwargs=kwargs, frozen=frozen).model for frozen in (False, True))
            found = [f"{beside_the_program(dropin, kwargs):.0f}" for dropin in dropins]
        print(f"| {name} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
