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
    assert "exit codes" in done.stdout
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
        (["explain", "zoo:net", "--recipe", "missing.toml"], "cannot read the recipe"),
        (["explain", "zoo:net", "--device", "nowhere"], "cannot be converted"),
        (["optimize", "zoo:net", "-o", "missing/out.pt2"], "there is no folder missing"),
        (["optimize", "zoo:net", "-o", "out.onnx"], "--output is"),
        (["show", "deep-copi"], "did you mean deep-copy?"),
        (["bench", "zoo:net", "--seconds", "0"], "has to be positive"),
        (["bench", "zoo:slow", "--seconds", "nan"], "seconds is nan, but has to be positive and finite: --seconds 0.5"),
        (["optimize", "zoo:slow", "--seconds", "inf"], "seconds is inf, but has to be positive and finite"),
        (["explain", "zoo:slow", "--seed", "99999999999999999999"], "takes whole numbers of 64 bits: --seed 0"),
        (["explain", "zoo:conv", "-t", "zoo:ReturnsNothing"], "end it with `return graph_module`"),
        (["optimize", "zoo:conv", "-t", "zoo:NoPattern"], "NoPattern has no pattern; say in the class"),
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


def test_traceback_shows_the_whole_error(regraft) -> None:
    from regraft.cli.failure import Failure

    with pytest.raises(Failure):
        regraft("explain", "zoo:breaks", "--traceback")


def test_a_fault_of_regraft_is_not_a_failed_check(regraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regraft.cli.describing.environment", lambda: 1 / 0)
    done = regraft("env")
    assert done.status == 3
    assert "ZeroDivisionError" in done.err
