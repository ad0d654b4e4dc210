"""What every test starts from: no network, one thread per worker, the same random numbers each time.

`REGRAFT_SEED=1 make test` draws others.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Read once, when the libraries are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import hypothesis
import pytest
import torch
import torch._dynamo

UNDER_XDIST = "PYTEST_XDIST_WORKER" in os.environ
FUZZ_EXAMPLES = int(os.environ.get("REGRAFT_FUZZ", "0"))
SEED = int(os.environ.get("REGRAFT_SEED", "0"))

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it starts a dozen processes for each conversion

if UNDER_XDIST:
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 100)  # as often as by default, to look through all modules takes a tenth of the time

# `make test` draws the same examples every time; `make fuzz` draws new ones.
hypothesis.settings.register_profile("test", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=max(FUZZ_EXAMPLES, 1),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fuzz" if FUZZ_EXAMPLES else "test")


def _seed(stage: int) -> None:
    """Another number for each stage: what a test draws is not to equal the weights it found there."""
    random.seed(1000 * SEED + stage)
    torch.default_generator.manual_seed(1000 * SEED + stage)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(1000 * SEED + stage)  # which looks up from where it was called, each time


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Before a module is imported, for what it draws then: torch begins with another seed in each process."""
    if isinstance(collector, pytest.Module):
        _seed(1)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Before what several tests share is made: it comes before the fixture below."""
    if fixturedef.scope != "function":
        _seed(2)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    _seed(0)


@pytest.fixture(autouse=True)
def _as_it_was():
    """A test that changes a global setting, of torch or of the logger, must not reach the next one."""
    level = logging.getLogger("regraft").level
    dtype, grad, deterministic = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    logging.getLogger("regraft").setLevel(level)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _mentions_transformers(item.path))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@functools.cache
def _mentions_transformers(module: Path) -> bool:
    """Whether a module may import it, and so comes last: to a process that has its thousand classes of layers, each
    capture takes longer, since torch patches the class that all are below."""
    return re.search(r"\btransformers", module.read_text(encoding="utf-8")) is not None


@pytest.fixture(scope="module", autouse=True)
def _few_layers_need_no_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """While it exports, torch keeps what it found of each operator for the next like it; most models of these tests
    have few layers. The tests of other folders leave it on."""
    few = request.path.parent.name in ("capture", "cli", "optimize")
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=not few):
        yield
