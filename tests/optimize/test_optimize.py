"""`optimize`: what it takes, what it gives back, what it keeps, and what it says."""

from __future__ import annotations

import copy
import io
import json
import math
import operator
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from models import every_engine, heads, ids, image
from torch import Tensor, nn
from transformers_models import bert

import regraft as rg
from regraft.dropin import grafts_of
from regraft.optimize import graphs, optimize, steps
from regraft.optimize import optimize as run
from regraft.optimize.engines import choosing
from regraft.optimize.presets import PRESETS, resolve
from regraft.optimize.progress import Progress
from regraft.verify import Comparison

QUICK = {"seconds": 0.01}
ALL = {"keep": "all", **QUICK}


def compared(ratio: float, low: float, high: float) -> Comparison:
    return Comparison(0.0, 0.0, ratio, low, high, (ratio,) * 10, 1)  # of a call that takes no time


def times(monkeypatch, *found: Comparison, call: float = 0.0) -> None:
    """Let the measurements come out like this, one after the other, a call take so long, and no engine be faster."""
    left = iter(found)
    monkeypatch.setattr(choosing, "compare_speed", lambda *programs, **clock: SAME)
    monkeypatch.setattr(steps, "_time_of", lambda run: call)
    for module in (steps, sys.modules["regraft.optimize.work"]):
        monkeypatch.setattr(module, "compare_speed", lambda *programs, **clock: next(left))


FASTER, SLOWER, SAME = compared(0.8, 0.7, 0.9), compared(1.2, 1.1, 1.3), compared(1.0, 0.9, 1.1)


def equal(left: object, right: object, tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in zip(left, right, strict=True))


def test_everything_in_one_call() -> None:
    model = heads()
    before = copy.deepcopy(model.state_dict())
    result = run(model, (image(),), transformations=[rg.FoldBatchNorm(), "MergeLinears"], **ALL)
    assert isinstance(result.model, type(model))
    assert result.model is not model
    assert result.verification.ok
    assert result.benchmark.pairs >= 8
    assert [(s.transformation, s.applied, s.kept) for s in result.steps] == [
        ("FoldBatchNorm()", 1, True),
        ("MergeLinears()", 1, True),
    ]
    with torch.no_grad():
        assert equal(result.model(image(5)), model(image(5)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_pays_is_kept_and_what_does_not_is_taken_back(monkeypatch) -> None:
    times(monkeypatch, FASTER, SLOWER, FASTER)
    result = run(heads(), (image(),), transformations=[rg.FoldBatchNorm(), rg.MergeLinears()])
    assert [step.kept for step in result.steps] == [True, False]
    assert "faster" in result.steps[0].reason
    assert "taken back, slower" in result.steps[1].reason
    assert [step.transformation for step in rg.history(result.graph_module)] == ["FoldBatchNorm"]
    assert grafts_of(result.model) is not None
    for given in (result, result.model):  # neither is the graph, which it names
        with pytest.raises(TypeError, match=r"the result's graph: regraft.history\(result.graph_module\)"):
            rg.history(given)


def test_a_composition_is_one_step_named_by_its_parts(monkeypatch) -> None:
    times(monkeypatch, FASTER, FASTER)
    both = rg.compose(rg.FoldBatchNorm(), rg.PrepackForCpu(), inplace=False)
    (step,) = run(heads(), (image(),), transformations=both).steps
    assert step.transformation == "compose(FoldBatchNorm(), PrepackForCpu(), inplace=False)"
    assert [record.transformation for record in step.records] == ["FoldBatchNorm", "PrepackForCpu"]


def test_a_rewritten_graph_that_raises_is_taken_back(monkeypatch) -> None:
    left = iter([FASTER, RuntimeError("sizes do not fit"), FASTER])

    def compare(*programs, **clock) -> Comparison:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    times(monkeypatch)
    for module in (steps, sys.modules["regraft.optimize.work"]):
        monkeypatch.setattr(module, "compare_speed", compare)
    result = run(heads(), (image(),), transformations=[rg.FoldBatchNorm(), rg.MergeLinears()])
    assert [step.kept for step in result.steps] == [True, False]
    assert result.steps[1].reason == "taken back, it raised RuntimeError: sizes do not fit"
    assert [step.transformation for step in rg.history(result.graph_module)] == ["FoldBatchNorm"]


def test_a_graph_that_does_not_run_is_no_capture(monkeypatch) -> None:
    def broken(*args, **kwargs):
        gm = rg.trace(*args, **kwargs)
        gm.forward = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("escaped"))
        return gm

    monkeypatch.setattr(sys.modules["regraft.optimize.subjects"], "trace", broken)
    with pytest.raises(rg.CaptureError, match="does not run: RuntimeError: escaped"):
        run(heads(), (image(),))


def test_images_are_of_the_size_that_the_config_names() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes)).eval()
    dropin = run(model, kwargs={"pixel_values": torch.randn(2, 3, 8, 8)}, transformations=[], **ALL).model
    with torch.no_grad():
        for batch in (1, 3):
            x = torch.randn(batch, 3, 8, 8)
            assert torch.allclose(dropin(x).last_hidden_state, model(x).last_hidden_state, atol=1e-5)
        assert grafts_of(dropin).calls["forward"] == 2
        x = torch.randn(2, 3, 12, 12)
        larger = [each(x, interpolate_pos_encoding=True).last_hidden_state for each in (dropin, model)]
        assert torch.equal(*larger)
    assert grafts_of(dropin).calls["forward"] == 2


PAIR = [rg.FoldBatchNorm(), rg.MergeLinears()]


def test_no_difference_does_not_pay(monkeypatch) -> None:
    times(monkeypatch, FASTER, SAME, SAME, FASTER)
    result = run(heads(), (image(),), transformations=PAIR)
    assert [step.kept for step in result.steps] == [True, False]
    assert result.steps[1].reason.startswith("taken back, in the whole, no difference shown")
    assert [step.transformation for step in rg.history(result.graph_module)] == ["FoldBatchNorm"]


def test_a_step_that_pays_only_with_a_later_one_stays(monkeypatch) -> None:
    times(monkeypatch, SAME, FASTER, FASTER, FASTER)
    result = run(heads(), (image(),), transformations=PAIR)
    assert [step.kept for step in result.steps] == [True, True]
    assert result.steps[0].reason.startswith("in the whole, faster")
    assert result.steps[0].comparison is FASTER


@pytest.mark.parametrize(
    ("together", "left"), [(FASTER, ["FoldBatchNorm", "MergeLinears", "PrepackForCpu"]), (SAME, ["PrepackForCpu"])]
)
def test_undecided_steps_are_judged_together(monkeypatch, together: Comparison, left: list[str]) -> None:
    times(monkeypatch, SAME, SAME, SAME, FASTER, together, FASTER)
    model, x = heads(), image()
    result = run(model, (x,), transformations=[*PAIR, rg.PrepackForCpu()])
    assert [step.transformation for step in rg.history(result.graph_module)] == left
    assert [step.kept for step in result.steps] == [together is FASTER, together is FASTER, True]
    assert "in the whole, with MergeLinears, " in result.steps[0].reason
    standing = tuple(record for step in result.steps if step.kept for record in step.records)
    assert standing == tuple(rg.history(result.graph_module))
    assert result.verification.ok
    result.undo()
    assert not rg.history(result.graph_module)
    with torch.no_grad():
        assert all(map(torch.equal, result.graph_module(x), model(x)))


@pytest.mark.parametrize("together", [SAME, SLOWER])
@pytest.mark.parametrize("knows", ["any graph", "the captured graph", "none"])
def test_an_engine_gets_what_makes_no_difference_without_it(monkeypatch, together: Comparison, knows: str) -> None:
    seen = []

    def build(flat):
        seen.append(flat.module)
        layers = sum(node.op == "call_module" for node in flat.module.graph.nodes)
        if knows == "none" or (knows == "the captured graph" and layers < 4):
            raise RuntimeError("no form for this")
        return lambda inputs: flat.module(*inputs)

    every_engine(monkeypatch, build)
    times(monkeypatch, SAME, SAME, together, FASTER)
    monkeypatch.setattr(choosing, "compare_speed", lambda *programs, **clock: FASTER)
    model, x = heads(), image()
    result = run(model, kwargs={"x": x}, transformations=PAIR, seconds=0.01)
    assert not rg.history(result.graph_module)
    assert [step.kept for step in result.steps] == [False, False]
    layers = [sum(node.op == "call_module" for node in module.graph.nodes) for module in seen]
    assert layers == ([4] if together is SLOWER else [2] if knows == "any graph" else [2, 4])
    with_them = together is SAME and knows == "any graph"
    assert ("with the steps that make no difference without it" in str(result)) is with_them
    assert (grafts_of(result.model).entries[0].engine is None) is (knows == "none")
    with torch.no_grad():
        assert equal(result.model(x=x), model(x=x))
        for weight in result.model.parameters():
            weight.mul_(1.5)
        assert equal(result.model(x=x), model(x=x)), "a weight that the engine has taken over was written to"


def packed_layers(gm: torch.fx.GraphModule) -> int:
    return sum(type(module).__name__.startswith("Packed") for module in gm.modules())


@pytest.mark.parametrize("packing", [FASTER, SAME, SLOWER])
def test_steps_are_measured_between_packed_layers_where_packing_pays(monkeypatch, packing: Comparison) -> None:
    compared_graphs, real = [], steps.Stepper._compared

    def spied(self, before, made, **limits):
        compared_graphs.append((packed_layers(before), packed_layers(made)))
        return real(self, before, made, **limits)

    monkeypatch.setattr(steps.Stepper, "_compared", spied)
    times(monkeypatch, packing, FASTER, SLOWER, *([] if packing is FASTER else [FASTER]), FASTER)
    model, x = heads(), image()
    result = run(model, (x,), transformations=[*PAIR, rg.PrepackForCpu()])
    assert [step.kept for step in result.steps] == [True, False, True]
    steps_compared = [(3, 3), (3, 2)] if packing is FASTER else [(0, 0), (0, 0)]
    assert compared_graphs == [(0, 3), *steps_compared, *([] if packing is FASTER else [(0, 3)])]
    assert result.steps[2].comparison is FASTER
    assert [step.transformation for step in rg.history(result.graph_module)] == ["FoldBatchNorm", "PrepackForCpu"]
    with torch.no_grad():
        assert equal(result.model(x), model(x))


def test_what_cannot_be_packed_is_measured_as_it_is(monkeypatch) -> None:
    times(monkeypatch, FASTER, FASTER, FASTER)
    monkeypatch.setattr(
        steps.Stepper, "_compared", lambda self, before, made: made.missing if packed_layers(made) else FASTER
    )
    result = run(heads(), (image(),), transformations=[*PAIR, rg.PrepackForCpu()])
    assert [step.kept for step in result.steps] == [True, True, False]
    assert result.steps[2].reason.startswith("taken back, it raised AttributeError")


def test_large_weights_are_not_packed_to_measure_other_steps(monkeypatch) -> None:
    times(monkeypatch, FASTER, SLOWER, FASTER, FASTER)
    monkeypatch.setattr(graphs, "LARGE", 0)
    result = run(heads(), (image(),), transformations=[*PAIR, rg.PrepackForCpu()])
    assert [step.kept for step in result.steps] == [True, False, True]


def test_what_does_not_run_without_an_undecided_step_keeps_it(monkeypatch) -> None:
    times(monkeypatch, SAME, FASTER, FASTER)
    monkeypatch.setattr(steps.Stepper, "_without", lambda self, indices: [][0])
    assert [step.kept for step in run(heads(), (image(),), transformations=PAIR).steps] == [True, True]


SLOW = 0.1  # seconds of a call: twelve pairs of them take longer than the half second that a step is measured


@pytest.mark.parametrize("together", [FASTER, SAME])
def test_steps_of_a_slow_model_are_measured_together(monkeypatch, together: Comparison) -> None:
    given = []
    every_engine(monkeypatch, lambda flat: given.append(flat.module) or (lambda inputs: flat.module(*inputs)))
    times(monkeypatch, together, FASTER, call=SLOW)
    model, x = heads(), image()
    result = run(model, kwargs={"x": x}, transformations=PAIR)
    assert [(step.kept, step.comparison, step.applied) for step in result.steps] == [
        (together is FASTER, together, 1)
    ] * 2
    assert result.steps[0].reason.endswith(f"in the whole, with MergeLinears, {together.reason}")
    assert result.steps[1].reason.endswith(f"in the whole, with FoldBatchNorm, {together.reason}")
    assert len(rg.history(result.graph_module)) == (2 if together is FASTER else 0)
    assert [len(rg.history(module)) for module in given[:1]] == [2], "an engine gets what makes no difference"
    with torch.no_grad():
        assert equal(result.model(x=x), model(x=x))


def test_a_step_that_stood_on_one_that_is_gone_is_gone_too(monkeypatch) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)) * 2.5

    times(monkeypatch, SAME, FASTER, SAME, FASTER)
    result = run(Normed().eval(), (image(),), transformations=[rg.FoldBatchNorm(), rg.FoldScale()], **QUICK)
    assert result.steps[0].reason.startswith("taken back, in the whole")
    assert [(step.applied, step.kept) for step in result.steps] == [(1, False), (0, False)]
    assert result.steps[1].reason == "nothing to do without FoldBatchNorm"
    assert not any(step.applied for step in rg.history(result.graph_module))


def test_what_is_undecided_in_a_slow_model_takes_six_pairs(monkeypatch) -> None:
    for call, pairs in ((SLOW, [{"max_pairs": 6}]), (0.0, [{}, {}, {}])):
        times(monkeypatch, *[SAME] * 3, FASTER, call=call)
        compare, limits = steps.compare_speed, []
        monkeypatch.setattr(
            steps,
            "compare_speed",
            lambda *programs, compare=compare, limits=limits, **given: (
                limits.append({name: given[name] for name in ("min_pairs", "max_pairs") if name in given})
                or compare(*programs, **given)
            ),
        )
        run(heads(), (image(),), transformations=[rg.FoldBatchNorm(), "MergeLinears"], **QUICK)
        assert limits == pairs


def test_the_whole_is_timed_in_few_pairs_as_an_engine_is(monkeypatch) -> None:
    given: list[int] = []
    times(monkeypatch, FASTER)
    monkeypatch.setattr(
        sys.modules["regraft.optimize.work"],
        "compare_speed",
        lambda *programs, min_pairs, **clock: given.append(min_pairs) or FASTER,
    )
    assert run(heads(), (image(),), transformations=[rg.FoldBatchNorm()]).graph_module is not None
    assert given == [4]


def test_steps_that_together_make_a_slow_model_slower_are_measured_alone(monkeypatch) -> None:
    times(monkeypatch, SLOWER, FASTER, SLOWER, FASTER, call=SLOW)
    model, x = heads(), image()
    result = run(model, (x,), transformations=PAIR)
    assert [step.kept for step in result.steps] == [True, False]
    assert [step.comparison for step in result.steps] == [FASTER, SLOWER]
    assert [step.transformation for step in rg.history(result.graph_module)] == ["FoldBatchNorm"]
    with torch.no_grad():
        assert equal(result.model(x), model(x))


@pytest.mark.parametrize(("again", "kept"), [(FASTER, [True, True]), (SAME, [False, False]), (None, [True, False])])
def test_few_pairs_that_say_slower_are_looked_at_again(monkeypatch, again: Comparison | None, kept: list[bool]) -> None:
    """Before each step of a slow model is measured alone, which takes far longer; two looks that agree tell."""
    few = replace(SLOWER, ratios=(1.2,) * 4)
    times(monkeypatch, few, *([again] if again else [few, FASTER, SLOWER]), FASTER, call=SLOW)
    result = run(heads(), (image(),), transformations=PAIR)
    assert [step.kept for step in result.steps] == kept
    assert [step.comparison for step in result.steps] == ([again] * 2 if again else [FASTER, SLOWER])


def test_one_step_that_makes_a_slow_model_slower_is_measured_once(monkeypatch) -> None:
    times(monkeypatch, SLOWER, FASTER, call=SLOW)
    result = run(heads(), (image(),), transformations=[rg.FoldBatchNorm()])
    assert [(step.kept, step.comparison) for step in result.steps] == [(False, SLOWER)]
    assert result.graph_module is not None
    assert not rg.history(result.graph_module)


def test_a_step_that_breaks_a_slow_model_is_found(monkeypatch) -> None:
    left = iter([RuntimeError("sizes do not fit"), FASTER, RuntimeError("sizes do not fit"), FASTER])

    def compare(*programs, **clock) -> Comparison:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    times(monkeypatch, call=SLOW)
    for module in (steps, sys.modules["regraft.optimize.work"]):
        monkeypatch.setattr(module, "compare_speed", compare)
    result = run(heads(), (image(),), transformations=PAIR)
    assert [step.kept for step in result.steps] == [True, False]
    assert result.steps[1].reason == "taken back, it raised RuntimeError: sizes do not fit"


@pytest.mark.parametrize(("call", "together"), [(0.020, False), (0.021, True)])
def test_a_model_is_slow_where_a_step_would_take_longer_than_was_asked(
    monkeypatch, call: float, together: bool
) -> None:
    """Twelve pairs of calls of 20 ms take 0.48 s."""
    times(monkeypatch, *([FASTER, FASTER] if together else [SLOWER, FASTER, FASTER]), call=call)
    result = run(heads(), (image(),), transformations=PAIR)
    assert [step.kept for step in result.steps] == [together, True]


@pytest.mark.parametrize("packing", [FASTER, SAME])
def test_what_costs_accuracy_or_memory_is_measured_alone_in_a_slow_model_too(monkeypatch, packing: Comparison) -> None:
    compared_graphs, real = [], steps.Stepper._compared

    def spied(self, before, made, **limits):
        compared_graphs.append([[step.transformation for step in rg.history(gm)] for gm in (before, made)])
        return real(self, before, made, **limits)

    monkeypatch.setattr(steps.Stepper, "_compared", spied)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GELU()).eval()
    times(monkeypatch, packing, SLOWER, *([] if packing is FASTER else [FASTER]), SAME, FASTER, call=SLOW)
    chosen = [rg.FoldBatchNorm(), rg.ReplaceActivation(), rg.PrepackForCpu()]
    result = run(model, (torch.randn(1, 3, 6, 6),), transformations=chosen)
    fold, other, pack = "FoldBatchNorm", "ReplaceActivation", "PrepackForCpu"
    packed = [pack] if packing is FASTER else []
    assert compared_graphs == [
        [[], [pack]],
        [[fold, *packed], [fold, other, *packed]],
        *([] if packing is FASTER else [[[fold], [fold, pack]]]),
        [[pack], [fold, pack]],
    ]
    assert [step.kept for step in result.steps] == [False, False, True]


@pytest.mark.parametrize("together", [FASTER, SAME, SLOWER])
def test_what_packs_is_measured_with_the_other_steps_of_a_slow_model(monkeypatch, together: Comparison) -> None:
    counts, pairs, real = [], [], steps.Stepper._compared

    def spied(self, before, made, **limits):
        pairs.append(limits)
        counts.append((packed_layers(before), packed_layers(made)))
        return real(self, before, made, **limits)

    monkeypatch.setattr(steps.Stepper, "_compared", spied)
    alone = [FASTER, FASTER, SLOWER] if together is SLOWER else []
    times(monkeypatch, together, *alone, FASTER, call=SLOW)
    model, x = heads(), image()
    result = run(model, (x,), transformations=[*PAIR, rg.PrepackForCpu()])
    assert counts == [(0, 2), *([(0, 3), (3, 3), (3, 2)] if alone else [])]
    assert pairs == [{"max_pairs": 12}, *[{}] * len(alone)]
    kept = {FASTER: [True] * 3, SAME: [False] * 3, SLOWER: [True, False, True]}
    assert [step.kept for step in result.steps] == kept[together]
    standing = tuple(record for step in result.steps if step.kept for record in step.records)
    assert standing == tuple(rg.history(result.graph_module))
    result.undo()
    with torch.no_grad():
        assert all(map(torch.equal, result.graph_module(x), model(x)))


def test_what_is_packed_already_is_not_packed_again(monkeypatch) -> None:
    compared_graphs, steppers, real = [], [], steps.Stepper._compared

    def spied(self, before, made, **limits):
        steppers.append(self)
        compared_graphs.append((before, made))
        return real(self, before, made, **limits)

    monkeypatch.setattr(steps.Stepper, "_compared", spied)
    times(monkeypatch, FASTER, SAME, SAME, FASTER, FASTER)
    run(heads(), (image(),), transformations=[*PAIR, rg.PrepackForCpu()])
    assert compared_graphs[0][1] is compared_graphs[-1][0]
    assert steppers[0]._packing is steppers[0]._packed is None, "nor kept for longer"


def test_where_weights_are_large_nothing_waits(monkeypatch) -> None:
    times(monkeypatch, SAME, FASTER, FASTER, call=SLOW)
    monkeypatch.setattr(graphs, "LARGE", 0)
    result = run(heads(), (image(),), transformations=PAIR)
    assert [step.kept for step in result.steps] == [False, True]
    assert result.steps[0].reason.startswith("taken back, no difference shown")


@pytest.mark.parametrize("final", [SLOWER, SAME, compared(0.99, 0.9, 1.1)])
def test_a_model_that_gets_no_faster_is_kept(monkeypatch, final: Comparison) -> None:
    model = heads()
    times(monkeypatch, SLOWER, SLOWER, final)
    result = run(model, (image(),), transformations=[rg.FoldBatchNorm(), rg.MergeLinears()])
    assert result.model is model
    assert "the original is kept" in str(result)
    assert not result.graphs[0].used


class Secretive(nn.Module):
    """Counts its calls where nobody looks."""

    calls: ClassVar[list[None]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        return self.layer(x) + (len(self.calls) > 30)


def test_a_model_that_answers_otherwise_in_the_end_is_kept(monkeypatch) -> None:
    work = sys.modules["regraft.optimize.work"]

    def much_later(*call: object, **how: object) -> rg.Verification:
        found = rg.verify(*call, **how)
        Secretive.calls.extend([None] * 30)
        return found

    monkeypatch.setattr(Secretive, "calls", [])
    monkeypatch.setattr(work, "compare_results", much_later)
    model = Secretive().eval()
    result = run(model, (torch.randn(3, 4),), **ALL)
    assert result.verification.ok
    assert "the original is kept: each call of it gives something else" in str(result)
    assert result.model is model


def test_slower_in_the_whole_is_not_kept_either(monkeypatch) -> None:
    model = heads()
    for final, kept in ((SLOWER, True), (SAME, True), (compared(0.99, 0.9, 1.1), False)):
        times(monkeypatch, FASTER, FASTER, final)
        result = run(model, (image(),), transformations=[rg.FoldBatchNorm(), rg.MergeLinears()])
        assert (result.model is model) == kept, "what was shown to pay runs unless the whole is likely no faster"


class Doubled(rg.Transformation):
    """Writes to a weight that is the caller's model's."""

    preserves_computation = True

    def transform(self, graph_module):
        with torch.no_grad():
            next(iter(graph_module.parameters())).mul_(2)
        return graph_module


@pytest.mark.parametrize("keep", ["all", "measured"])
def test_weights_of_the_model_are_not_written(keep: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for chosen in (Doubled(), rg.compose(Doubled(), rg.MergeLinears())):
        with pytest.raises(rg.RegraftError, match=r"writes to '0\.weight' in place, .* was taken back: let it put new"):
            rg.optimize(model, (x,), transformations=[chosen], keep=keep, seconds=0.01)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ChangeMulToAdd(rg.Transformation):
    """Wrong on purpose."""

    preserves_computation = True

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target in (operator.mul, torch.relu, torch.nn.functional.relu):
                node.target = torch.tanh
        return graph_module


def test_what_is_wrong_is_taken_back() -> None:
    model = heads()
    result = run(model, (image(),), transformations=[rg.FoldBatchNorm(), ChangeMulToAdd(), rg.MergeLinears()], **ALL)
    assert [step.kept for step in result.steps] == [True, False, False]
    assert re.match(r"taken back, on .* output\[\d\] is off: ", result.steps[1].reason)
    assert result.verification.ok
    with torch.no_grad():
        assert equal(result.model(image()), model(image()))


def test_unverified_it_is_the_callers_risk() -> None:
    result = run(heads(), (image(),), transformations=ChangeMulToAdd(), verify=False, **ALL)
    assert result.verification is None
    assert result.steps[0].kept


class Approximate(ChangeMulToAdd):
    preserves_computation = False

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_module" and node.target == "q":
                node.target = "q"
        return super().transform(graph_module)


def test_what_claims_no_exactness_is_held_to_a_loose_bound() -> None:
    result = run(heads(), (image(),), transformations=[Approximate()], **ALL)
    assert not result.steps[0].kept, "off by far too much even for that"


def test_a_graph_module_comes_back_as_one() -> None:
    model = heads()
    gm = rg.trace(model, (image(),), dynamic_shapes="auto")
    code = gm.code
    result = run(gm, (image(),), transformations="FoldBatchNorm", **ALL)
    assert isinstance(result.model, torch.fx.GraphModule)
    assert result.model is result.graph_module
    assert gm.code == code
    assert not rg.history(gm)
    with torch.no_grad():
        assert equal(result.model(image(4)), model(image(4)))


def test_an_exported_program_comes_back_as_one() -> None:
    model = heads()
    program = torch.export.export(model, (image(),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}})
    result = run(program, (image(),), transformations="FoldBatchNorm", **ALL)
    assert isinstance(result.model, torch.export.ExportedProgram)
    assert result.steps[0].applied == 1
    with torch.no_grad():
        assert equal(result.model.module()(image(4)), model(image(4)))
    assert isinstance(result.undo().model, torch.export.ExportedProgram)


def test_undo() -> None:
    model = heads()
    result = run(model, (image(),), transformations=[rg.FoldBatchNorm(), rg.MergeLinears()], **ALL)
    captured = rg.trace(model, (image(),), dynamic_shapes="auto").code
    assert result.graph_module.code != captured
    assert result.undo("FoldBatchNorm") is result
    assert [step.kept for step in result.steps] == [False, True]
    result.undo()
    assert result.graph_module.code == captured
    with torch.no_grad():
        assert all(map(torch.equal, result.model(image()), model(image())))
    assert grafts_of(result.model).calls["forward"] > 0
    with pytest.raises(ValueError, match="no step 'MergeLinears' stands"):
        result.undo("MergeLinears")


@pytest.mark.parametrize("kind", ["module", "pretrained"])
def test_saved_and_loaded(tmp_path, kind: str) -> None:
    model = heads() if kind == "module" else bert()
    inputs = (image(),) if kind == "module" else (ids(), torch.ones_like(ids()))
    other = (image(5),) if kind == "module" else (ids(5, 4), torch.ones_like(ids(5, 4)))
    result = run(model, inputs, transformations="exact", verify=False, **ALL)
    path = result.save(tmp_path / "model.pt2")
    program = torch.export.load(path)
    loaded = rg.load(path)
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*other))
        # A program takes what the example gave by position by position.
        for found in (program.module()(*other), loaded(*other)):
            assert equal(torch.utils._pytree.tree_leaves(found), expected)
    with pytest.raises(FileNotFoundError, match=r"result\.save"):
        rg.load(tmp_path / "nothing.pt2")


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"result": x + 1, "kind": "add"}


def test_a_string_that_the_model_returns_is_named_before_anything_is_written(tmp_path) -> None:
    model = Named()
    result = run(model, (image(),), verify=False, **ALL)
    with pytest.raises(rg.CaptureError, match=r"the string 'add', .*torch\.save\(result\.model"):
        result.save(tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()
    torch.save(result.model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)(image())
    assert again["kind"] == "add"
    assert torch.equal(again["result"], image() + 1)
    # Where this no longer raises, torch reads them, and `save` need not refuse them.
    torch.export.save(torch.export.export(model, (image(),)), tmp_path / "plain.pt2")
    with pytest.raises(RuntimeError):
        torch.export.load(tmp_path / "plain.pt2")


def test_how_it_is_shown() -> None:
    result = run(heads(), (image(),), transformations=[rg.FoldBatchNorm(), rg.FuseBiasInLinear()], **ALL)
    text = str(result)
    assert "FoldBatchNorm()" in text
    assert "verified on" in text
    assert all(len(line) < 300 for line in text.splitlines())
    assert result._repr_html_().count("<tr>") == 3
    plain = json.loads(result.to_json())
    assert plain["steps"][0]["sites"][0]["site"]
    assert plain["verification"]["ok"] is True
    assert plain["graphs"][0]["name"] == "forward"


def test_the_report_is_a_page(tmp_path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    result = run(heads(), (image(),), transformations=[rg.FoldBatchNorm(), rg.MergeLinears()], **ALL)
    page = result.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "FoldBatchNorm" in page


def test_a_transformers_model_needs_no_example() -> None:
    result = run(bert(), transformations="MergeLinears", **ALL)
    assert result.verification.ok
    assert result.steps[0].applied == 1


def test_a_model_in_which_a_part_is_compiled() -> None:
    compiled = torch.compile(nn.Linear(8, 4), backend="eager")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten(2), nn.AdaptiveAvgPool1d(8), compiled
    ).eval()
    result = run(model, (image(),), transformations="FoldBatchNorm", **ALL)
    assert result.steps[0].applied == 1
    x = torch.randn_like(image())
    with torch.no_grad():
        assert torch.allclose(result.model(x), model(x), atol=1e-5)
        assert grafts_of(result.model).stale is None
        compiled.weight.add_(1)
        assert torch.equal(result.model(x), model(x))


def test_one_layer_of_a_model_by_itself() -> None:
    model = heads()
    path, layer = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    result = run(layer, (image(),), transformations="PrepackForCpu", **ALL)
    assert result.verification.ok
    assert type(result.model) is not nn.Conv2d
    assert isinstance(result.model, nn.Conv2d)
    with torch.no_grad():
        expected = model(image(3))
        model.set_submodule(path, result.model)
        assert all(torch.allclose(new, old, atol=1e-5) for new, old in zip(model(image(3)), expected, strict=True))
    assert grafts_of(result.model).calls == {"forward": 1}


def test_training_mode_is_noted() -> None:
    model = heads().train()
    result = run(model, (image(),), transformations="FoldBatchNorm", **ALL)
    assert model.training
    assert not result.model.training
    assert "training mode" in str(result)
    with torch.no_grad():
        assert equal(result.model(image()), copy.deepcopy(model).eval()(image()))


def test_presets_name_what_there_is() -> None:
    for name in PRESETS:
        assert resolve(name), name
    assert [type(t).__name__ for t in resolve(["exact", rg.MergeLinears()])][-1] == "MergeLinears"
    assert resolve([]) == ()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_convolutions_are_merged_where_that_is_asked_for(preset: str) -> None:
    def names(wanted: object) -> list[str]:
        return [type(t).__name__ for t in resolve(wanted)]

    assert "MergeLinears" in names(preset)
    assert "MergeConvs" not in names(preset)
    assert names([preset, rg.MergeConvs()]) == [*names(preset), "MergeConvs"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: run(3), TypeError, "optimize takes a torch.nn.Module"),
        (lambda: run(heads(), image()), TypeError, r"args is a Tensor, but takes a tuple .*: regraft.optimize"),
        (lambda: run(heads(), {"x": image()}), TypeError, r"regraft.optimize\(model, kwargs=inputs\)"),
        (lambda: run(heads()), TypeError, r"regraft.optimize\(model, \(x, scale\)\)"),
        (lambda: run(heads(), (image(),), keep="some"), ValueError, "keep='some'"),
        (lambda: run(heads(), (image(),), engine="tvm"), ValueError, "engine='tvm', but takes one of 'torch'"),
        (
            lambda: run(heads(), (image(),), engine=["torch", "tvm"]),
            ValueError,
            "engine='tvm', but takes .*list of some",
        ),
        (
            lambda: run(heads(), (image(),), engine=["torch", "auto"]),
            ValueError,
            "'auto' is not one .*: engine='auto', or",
        ),
        (lambda: run(heads(), (image(),), engine=("eager", "onednn")), ValueError, "'eager' is not one of several"),
        (lambda: run(heads(), (image(),), engine=[]), ValueError, r"names none: .*engine=..torch., .openvino..\)"),
        (
            lambda: run(heads(), (image(),), engine=None),
            TypeError,
            r"engine=None, but takes a name, .*engine=.*openvino",
        ),
        (lambda: run(heads(), (image(),), engine=["torch", 3]), TypeError, "takes a name, or a list of names"),
        (lambda: run(torch.fx.symbolic_trace(nn.ReLU()), (image(),), engine="auto"), ValueError, "engine='auto' needs"),
        (lambda: run(heads(), (image(),), seconds=0), ValueError, "seconds=0"),
        (lambda: run(heads(), (image(),), seconds=math.nan), ValueError, r"seconds=nan, .*seconds=0\.5"),
        (lambda: run(heads(), (image(),), seconds=math.inf), ValueError, "seconds=inf"),
        (lambda: run(heads(), (image(),), seconds="a"), TypeError, r"'a', .*optimize\(model, args, seconds=0.5\)"),
        (lambda: run(heads(), (image(),), seconds=None), TypeError, "seconds=None"),
        (lambda: rg.load(3), TypeError, r"path is a int, .*regraft.load\(.model.pt2.\)"),
        (lambda: run(heads(), (image(),), transformations="quick"), ValueError, "no preset .exact"),
        (lambda: run(heads(), (image(),), transformations=rg.MergeLinears), TypeError, r"MergeLinears\(\)"),
        (lambda: run(heads(), (image(),), transformations=[3]), TypeError, "transformations is a int"),
    ],
)
def test_a_wrong_argument_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_bar_is_for_terminals_and_for_what_takes_long(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def written(stream: io.StringIO, delay: float) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(3, delay=delay) as progress:
            progress.next("one")
            time.sleep(0.3)
        return stream.getvalue()

    assert "one" in written(Terminal(), 0.0)
    assert written(Terminal(), 10.0) == ""
    assert written(io.StringIO(), 0.0) == ""


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=print)])
def test_nothing_is_shown_where_there_is_no_terminal_to_ask(monkeypatch, stream: object) -> None:
    monkeypatch.setattr(sys, "stderr", stream)  # as in a service, or where a program logs what is printed
    with Progress(1, delay=0.0) as progress:
        progress.next("one")
    assert progress.done == 0


def test_what_cannot_be_copied_is_said() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    with pytest.raises(TypeError, match=r"cannot be copied \(no copies\).*regraft.optimize\(regraft.trace"):
        optimize(Stubborn(2, 2).eval(), (torch.ones(1, 2),))


@pytest.mark.parametrize(("transformation", "factor"), [(rg.PrepackForCpu(), 4.0), (rg.FoldBatchNorm(), None)])
def test_other_kernels_may_round_more(monkeypatch, transformation: rg.Transformation, factor: float | None) -> None:
    given = []
    work = sys.modules["regraft.optimize.work"]
    monkeypatch.setattr(work, "compare_results", lambda *a, **k: given.append(k.get("factor")) or rg.verify(*a, **k))
    run(heads(), (image(),), transformations=[transformation], engine="eager", **ALL)
    assert given == [factor]


class Unpacking(nn.Module):
    """Takes numbers of eight bits, and has a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 8)
        self.register_buffer("table", (torch.eye(6) * torch.randn(6)).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(torch.sparse.mm(self.table, x.float()))))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits_and_sparse_buffers(dtype: torch.dtype) -> None:
    model = Unpacking().eval()
    result = optimize(model, (torch.randn(6, 16).to(dtype),), keep="all", seconds=0.01)
    assert result.verification is not None
    assert len(result.verification.cases) > 1
    x = torch.randn(6, 16).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x))
        assert grafts_of(result.model).calls["forward"] == 1
        model.table.mul_(2)  # which the drop-in reads as well
        torch.testing.assert_close(result.model(x), model(x))
