from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from regraft.cli import main


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def regraft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """The command line, in a folder of its own, with this folder's `zoo` to be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        try:
            status = main(list(words))
        except SystemExit as leaving:  # argparse
            status = int(leaving.code or 0)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run
