"""Two bugs, the same ones each time, planted and caught; `make mutants` plants all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
TESTS = ("tests/mutation/test_survivors.py", "tests/transformations/test_fuse_bias_in_linear.py")


def mutants(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *options], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_of_bugs_is_caught() -> None:
    done = mutants("--only", "fuse_bias_in_linear", "--sample", "2", "--tests", *TESTS)
    assert "2 of 2 mutants caught" in done.stdout, done.stdout + done.stderr


def test_there_is_a_mutant_for_each_condition_question_and_formula() -> None:
    listed = mutants("--list").stdout
    for what in (
        "merge_linears.py",
        "without require(facts.alone(call))",
        "alone() answers None",
        "plain_module() answers None",
        "_batch_norm.py",
        "(bias - mean) * scale: Div",
        "torch.rsqrt(given['var'].to(dtype) + self.eps): sqrt",
    ):
        assert what in listed, what
    assert len(set(listed.splitlines())) > 300
