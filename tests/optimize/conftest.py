"""The models of these tests are a module beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what becomes of a product do not depend on whether a convolution is faster here."""
    if request.path.name.startswith(("test_onednn", "test_written")):
        from regraft.optimize.engines import onednn_pixels

        monkeypatch.setattr(onednn_pixels, "as_good_by_pixels", lambda *_: False)
