"""The recipe file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from regraft.cli.recipe import Choice, Recipe, read

FULL = """
model = "zoo:net"
inputs = "data/x.json"
dtype = "float64"
seed = 3
dynamic_shapes = "none"
keep = "all"
verify = false
transformations = ["merge-linears", { name = "zoo:NegateLinear", only = "query" }]
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(FULL)
    recipe = read(tmp_path / "r.toml")
    chosen = (Choice("merge-linears", {}), Choice("zoo:NegateLinear", {"only": "query"}))
    inputs = str(tmp_path / "data" / "x.json")
    assert recipe == Recipe(
        "zoo:net", inputs, "float64", None, 3, "none", keep="all", verify=False, transformations=chosen
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(FULL)
    recipe = read(tmp_path / "r.toml")
    other = tmp_path / "sub" / "again.toml"
    other.parent.mkdir()
    other.write_text(recipe.to_toml(other.parent, {"torch": "2"}, ("why, in\ntwo lines",)))
    assert "../data/x.json" in other.read_text()
    again = read(other)
    assert Path(again.inputs or "").resolve() == Path(recipe.inputs or "").resolve()
    assert again.to_dict() | {"inputs": 0} == recipe.to_dict() | {"inputs": 0}


@pytest.mark.parametrize(
    "value", ["", 'say "x"\\', "ü\n\t", "\x7f\x01", True, -3, 1e-12, [1, ["a"]], {"a b": {"c": 1}}]
)
def test_any_option_survives(tmp_path: Path, value: object) -> None:
    recipe = Recipe(transformations=(Choice("x", {"option": value}),))
    text = recipe.to_toml(tmp_path, {})
    assert tomllib.loads(text)["transformations"] == [{"name": "x", "option": value}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("transformation = []", "unknown key 'transformation'; did you mean transformations?"),
        ("seed = '3'", "seed is a whole number"),
        ("seed = true", "seed is a whole number"),
        ("seed = 99999999999999999999", "takes whole numbers of 64 bits"),
        ("seconds = nan", "seconds=nan"),
        ("keep = 'some'", "keep is one of measured, all"),
        ("dtype = 'float8'", "dtype is one of"),
        ("transformations = [3]", 'is "name" or'),
        ("transformations = [{ option = 1 }]", 'is "name" or'),
        ("verify = ", "is not TOML"),
        ("transformations = ['merge-linear']", "did you mean merge-linears?"),
        ("transformations = [{ name = 'merge-linears', widht = 3 }]", "no option 'widht'"),
    ],
)
def test_a_broken_recipe_is_one_line(regraft, tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "r.toml").write_text(line)
    done = regraft("explain", "zoo:net", "--recipe", "r.toml")
    assert done.status == 2
    assert said in done.err
    assert done.err.count("\n") == 1


def test_the_command_line_has_the_last_word(regraft, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(FULL.replace('inputs = "data/x.json"\n', ""))
    plan = regraft("explain", "--recipe", "r.toml", "--dtype", "float32", "-t", "deep-copy", "--dry-run", "--json").json
    assert plan["model"] == "zoo:net"
    assert plan["seed"] == 3
    assert plan["dtype"] == "float32"
    assert plan["transformations"] == [{"name": "deep-copy"}]


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "float16", "torch.float16"])
def test_a_type_of_torch_is_named(regraft, tmp_path: Path, dtype: str) -> None:
    sentence = f"weights in {dtype.removeprefix('torch.')}"
    words = ("explain", "zoo:net", "--inputs", "zoo:x")
    assert sentence in regraft(*words, "-t", f"reduce-precision:dtype={dtype}").out
    (tmp_path / "r.toml").write_text(f'transformations = [{{ name = "reduce-precision", dtype = "{dtype}" }}]')
    assert sentence in regraft(*words, "--recipe", "r.toml").out


def test_what_has_no_textual_form_is_named_and_the_recipe_names_it_again(regraft) -> None:
    words = ("--keep", "all", "--seconds", "0.02", "--no-verify", "--report", "page.html", "--json")
    chosen = ("-t", "replace-activation:mapping=zoo:CHEAPER", "-t", "reduce-precision:dtype=float16")
    first = regraft("optimize", "zoo:gelu", *chosen, *words)
    assert [step["applied"] for step in first.json["steps"]] == [1, 2]
    assert first.json["steps"][0]["sites"][0]["sentence"] == "GELU became ReLU"
    assert tomllib.loads(Path("page.recipe.toml").read_text())["transformations"] == [
        {"name": "replace-activation", "mapping": "zoo:CHEAPER"},
        {"name": "reduce-precision", "dtype": "float16"},
    ]
    again = regraft("explain", "--recipe", "page.recipe.toml", "--json")
    sentences = [site["sentence"] for site in again.json["sites"]]
    assert sentences == ["GELU became ReLU", "weights in float16", "computed in float16"]


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        ("merge-linears", Choice("merge-linears", {})),
        ("a.b:C", Choice("a.b:C", {})),
        ("x:n=3", Choice("x", {"n": 3})),
        (
            "a.b:C:n=3,s=word,l=[1, 2],f=0.5,b=true",
            Choice("a.b:C", {"n": 3, "s": "word", "l": [1, 2], "f": 0.5, "b": True}),
        ),
        ("x:b=False,c=True", Choice("x", {"b": False, "c": True})),
        ('x:m=a.b:C,k=["d:e"]', Choice("x", {"m": "a.b:C", "k": ["d:e"]})),
        ("a.b:C:m=a.b:D", Choice("a.b:C", {"m": "a.b:D"})),
        ("merge-linears:", Choice("merge-linears:", {})),
        ("merge-linears:=3", Choice("merge-linears:=3", {})),
    ],
)
def test_options_on_the_command_line(words: str, choice: Choice) -> None:
    from regraft.cli.recipe import _choice_of_words

    assert _choice_of_words(words) == choice
