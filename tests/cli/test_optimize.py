"""`regraft optimize`, and the files it leaves."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
import zoo

from regraft.cli.choosing import chosen as made_of
from regraft.cli.parser import ENGINES, fault_of_engines
from regraft.cli.recipe import Choice
from regraft.optimize import presets
from regraft.optimize.engines import wanted

X = ("--inputs", "zoo:x")
QUICK = ("--seconds", "0.02")


def test_it_writes_the_model_and_the_recipe(regraft) -> None:
    done = regraft("optimize", "zoo:net", *X, *QUICK, "--keep", "all", "-t", "merge-linears", "-o", "out.pt2", "--json")
    assert done.status == 0, done.err
    assert done.json["steps"][0]["applied"] == 2
    assert done.json["files"] == {"model": "out.pt2", "recipe": "out.recipe.toml"}
    loaded = torch.export.load("out.pt2").module()
    assert loaded(torch.randn(3, 7, 4)).shape == (3, 7, 8)
    recipe = tomllib.loads(Path("out.recipe.toml").read_text())
    assert recipe["transformations"] == ["merge-linears"]
    assert recipe["made_with"]["torch"] == metadata.version("torch")


def test_the_recipe_repeats_the_run(regraft) -> None:
    first = regraft("optimize", "zoo:conv", *QUICK, "--keep", "all", "-o", "one.pt2", "--seed", "3")
    assert first.status == 0, first.err
    again = regraft("optimize", "--recipe", "one.recipe.toml", "-o", "two.pt2")
    assert again.status == 0, again.err
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(torch.export.load("one.pt2").module()(x), torch.export.load("two.pt2").module()(x))
    one, two = (Path(f"{name}.recipe.toml").read_text() for name in ("one", "two"))
    assert tomllib.loads(one) == tomllib.loads(two)


def test_what_was_not_kept_is_in_the_recipe_as_a_comment(regraft) -> None:
    words = ("--keep", "all", "-t", "fold-batch-norm", "-t", "merge-linears", "--report", "page.html")
    assert regraft("optimize", "zoo:conv", *QUICK, *words).status == 0
    text = Path("page.recipe.toml").read_text()
    assert "# merge-linears on forward: nothing to do" in text
    assert tomllib.loads(text)["transformations"] == ["fold-batch-norm"]
    assert "<!doctype html>" in Path("page.html").read_text().lower()


def test_a_wrong_rewrite_is_taken_back(regraft) -> None:
    wrong = "zoo:NegateLinear:only=1.query"
    done = regraft("optimize", "zoo:net", *X, *QUICK, "--keep", "all", "-t", wrong)
    assert done.status == 0, done.err
    assert "taken back" in done.out
    unverified = regraft("optimize", "zoo:net", *X, *QUICK, "--keep", "all", "-t", wrong, "--no-verify")
    assert "kept" in unverified.out


def test_an_engine_that_is_missing_or_does_not_fit_is_one_line(regraft, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(torch.export.export(zoo.conv().eval(), (torch.randn(2, 3, 8, 8),)), "conv.pt2")
    done = regraft("optimize", "conv.pt2", "--engine", "inductor")
    assert done.status == 2
    assert done.err.endswith("of the type ExportedProgram; name the model that it was made from, or: --engine torch\n")
    monkeypatch.setitem(sys.modules, "openvino", None)
    done = regraft("optimize", "zoo:conv", "--engine", "openvino")
    assert done.status == 2
    assert done.err == "regraft optimize: engine='openvino' needs openvino: pip install 'regraft[openvino]'\n"


def test_the_fastest_of_several_engines(regraft, tmp_path: Path) -> None:
    done = regraft(
        "optimize", "zoo:conv", *QUICK, "--engine", "torch,onednn", "--keep", "all", "-o", "out.pt2", "--json"
    )
    assert done.status == 0, done.err
    assert list(done.json["graphs"][0]["engine"]["tried"]) == ["onednn"]
    assert 'engine = "torch,onednn"' in (tmp_path / "out.recipe.toml").read_text(encoding="utf-8")
    again = regraft("optimize", "--recipe", "out.recipe.toml", "--json")
    assert list(again.json["graphs"][0]["engine"]["tried"]) == ["onednn"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("tvm", "there is no 'tvm' (choose from torch, eager, onednn"),
        ("torch,", "there is no ''"),
        ("torch,auto", "'auto' stands by itself, and not in 'torch,auto'"),
    ],
)
def test_wrong_engines_are_refused_before_the_model_is_loaded(regraft, tmp_path: Path, names: str, said: str) -> None:
    done = regraft("optimize", "nowhere:model", "--engine", names)
    assert done.status == 2
    assert f"--engine: {said}" in done.err
    (tmp_path / "r.toml").write_text(f'model = "nowhere:model"\nengine = "{names}"\n', encoding="utf-8")
    done = regraft("optimize", "--recipe", "r.toml")
    assert done.status == 2
    assert f"r.toml: engine: {said}" in done.err


def test_the_command_line_takes_the_engines_that_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted, "missing_packages", lambda name: ())
    assert set(wanted.ENGINES) < set(ENGINES)
    for names in (*ENGINES, *(f"torch,{name}" for name in ENGINES), "tvm"):
        try:
            wanted.expect_engines(names.split(","), zoo.conv())
        except ValueError:
            assert fault_of_engines(names) is not None, names
        else:
            assert fault_of_engines(names) is None, names


def test_a_preset_is_what_the_library_has_under_its_name(regraft) -> None:
    for name in presets.PRESETS:
        plan = regraft("explain", "zoo:conv", "--preset", name, "--dry-run", "--json").json
        chosen = made_of(tuple(Choice(c.pop("name"), c) for c in plan["transformations"]))
        assert [one.signature for one in chosen] == [one.signature for one in presets.resolve(name)]


def test_a_dry_run_says_what_would_be_done(regraft, tmp_path: Path) -> None:
    done = regraft("optimize", "zoo:net", *X, "-o", "out.pt2", "--dry-run")
    assert done.status == 0
    assert "merged query + key + value" in done.out
    assert not list(tmp_path.iterdir())
