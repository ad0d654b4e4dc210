"""The models of these tests are a module beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what becomes of a product do not depend on which one is the fastest here."""
    if request.path.name.startswith(("test_onednn", "test_written", "test_finite")):
        from regraft.optimize.engines import onednn_linear, onednn_pixels

        monkeypatch.setattr(onednn_linear, "way_in_program", lambda *_: "onednn")
        monkeypatch.setattr(onednn_pixels, "as_good_by_pixels", lambda *_: False)


@pytest.fixture(scope="module", autouse=True)
def _few_layers_need_no_cache() -> Iterator[None]:
    """While it exports, torch keeps what it found of each operator for the next like it; these have few layers."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield
