"""The test kit must see what it is there to see: each test breaks a rule in one way."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import nn

import regraft as rg
from regraft.core.vocabulary import DIVIDE
from regraft.testing import assert_refused, assert_round_trip, fuzz, programs
from regraft.testing.fuzzing import Program, runs

ROOT = Path(__file__).parents[2]
X = torch.randn(3, 4)


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x) / 4


class TimesTheDivisor(rg.Rewrite):
    """Wrong: it multiplies by the divisor itself."""

    preserves_computation = True
    pattern = rg.Calls(DIVIDE)

    def rewrite(self, match, edit, facts):
        call = match.call
        rg.require(rg.that(isinstance(call["other"], float), f"{call.where} does not divide by a float"))

        edit.replace(call.node, operator.mul, call.input, call["other"])
        return "wrong"


class WritesTheModel(rg.Transformation):
    def transform(self, graph_module):
        with torch.no_grad():
            graph_module.get_submodule("linear").bias.add_(1)
        return graph_module


class DrawsNumbers(rg.Transformation):
    def transform(self, graph_module):
        torch.rand(1)
        return graph_module


class Grows(rg.Transformation):
    """Not idempotent: one more node each time."""

    def transform(self, graph_module):
        output = next(node for node in graph_module.graph.nodes if node.op == "output")
        output.args = (+output.args[0],)
        return graph_module


def test_a_rule_that_obeys_every_law() -> None:
    report = assert_round_trip(rg.ChangeTrueDivToMulByInverse(), Divided().eval(), (X,))
    assert report.applied == 1
    assert assert_round_trip(rg.FuseBiasInLinear(), Divided().eval(), kwargs={"x": X}).applied == 1


@pytest.mark.parametrize(
    ("transformation", "law"),
    [
        (WritesTheModel(), "a second application changed"),
        (DrawsNumbers(), "the random state of torch has moved"),
        (Grows(), "a second application changed"),
    ],
)
def test_the_law_that_does_not_hold_is_named(transformation: rg.Transformation, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        assert_round_trip(transformation, Divided().eval(), (X,))


def test_what_grows_may_say_so() -> None:
    assert_round_trip(Grows(), Divided().eval(), (X,), idempotent=False)


def test_a_wrong_result_is_seen() -> None:
    class Half(nn.Module):
        def forward(self, x):
            return x / 4.0

    with pytest.raises(AssertionError, match="does not compute what the model does"):
        assert_round_trip(TimesTheDivisor(), Half(), (X,))


def test_assert_refused() -> None:
    gm = rg.symbolic_trace(Divided().eval())
    assert assert_refused(TimesTheDivisor(), gm, match="does not divide by a float").refused == 1
    assert rg.history(gm) == ()
    with pytest.raises(AssertionError, match="no sentence matches 'another'"):
        assert_refused(TimesTheDivisor(), gm, match="another")
    with pytest.raises(AssertionError, match="did not refuse"):
        assert_refused(rg.ChangeTrueDivToMulByInverse(), gm, match="divisor")
    with pytest.raises(AssertionError, match="found no candidate"):
        assert_refused(rg.FoldBatchNorm(), gm, match="norm")


def test_the_fuzzer_shrinks_a_wrong_rule_to_a_model_that_runs() -> None:
    with pytest.raises(AssertionError) as caught:
        fuzz(TimesTheDivisor(), examples=400)
    message = str(caught.value)
    assert "does not compute what the model does" in message
    source = message[message.index("import torch") :]
    forward = source[source.index("def forward") : source.index("model =")]
    assert forward.count("\n        ") == 2, forward  # one division and the return
    path = [*sys.path, str(ROOT)]  # where pytest imports by path, the name of this module starts at the root
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=here, check=False)
    assert "does not compute what the model does" in done.stderr, done.stderr


def test_the_same_seed_gives_the_same_models() -> None:
    assert fuzz(rg.FuseBiasInLinear(), examples=10, seed=3) == fuzz(rg.FuseBiasInLinear(), examples=10, seed=3)


REACHED = [rg.MergeLinears, rg.FuseBiasInLinear, rg.FoldBatchNorm, rg.ChangeTrueDivToMulByInverse]


@pytest.mark.parametrize("rule", REACHED, ids=lambda rule: rule.__name__)
def test_the_models_reach_the_rules(rule) -> None:
    tally = fuzz(rule(), examples=40, seed=1)
    assert tally.applied, tally


def test_a_part_of_a_generated_graph_is_a_graph_module_of_its_own() -> None:
    layers = ("self.a = nn.Linear(4, 4)", "self.b = nn.Linear(4, 4)")
    body = ("u = x + 1", "v = self.a(u)", "w = self.b(u)")
    program = Program(layers, body, "v * w", (), ("numbers(2, 4)",), "float32", False, "nested", (1, 2))
    _, gm, args, _ = program.build()
    (inner,) = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm]
    assert [node.op for node in inner.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    report = assert_round_trip(rg.MergeLinears(), gm, args)
    assert [row[1:3] for row in report.rows()] == [("applied", "fused_0.a + b")]


def test_half_of_the_programs_that_nest_do_so() -> None:
    found = []

    @hypothesis.settings(max_examples=60, database=None, deadline=None)
    @hypothesis.given(programs(forms=("nested", "nested shapes")))
    def look(program: Program) -> None:
        built = runs(program)
        if built is not None:
            found.append(sum(isinstance(module, torch.fx.GraphModule) for module in built[1].modules()) > 1)

    look()
    assert sum(found) > len(found) / 4
