"""How near each model comes to what the machine can do, and where its time goes.

    python benchmarks/limits.py --models bert resnet50 --batches 1 8 --dtypes float32 bfloat16

The peak is the best rate of a large matrix product in that dtype, and of a large copy, measured here. The limit of a
model is the longer of two times: its arithmetic (`torch.utils.flop_counter`) at that rate, and its weights, each read
once, at the rate of the copy. Nothing computes faster than that with these operators in this dtype; activations that
pass through memory, and everything that is no matrix product or convolution, come on top.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import inference
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def best_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The shortest of the calls that fit into the time, after a warm-up: what disturbs only ever adds to it."""
    for _ in range(4):
        call()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_flops(dtype: torch.dtype, seconds: float) -> float:
    """Multiplications and additions per second in a product of two matrices that the caches hold in blocks."""
    from regraft.transformations._packed_linear import PackedLinear

    size = 2048
    x = torch.randn(size, size).to(dtype)
    plain = nn.Linear(size, size, bias=False).to(dtype)
    layers = (plain, PackedLinear.of(plain))  # whichever of the two the machine does better
    return 2 * size**3 / min(best_seconds(lambda layer=layer: layer(x), seconds) for layer in layers)


def bandwidth(seconds: float) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    source = torch.zeros(64 << 20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), seconds)


def flops(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Multiplications and additions of one call, in matrix products, convolutions and attention."""
    # the counter knows the products that attention is made of, but not the fused operator of the CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**kwargs)
    return counter.get_total_flops()


def weight_bytes(model: nn.Module) -> int:
    """Of all weights that a call reads whole; of an embedding it reads a few rows."""
    rows = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    rows -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in rows)


def shares(call: Callable[[], Any], calls: int = 5) -> list[tuple[str, float]]:
    """Each operator's own share of the time, the largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(calls):
            call()
    events = [event for event in profiled.key_averages() if event.self_cpu_time_total > 0]
    total = sum(event.self_cpu_time_total for event in events)
    found = ((event.key.removeprefix("aten::"), event.self_cpu_time_total / total) for event in events)
    return sorted(found, key=lambda pair: -pair[1])


def row(name: str, dtype: str, batch: int, peak: float, rate: float, seconds: float) -> str:
    """One line of the table.

    Args:
        name: The model.
        dtype: What it computes in.
        batch: How many inputs at once.
        peak: Operations per second in that dtype.
        rate: Bytes per second.
        seconds: How long to measure.
    """
    torch.manual_seed(0)
    model, kwargs = inference.MODELS[name](batch)
    inference.randomise_statistics(model)
    model.eval()
    work = flops(model, kwargs)
    size = weight_bytes(model) * DTYPES[dtype].itemsize // 4
    limit = max(work / peak, size / rate)
    call = inference.eager(inference.rewritten(model, kwargs, "exact" if dtype == "float32" else "fast"), kwargs)
    del model
    taken = best_seconds(call, seconds)
    where = ", ".join(f"{operator} {share:.0%}" for operator, share in shares(call)[:4])
    times = f"{limit * 1e3:.1f} | {taken * 1e3:.1f} | {limit / taken:.0%}"
    return f"| {name} | {dtype} | {batch} | {work / 1e9:.1f} | {size / 1e6:.0f} | {times} | {where} |"


def measure(arguments: argparse.Namespace) -> None:
    rate = bandwidth(arguments.seconds)
    peaks = {name: peak_flops(DTYPES[name], arguments.seconds) for name in arguments.dtypes}
    said = ", ".join(f"{peak / 1e9:.0f} Gflop/s in {name}" for name, peak in peaks.items())
    print(f"{torch.get_num_threads()} threads: {said}; {rate / 1e9:.1f} GB/s\n")
    print("| model | dtype | batch | Gflop | MB of weights | limit ms | regraft ms | limit | where the time goes |")
    print("|---" * 9 + "|")
    for name in arguments.models:
        for batch in arguments.batches:
            for dtype in arguments.dtypes:
                print(row(name, dtype, batch, peaks[dtype], rate, arguments.seconds), flush=True)
                gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(inference.MODELS), choices=list(inference.MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("regraft").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        measure(arguments)


if __name__ == "__main__":
    main()
