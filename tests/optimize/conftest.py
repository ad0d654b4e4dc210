"""The models of these tests are a module beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from regraft.verify import Comparison, compare_speed

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what becomes of a product do not depend on which one is the fastest here."""
    if request.path.name.startswith(("test_onednn", "test_written", "test_finite")):
        from regraft.optimize.engines import onednn_linear, onednn_pixels

        monkeypatch.setattr(onednn_linear, "way_in_program", lambda *_: "onednn")
        monkeypatch.setattr(onednn_pixels, "as_good_by_pixels", lambda *_: False)


@pytest.fixture(autouse=True)
def _soon_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program is timed at does not matter here, so nobody waits until the threads of the other are asleep, or
    until it is certain which of two ways is the faster one."""
    from regraft.optimize.engines import choosing, onednn_graph

    def compare(*programs: Callable[[], object], **limits: float) -> Comparison:
        return compare_speed(*programs, **{**limits, "min_seconds": 0.02})

    monkeypatch.setattr(choosing, "PAUSE", 0.001)
    monkeypatch.setattr(onednn_graph, "compare_speed", compare)
