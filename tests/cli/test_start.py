"""The command line before it has anything to do: help, and what is wrong with the words."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from regraft.cli.parser import COMMANDS

SOURCE = Path(__file__).parents[2] / "src"
RUN = "import sys; from regraft.cli import main; sys.exit(main())"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_answers_at_once_without_torch(command: str) -> None:
    code = RUN.replace("sys.exit(main())", "main()")
    check = "import atexit; atexit.register(lambda: print('TORCH' if 'torch' in sys.modules else 'BARE'));"
    words = [sys.executable, "-c", f"import sys; {check} {code}", *filter(None, [command]), "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The time that it needs, and not the time that a busy machine makes it wait.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("BARE")
    for code in ("exit codes: 0 all", "1 a check", "2 the command", "3 a fault of regraft"):
        assert code in done.stdout
    assert seconds < 0.2


def test_a_reader_who_leaves_is_no_error() -> None:
    words = f"{sys.executable} -c '{RUN}' list | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["optimise"], "invalid choice"),
        (["explain"], "name a model"),
        (["explain", "zoo:nett"], "did you mean net?"),
        (["explain", "zooo:net"], "there is no module zooo"),
        (["explain", "nowhere"], "there is no folder or file nowhere"),
        (["explain", "nothing.pt2"], "there is no file nothing.pt2"),
        (["explain", "zoo:breaks"], "RuntimeError: no luck"),
        (["explain", "zoo:makes_text"], "made a str"),
        (["explain", "zoo:not_a_model"], "is of the type int"),
        (["explain", "zoo:needs"], "takes width"),
        (["explain", "zoo:instance"], "--inputs"),
        (["explain", "zoo:net", "--inputs", "missing.json"], "there is no file missing.json"),
        (["explain", "zoo:net", "--inputs", "missing"], "is not module:function"),
        (["explain", "zoo:net", "-t", "merge-linear"], "did you mean merge-linears?"),
        (["explain", "zoo:net", "-t", "merge-linears:factor=2"], "no option 'factor'"),
        (["explain", "zoo:net", "-t", "zoo:NegateLinear:onli=a"], "did you mean only?"),
        (["explain", "zoo:net", "-t", "zoo:NegateLinear"], "missing 1 required"),
        (["explain", "zoo:net", "-t", "zoo:Two"], "not a subclass"),
        (
            ["explain", "zoo:net", "-t", "merge-linears:"],
            "'' behind merge-linears is not OPTION=VALUE; merge-linears has",
        ),
        (["explain", "zoo:net", "-t", "merge_linears:=3"], "merge_linears has no options: -t merge_linears"),
        (["explain", "zoo:net", "-t", "ReplaceActivation:zz"], "'zz' behind ReplaceActivation is not OPTION=VALUE"),
        (
            ["explain", "zoo:net", "-t", "quantize:zz"],
            "the options of quantize are config, keep: -t quantize:config=int8",
        ),
        (["explain", "zoo:net", "-t", "zoo:NegateLinear:zz"], ": -t zoo:NegateLinear:only=VALUE"),
        (["explain", "zoo:net", "-t", "zooo:NegateLinear:zz"], "there is no module zooo"),
        (["explain", "zoo:net", "-t", "zoo:NegateLinearr"], "did you mean NegateLinear?"),
        (["explain", "zoo:net", "-t", "replace-activation:mapping=gelu"], "but takes a dictionary"),
        (
            ["explain", "zoo:net", "-t", "replace-activation:mapping=3"],
            ": -t replace-activation:mapping=package.module:",
        ),
        (["explain", "zoo:net", "-t", "replace-activation:mapping=zoo:no"], "zoo has no 'no'"),
        (["explain", "zoo:net", "-t", 'replace-activation:mapping={GELU = "ReLU"}'], "mapping has 'GELU', but takes"),
        (["explain", "zoo:net", "-t", "reduce-precision:dtype=bfloat17"], "dtype='bfloat17': use torch.bfloat16 or"),
        (["explain", "zoo:net", "--recipe", "missing.toml"], "cannot read the recipe"),
        (["explain", "zoo:net", "--device", "nowhere"], "cannot be converted"),
        (["optimize", "zoo:net", "-o", "missing/out.pt2"], "there is no folder missing"),
        (["optimize", "zoo:net", "-o", "out.onnx"], "--output is"),
        (["show", "deep-copi"], "did you mean deep-copy?"),
        (["bench", "zoo:net", "--seconds", "0"], "has to be positive"),
        (["bench", "zoo:slow", "--seconds", "nan"], "seconds=nan, but has to be positive and finite: --seconds 0.5"),
        (["optimize", "zoo:slow", "--seconds", "inf"], "seconds=inf, but has to be positive and finite"),
        (["verify", "zoo:slow", "--rtol", "nan"], "rtol=nan, but has to be zero or more and finite: --rtol 0.001"),
        (["bisect", "zoo:slow", "--atol", "-1"], "atol=-1.0, but has to be zero or more and finite: --atol 0.001"),
        (["bench", "zoo:slow", "--max-ratio", "nan"], "max_ratio=nan, but has to be zero or more and finite"),
        (["explain", "zoo:slow", "--seed", "99999999999999999999"], "takes whole numbers of 64 bits: --seed 0"),
        (["explain", "zoo:conv", "-t", "zoo:ReturnsNothing"], "end it with `return graph_module`"),
        (["optimize", "zoo:conv", "-t", "zoo:NoPattern"], "NoPattern has no pattern; say where"),
    ],
)
def test_wrong_words_get_one_line(regraft, words: list[str], said: str) -> None:
    done = regraft(*words)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    if words and words[0] in COMMANDS:
        assert len([line for line in done.err.splitlines() if line.startswith("regraft ")]) == 1


NET = '--inputs zoo:{} does not fit Sequential.forward(input): {}; let it give {{"input": ...}}: --inputs zoo:{}\n'


@pytest.mark.parametrize("command", ["explain", "optimize", "verify", "bisect", "bench", "diff", "verify zoo:net"])
@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ("misspelt", "missing a required argument: 'input'; did you mean input?"),
        ("one_more", "got an unexpected keyword argument 'more'"),
    ],
)
def test_inputs_that_do_not_fit_are_told_those_that_do(regraft, command: str, inputs: str, why: str) -> None:
    name, *candidate = command.split()
    done = regraft(name, "zoo:net", *candidate, "--inputs", f"zoo:{inputs}")
    assert (done.status, done.out) == (2, "")
    assert done.err == f"regraft {name}: {NET.format(inputs, why, inputs)}"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "many",
            "Many.forward(ids, mask=None, a=None, b=None, c=None, d=None, ...): missing a required argument: 'ids'",
        ),
        ("many", 'let it give {"ids": ...}: --inputs zoo:misspelt'),
        ("rows", 'let it give {"args": [...]}: --inputs zoo:misspelt'),
        ("instance", 'let it give {"first": ..., "second": ...}: --inputs zoo:misspelt'),
    ],
)
def test_the_inputs_that_fit_are_shown_in_the_forwards_own_names(regraft, model: str, said: str) -> None:
    assert said in regraft("explain", f"zoo:{model}", "--inputs", "zoo:misspelt").err


@pytest.mark.parametrize("command", ["explain", "optimize", "verify", "bisect", "bench", "diff", "verify zoo:net"])
def test_a_model_that_fails_on_its_inputs_is_not_a_fault_of_regraft(regraft, command: str) -> None:
    name, *candidate = command.split()
    done = regraft(name, "zoo:net", *candidate, "--inputs", "zoo:wide")
    assert (done.status, done.out) == (2, "")
    start = f"regraft {name}: the model itself fails on --inputs zoo:wide, which gives args[0] 2x5x7: RuntimeError: mat"
    assert done.err.startswith(start)
    assert done.err.endswith("give an example of a call that it runs: --inputs FILE\n")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_forward_without_a_signature_is_just_called(regraft) -> None:
    assert regraft("verify", "zoo:traced", "zoo:net", "--inputs", "zoo:x").status == 0
    assert "the model itself fails" in regraft("verify", "zoo:traced", "zoo:net", "--inputs", "zoo:wide").err


def test_a_candidate_that_does_not_take_the_inputs(regraft) -> None:
    done = regraft("bench", "zoo:net", "zoo:instance", "--inputs", "zoo:x")
    assert done.status == 2
    assert "the candidate fails on --inputs zoo:x: TypeError" in done.err
    done = regraft("diff", "zoo:net", "zoo:instance", "--inputs", "zoo:x")
    assert done.status == 2
    assert "--inputs zoo:x does not fit Two.forward(first, second): missing" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimize", "zoo:slow", "--report", "d.html"], "--report d.html/d.html"),
        (["optimize", "zoo:slow", "-o", "d.html"], "--output d.html/d.html"),
        (["bisect", "zoo:slow", "--script", "d.html"], "--script d.html/d.html"),
        (["optimize", "zoo:slow", "--plots", "a.file"], "a.file is a file; name a folder: --plots a.file-folder"),
        (["optimize", "zoo:slow", "--plots", "a.file/in/it"], "a.file is a file; name a folder: --plots a.file-folder"),
        (["optimize", "zoo:slow", "--report", "/proc/x.html"], "--report /proc/x.html cannot be written"),
        (["optimize", "zoo:slow", "-o", "/proc/x.pt2"], "--output /proc/x.pt2 cannot be written"),
        (["bisect", "zoo:slow", "--script", "/proc/version"], "--script /proc/version cannot be written"),
        (["optimize", "zoo:slow", "--plots", "/proc/plots"], "--plots /proc/plots cannot be written"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(regraft, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "d.html").mkdir()
    (tmp_path / "a.file").write_text("kept")
    done = regraft(*words)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1
    assert (tmp_path / "a.file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.file", "d.html"]


@pytest.mark.parametrize(("option", "needs"), [("--report", "jinja2"), ("--plots", "matplotlib")])
def test_a_missing_package_is_said_before_the_work(
    regraft, monkeypatch: pytest.MonkeyPatch, option: str, needs: str
) -> None:
    monkeypatch.setitem(sys.modules, needs, None)
    done = regraft("optimize", "zoo:slow", option, "out")
    assert done.status == 2
    assert done.err == f"regraft optimize: {option} needs the package {needs}: pip install 'regraft[report]'\n"


def test_files_that_are_broken_get_one_line(regraft, tmp_path: Path) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"nothing of the kind")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"model_type": "nothing"}')
    (tmp_path / "model.txt").write_text("")
    for model in ("broken.pt2", "empty", "half", "model.txt"):
        done = regraft("explain", model)
        assert (done.status, done.out) == (2, "")
        assert model.partition(".")[0] in done.err
        assert "Traceback" not in done.err
    done = regraft("explain", "zoo:net", "--inputs", "broken.json")
    assert done.status == 2
    assert "broken.json cannot be read" in done.err


@pytest.mark.parametrize(
    "words", [["zoo:breaks"], ["zoo:net", "--inputs", "zoo:wide"], ["zoo:conv", "-t", "zoo:NoPattern"]]
)
def test_traceback_shows_the_whole_error_and_is_the_same_exit_code(regraft, words: list[str]) -> None:
    done = regraft("explain", *words, "--traceback")
    assert done.status == 2
    assert done.err.startswith("Traceback")


def test_a_fault_of_regraft_is_not_a_failed_check(regraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regraft.cli.describing.environment", lambda: 1 / 0)
    done = regraft("env")
    assert done.status == 3
    assert "ZeroDivisionError" in done.err
