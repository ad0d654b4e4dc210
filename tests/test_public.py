"""`import regraft` is cheap, and yet every name is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import regraft
from regraft import _public

SOURCE = Path(regraft.__file__).parents[1]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_import_of_public_is_in_all_and_the_other_way_round() -> None:
    tree = ast.parse(Path(_public.__file__).read_text("utf-8"))
    imported = [a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert sorted(imported) == sorted(_public.__all__)
    assert len(set(_public.__all__)) == len(_public.__all__)


@pytest.mark.parametrize("name", _public.__all__)
def test_a_public_name_is_an_attribute(name: str) -> None:
    assert getattr(regraft, name) is getattr(_public, name)
    assert name in dir(regraft)


def test_import_does_not_load_torch() -> None:
    done = run("import regraft; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_package_does_not_hide_the_function_of_its_name() -> None:
    code = "import regraft.verify, regraft as rg\nfrom regraft.verify.measure import compare_speed\n"
    done = run(code + "assert callable(rg.verify)\nfrom regraft import verify\nassert callable(verify)")
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        regraft.nothing  # noqa: B018
    assert not hasattr(regraft, "__nothing__")
