"""Dictionaries that are classes of their own: what a graph takes and returns is the tensors in them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BatchFeature

import regraft as rg

KINDS = [UserDict, BatchEncoding, BatchFeature]


class Doubled(nn.Module):
    """Takes one of them, in a list as well, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any, more: list[Any]) -> Any:
        return type(batch)({"y": self.linear(batch["x"]), "z": batch["n"] * more[0]["x"], "kind": 7})


def _call(kind: Any, rows: int) -> dict[str, Any]:
    return {"batch": kind({"x": torch.randn(rows, 4), "n": 2}), "more": [kind({"x": torch.randn(rows)})]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_in_it_are_inputs(kind: Any, tmp_path: Path) -> None:
    model = Doubled().eval()
    gm = rg.trace(model, kwargs=_call(kind, 3), dynamic_shapes="auto")
    for copy in (gm, pickle.loads(pickle.dumps(gm))):
        call = _call(kind, 5)
        found, wanted = copy(**call), model(**call)
        assert type(found) is kind
        torch.testing.assert_close(dict(found), dict(wanted))
    other = _call(kind, 5)
    other["batch"]["n"] = 3
    with pytest.raises(TypeError, match="3"):
        gm(**other)


def test_in_another_process(tmp_path: Path) -> None:
    code = "import torch\n"
    for kind in KINDS:
        model, file = Doubled().eval(), str(tmp_path / f"{kind.__name__}.pt")
        result = rg.optimize(model, kwargs=_call(kind, 3), keep="all", engine="eager", seconds=0.02)
        call = _call(kind, 2)
        torch.save((result.graph_module, call["batch"].data, call["more"][0].data, dict(model(**call))), file)
        code += f"""
from {kind.__module__} import {kind.__name__} as Kind
gm, batch, more, wanted = torch.load({file!r}, weights_only=False)
found = gm(batch=Kind(batch), more=[Kind(more)])
assert type(found) is Kind
torch.testing.assert_close(dict(found), wanted)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_program_is_read_where_nobody_has_imported_its_class(kind: Any, tmp_path: Path) -> None:
    class Takes(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return batch["x"] * 2

    result = rg.optimize(Takes(), (kind({"x": torch.ones(3)}),), keep="all", engine="eager", seconds=0.02)
    result.save(tmp_path / "takes.pt2")
    code = f"""
import regraft as rg, torch
gm = rg.load({str(tmp_path / "takes.pt2")!r})
from {kind.__module__} import {kind.__name__} as Kind
assert gm(Kind({{"x": torch.ones(3)}})).sum() == 6
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_others_are_refused_by_name() -> None:
    class Own(UserDict):  # type: ignore[type-arg]
        """May be more than what is in it."""

    with pytest.raises(rg.CaptureError, match="the argument batch is a Own, an object with tensors inside"):
        rg.trace(Doubled(), kwargs={"batch": Own(x=torch.randn(3, 4), n=2), "more": [{"x": torch.randn(3)}]})


def test_tensors_further_within_are_found() -> None:
    class Store:
        def __init__(self, x: Tensor) -> None:
            self.all = {"x": [x, 1]}

    class Data:
        def __init__(self, x: Tensor) -> None:
            self.store, self.itself, self.library = Store(x), self, torch

    class Reads(nn.Module):
        def forward(self, data: Data, flag: Any) -> Tensor:
            return data.store.all["x"][0] * 2

    with pytest.raises(rg.CaptureError, match="the argument data is a Data, an object with tensors inside"):
        rg.trace(Reads(), (Data(torch.ones(3)), True))

    class Setting:
        def __init__(self) -> None:
            self.library, self.function, self.kind, self.names = torch, torch.relu, Data, {"a": [1, "b"]}

    class Takes(nn.Module):
        def forward(self, x: Tensor, setting: Setting) -> Tensor:
            return setting.function(x)

    setting = Setting()
    assert rg.trace(Takes(), (torch.ones(3), setting))(torch.ones(3), setting).sum() == 3
