"""Memory that is freed is noticed, or, where torch does not say when that is, kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from regraft.core import freed
from regraft.core.freed import Memory


def test_it_is_freed_once_nobody_has_it() -> None:
    weight, other = (nn.Parameter(torch.randn(4)) for _ in range(2))
    memory, part = Memory([weight, other]), weight.detach()[1:]
    weight.data = torch.randn(4)
    assert not memory.freed
    del part
    assert memory.freed
    assert not Memory([weight, other]).freed


def test_torch_says_when_it_is_freed() -> None:
    assert freed._objects_last()


def test_where_torch_does_not_say_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed, "_objects_last", lambda: False)
    weight = nn.Parameter(torch.randn(4))
    memory, storage = Memory([weight]), StorageWeakRef(weight.untyped_storage())
    weight.data = torch.randn(4)
    assert not memory.freed
    assert not storage.expired()
    del memory
    assert storage.expired()
