"""Which exports a capture tries; each takes long."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from regraft.capture import widest
from regraft.capture.exporting import Exported
from regraft.capture.signature import take_apart
from regraft.core.errors import CaptureError


class DataDependent(Exception):
    """Named as torch's are."""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Whether sizes vary in each export, and how many ways it has: of four, the third is the first that works."""
    calls: list[tuple[bool, int]] = []

    def export(_model: nn.Module, _call: Any, axes: Any, ways: list[int], *_: Any) -> Exported:
        calls.append((any(axes), len(ways)))
        if any(axes) and ways[0] < 2:
            raise DataDependent
        return Exported(None, enlarged=False, seen=None, way=ways.index(2))  # type: ignore[arg-type]

    monkeypatch.setattr(widest, "export", export)
    monkeypatch.setattr(widest.transformers_adapter, "ways", lambda _: [0, 1, 2, 3])
    return calls


def test_ways_that_fail_for_fixed_sizes_are_not_tried_where_sizes_vary(tried: list[tuple[bool, int]]) -> None:
    model, x = nn.Linear(2, 2), torch.ones(3, 2)
    exports = widest.Exports(model, take_apart(model, (x,), {}), decided=False)
    exports.widest([{0: Dim.AUTO}])
    assert tried == [(True, 4), (False, 4), (True, 2)]
    exports.widest([{0: Dim.AUTO}])
    assert tried[3:] == [(True, 2)]
    assert exports.widest([None]).way == 2
    assert len(tried) == 4, "that of fixed sizes is there"


def test_axes_that_are_as_many_are_tried_once(tried: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def export(_model: nn.Module, _call: Any, axes: Any, *_: Any) -> Exported:
        tried.append((any(axes), 0))
        raise ValueError

    monkeypatch.setattr(widest, "export", export)
    model, x = nn.Linear(2, 2), torch.ones(3, 2)
    call = take_apart(model, (x,), {})
    for axes, exports in [({0: Dim.AUTO}, 2), ({1: Dim.AUTO}, 2), ({0: Dim.AUTO, 1: Dim.AUTO}, 3)]:
        tried.clear()
        with pytest.raises(CaptureError):
            widest.Exports(model, call, decided=False).widest([axes])
        assert len(tried) == exports
