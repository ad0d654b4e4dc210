"""What the commands do to a model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from zoo import Two, net

from regraft.transformations import TRANSFORMATIONS

NEGATE = "zoo:NegateLinear:only=1.query"
X = ("--inputs", "zoo:x")


def test_list_names_every_transformation(regraft) -> None:
    listed = regraft("list", "--json").json
    assert [one["class"].rpartition(".")[2] for one in listed] == [cls.__name__ for cls in TRANSFORMATIONS]
    assert all(one["summary"] for one in listed)
    assert "merge-linears" in regraft("list").out


@pytest.mark.parametrize("name", ["merge-linears", "MergeLinears", "merge_linears"])
def test_show_takes_every_spelling(regraft, name: str) -> None:
    assert "[x W_1^T + b_1" in regraft("show", name).out
    assert regraft("show", name, "--json").json["name"] == "merge-linears"


def test_show_tells_the_options_of_a_class_of_ones_own(regraft) -> None:
    assert regraft("show", "zoo:NegateLinear", "--json").json["options"] == {"only": None}


def test_show_tells_no_docstring_but_the_classs_own(regraft) -> None:
    done = regraft("show", "zoo:Undocumented", "--json")
    assert (done.json["docstring"], done.json["summary"]) == (None, "")
    out = regraft("show", "zoo:Undocumented").out
    assert "no docstring" in out
    assert "Replace activations" not in out
    assert regraft("show", "zoo:NegateLinear", "--json").json["docstring"].startswith("Put a negation in the place")


def test_env_tells_the_versions(regraft) -> None:
    found = regraft("env", "--json").json["torch"]
    assert found == metadata.version("torch")  # a build for CUDA from PyPI leaves that out of it
    assert torch.__version__.startswith(found)
    assert found in regraft("env").out


def test_explain_tells_what_would_be_done(regraft) -> None:
    report = regraft("explain", "zoo:net", *X, "-t", "merge-linears", "--json").json
    assert report["applied"] == 2
    assert report["sites"][0]["sentence"] == "merged query + key + value"
    done = regraft("explain", "zoo:net", *X, "-t", NEGATE)
    assert done.status == 0
    assert "0.query does not end with" not in done.out
    assert "0 does not end with 1.query" in done.out


def test_verify_succeeds_with_0_and_fails_with_1(regraft) -> None:
    assert regraft("verify", "zoo:net", *X, "-t", "merge-linears").status == 0
    done = regraft("verify", "zoo:net", *X, "-t", NEGATE)
    assert done.status == 1
    assert "WRONG" in done.out
    result = regraft("verify", "zoo:net", *X, "-t", NEGATE, "--json")
    assert (result.status, result.json["ok"]) == (1, False)
    assert regraft("verify", "zoo:net", *X, "-t", NEGATE, "--atol", "1000").status == 0


def test_verify_compares_two_models(regraft) -> None:
    assert regraft("verify", "zoo:net", "zoo:net", *X).status == 0  # the same seed
    torch.export.save(torch.export.export(net(), (torch.randn(2, 5, 4),)), "other.pt2")
    assert regraft("verify", "zoo:net", "other.pt2", *X).status == 1


def test_bisect_names_the_culprit(regraft) -> None:
    assert regraft("bisect", "zoo:net", *X, "-t", "merge-linears").status == 0
    words = ("bisect", "zoo:net", *X, "-t", "change-true-div-to-mul-by-inverse", "-t", NEGATE)
    done = regraft(*words, "--script", "culprit.py")
    assert done.status == 1
    assert "NegateLinear at 1.query" in done.out
    assert Path("culprit.py").exists()
    assert regraft(*words, "--json").json["site"] == "1.query"


def test_bench_gives_a_ratio(regraft) -> None:
    words = ("bench", "zoo:net", *X, "-t", "merge-linears", "--seconds", "0.01", "--json")
    done = regraft(*words, "--max-ratio", "1000")
    assert done.status == 0
    assert done.json["low"] <= done.json["ratio"] <= done.json["high"]
    assert regraft(*words, "--max-ratio", "0.0001").status == 1
    assert regraft(*words, "--max-ratio", "nan").status == 2  # no ratio is at most that


def test_diff_shows_the_nodes(regraft) -> None:
    done = regraft("diff", "zoo:conv", "-t", "fold-batch-norm")
    assert done.status == 0
    assert "-_1 = call_module 1(_0)" in done.out
    found = regraft("diff", "zoo:conv", "-t", "fold-batch-norm", "--json").json
    assert found["nodes_after"] == found["nodes_before"] - 1
    assert regraft("diff", "zoo:conv", "zoo:conv", "--json").json["diff"] == []


@pytest.mark.parametrize("command", ["optimize", "explain", "verify", "bisect", "bench", "diff"])
def test_a_dry_run_does_nothing(regraft, command: str, tmp_path: Path) -> None:
    done = regraft(command, "zoo:net", *X, "--dry-run", "--json")
    assert done.status == 0
    assert done.json["dry_run"]
    assert done.json["example"] == {"args[0]": "float32 [2, 5, 4]"}
    assert "dry run" in regraft(command, "zoo:net", *X, "--dry-run").out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors", "in.npz", "in.json"])
def test_inputs_are_read_from_a_file(regraft, name: str) -> None:
    tensors = {"first": torch.randn(2, 4), "second": torch.randn(2, 4)}
    if name.endswith(".pt"):
        torch.save(tensors, name)
    elif name.endswith(".safetensors"):
        save_file(tensors, name)
    elif name.endswith(".npz"):
        numpy.savez(name, **{key: value.numpy() for key, value in tensors.items()})
    else:
        Path(name).write_text(json.dumps({key: value.tolist() for key, value in tensors.items()}))
    plan = regraft("verify", "zoo:instance", "--inputs", name, "--dry-run", "--json").json
    assert plan["example"] == {"first": "float32 [2, 4]", "second": "float32 [2, 4]"}


def test_inputs_are_made_from_the_model(regraft) -> None:
    assert regraft("explain", "zoo:conv", "--dry-run", "--json").json["example"] == {
        "args[0]": "float32 [2, 3, 64, 64]"
    }
    plan = regraft("explain", "zoo:with_example", "--dtype", "float64", "--dry-run", "--json").json
    assert plan["example"] == {"args[0]": "float64 [3, 4]", "args[1]": "float64 [3, 4]"}


def test_a_program_brings_its_inputs(regraft) -> None:
    batch = torch.export.Dim("batch")
    example = (torch.randn(3, 4), torch.randn(3, 4))
    torch.export.save(torch.export.export(Two().eval(), example, dynamic_shapes=({0: batch}, {0: batch})), "two.pt2")
    assert regraft("explain", "two.pt2", "--dry-run", "--json").json["example"]["args[1]"] == "float32 [3, 4]"
    assert regraft("verify", "two.pt2").status == 0
    assert "--dtype" in regraft("verify", "two.pt2", "--dtype", "float64").err


def test_a_config_alone_gives_random_weights_and_the_same_each_time(regraft, tmp_path: Path) -> None:
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertConfig(vocab_size=50, architectures=["BertForMaskedLM"], **sizes).save_pretrained(tmp_path / "bert")
    done = regraft("explain", "bert", "-t", "merge-linears", "--json")
    assert done.json["applied"] == 1
    assert "random" in done.err
    assert regraft("verify", "bert", "bert").status == 0


def test_the_whole_program_says_no_word_too_much(tmp_path: Path) -> None:
    """With `--json`, standard output is one JSON value, whatever libraries print."""
    here, source = Path(__file__).parent, Path(__file__).parents[2] / "src"
    words = ["verify", "zoo:net", "--inputs", "zoo:x", "--json"]
    code = (
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(source)!r}]; from regraft.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert json.loads(done.stdout)["ok"]


def test_a_program_of_a_transformers_model_is_read_by_itself(regraft) -> None:
    pytest.importorskip("transformers")
    Path("bert").mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    Path("bert/config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 40, **sizes}))
    done = regraft("optimize", "./bert", "-o", "bert.pt2", "--seconds", "0.01", "--keep", "all", "-t", "merge-linears")
    assert done.status == 0
    # in a process that has not seen transformers, whose classes the program returns
    command = [sys.executable, "-m", "regraft.cli", "explain", "bert.pt2", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)


def test_a_file_that_is_no_program_is_one_clear_line(regraft) -> None:
    Path("garbage.pt2").write_text("garbage")
    done = regraft("explain", "garbage.pt2")
    assert done.status == 2
    assert done.err.startswith("regraft explain: garbage.pt2 cannot be loaded as a program of torch.export: ")
    assert len(done.err.strip().splitlines()) == 1
