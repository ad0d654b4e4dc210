"""A drop-in is called as the original is, runs its graph where that holds, and is never wrong."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Heads, heads, ids, image
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers_models import bert

import regraft as rg
from regraft.capture import symbolic_trace
from regraft.core.graph_module import adopt
from regraft.dropin import Entry, Grafts, Reader, grafts_of, watch
from regraft.dropin.model import dropin_class
from regraft.dropin.watch import Watch
from regraft.optimize import Optimized, optimize

EXACT = [rg.FoldBatchNorm(), rg.MergeLinears()]


def close(left: object, right: object, tolerance: float = 1e-4) -> bool:
    pairs = zip(torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right), strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in pairs)


def calls(model: nn.Module) -> int:
    grafts = grafts_of(model)
    return sum(grafts.calls.values()) if grafts else 0


def optimized() -> tuple[nn.Module, Optimized]:
    model = heads()
    return model, optimize(model, (image(),), transformations=EXACT, keep="all", seconds=0.01, verify=False)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """What other tests compiled of the same class counts towards dynamo's limit of recompilations."""
    torch.compiler.reset()


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    model, result = optimized()
    assert all(step.kept for step in result.steps)
    return model, result.model


@pytest.fixture(scope="module")
def berts() -> tuple[nn.Module, nn.Module]:
    model = bert()
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    result = optimize(model, kwargs=inputs, transformations="MergeLinears", keep="all", seconds=0.01, verify=False)
    return model, result.model


def check(model: nn.Module, dropin: nn.Module, graph: bool, *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
    """The same result, and by the graph or not."""
    before = calls(dropin)
    with torch.no_grad():
        assert close(dropin(*args, **kwargs), model(*args, **kwargs))
    assert (calls(dropin) > before) == graph


def test_any_batch_and_size_by_position_and_by_name(pair) -> None:
    model, dropin = pair
    check(model, dropin, True, image())
    check(model, dropin, True, image(5))
    check(model, dropin, True, x=image(1))
    check(model, dropin, True, image(3), None)
    check(model, dropin, True, torch.randn(2, 3, 9, 4))


def test_the_class_and_the_signature_are_the_originals(pair) -> None:
    import inspect

    model, dropin = pair
    assert isinstance(dropin, type(model))
    assert type(dropin).__name__ == type(model).__name__
    assert inspect.signature(dropin.forward) == inspect.signature(model.forward)
    assert list(dropin.state_dict()) == list(model.state_dict())
    assert type(model).__dict__.get("_regraft") is None


def test_weights_are_shared_and_the_originals_untouched(pair) -> None:
    model, dropin = pair
    mine = dict(dropin.named_parameters())
    assert all(mine[name].data_ptr() == p.data_ptr() and mine[name] is not p for name, p in model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    dropin.half().requires_grad_(False)
    dropin.q = nn.Linear(8, 8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype is torch.float32 and p.requires_grad for p in model.parameters())


def test_a_call_that_was_not_captured_runs_the_original_and_says_so_once(pair, caplog) -> None:
    model, dropin = pair
    with caplog.at_level(logging.INFO, "regraft"):
        check(model, dropin, False, image(), torch.tensor(2.0))
        check(model, dropin, False, image(), torch.tensor(3.0))
    assert len([r for r in caplog.records if "the original's own forward runs" in r.message]) == 1


def test_a_wrong_call_gets_the_originals_own_error(pair) -> None:
    model, dropin = pair
    for args in ((), (image()[:, :2],), (image(), None, 3)):
        with pytest.raises(Exception) as expected:
            model(*args)
        with pytest.raises(type(expected.value)) as raised:
            dropin(*args)
        assert str(raised.value) == str(expected.value)


def test_training_mode_runs_the_original(pair) -> None:
    model, dropin = pair
    dropin.train()
    check(copy.deepcopy(model).train(), dropin, False, image())
    dropin.eval()


def test_a_part_in_training_mode_runs_the_original(pair) -> None:
    _, dropin = pair
    dropin.norm.train()
    twin = copy.deepcopy(dropin)
    dropin(image())
    assert calls(dropin) == 0
    assert twin.norm.training


def test_gradients_are_the_originals(pair, caplog) -> None:
    model, dropin = pair
    for each in (model, dropin):
        sum(part.sum() for part in each(image())).backward()
    assert all(close(a.grad, b.grad) for a, b in zip(model.parameters(), dropin.parameters(), strict=True))
    assert calls(dropin) == 0
    assert "no_grad" in caplog.text


def test_gradients_of_the_input_alone(pair) -> None:
    model, dropin = pair
    inputs = [image().requires_grad_() for _ in range(2)]
    for each, x in zip((model.requires_grad_(False), dropin.requires_grad_(False)), inputs, strict=True):
        each(x)[0].sum().backward()
    assert close(inputs[0].grad, inputs[1].grad)
    before = calls(dropin)
    dropin(image())
    assert calls(dropin) == before + 1


class Adjusted(Heads):
    """With numbers and tensors that are no parameters."""

    sharpness = 1
    gain = 0.5

    def __init__(self, other: Heads) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(other.__dict__)
        self.gain, self.offset = 2.5, torch.tensor([0.5])
        self.register_buffer("shift", torch.tensor([0.25]))
        self.bounds = (torch.tensor([-1.0]), 1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().forward(x)
        offset = self.offset * 2 + self.shift * 3  # which is folded
        return q * self.gain + offset + self.shift, k * self.sharpness + self.bounds[0] * 3 + self.bounds[1]


def stepped(
    optimizer: type[torch.optim.Optimizer], compiled: bool = False, **options: Any
) -> Callable[[nn.Module], object]:
    """A training of the weight of `k`; torch does not count what a fused step writes."""

    def train(model: nn.Module) -> None:
        weight = model.k.weight
        weight.grad = torch.ones_like(weight)
        steps = optimizer([weight], lr=0.5, **options)
        step = torch.compile(steps.step, backend="eager") if compiled else steps.step
        step()
        weight.grad = None
        step()

    return train


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a weight written to": lambda m: m.q.weight.mul_(2),
    "a step": stepped(torch.optim.SGD),
    "a compiled step": stepped(torch.optim.SGD, compiled=True),
    "a fused step": stepped(torch.optim.SGD, fused=True),
    "a fused step of another kind": stepped(torch.optim.AdamW, fused=True),
    "a weight replaced": lambda m: setattr(m.k, "weight", nn.Parameter(torch.ones(4, 8))),
    "a weight's memory replaced": lambda m: setattr(m.k.weight, "data", torch.ones(4, 8)),
    "a buffer's memory taken for another type": lambda m: setattr(m.shift, "data", m.shift.data.view(torch.int32)),
    "a layer replaced": lambda m: setattr(m, "q", nn.Tanh()),
    "a buffer written to that a constant was folded of": lambda m: m.shift.add_(1),
    "statistics written to": lambda m: m.norm.running_mean.fill_(0.5),
    "loaded": lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}),
    "a hook": lambda m: m.q.register_forward_hook(lambda module, args, result: result + 1),
    "a number set": lambda m: setattr(m.norm, "eps", 0.5),
    "a number of a layer that its class has": lambda m: setattr(m, "sharpness", 2),
    "a tensor set": lambda m: setattr(m, "offset", m.offset + 1),
    "a tensor of a tuple set": lambda m: setattr(m, "bounds", (m.bounds[0] - 2, 1.0)),
    "a tensor written to": lambda m: m.offset.add_(1),
    "an attribute deleted": lambda m: delattr(m, "gain"),
    "a forward of its own": lambda m: setattr(m.q, "forward", lambda x: x * 3),
}


@pytest.fixture(params=["numbered", "not numbered"])
def tables(request, monkeypatch) -> None:
    """With torch's numbers of what was done to a dictionary, and as if there were none."""
    if request.param == "not numbered":
        monkeypatch.setattr(watch, "dict_version", lambda table: object())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_computes_what_it_now_is(change, tables) -> None:
    model = Adjusted(heads()).eval()
    result = optimize(model, (image(),), transformations=[*EXACT, rg.RemoveDeadWork()], keep="all", seconds=0.01)
    model = copy.deepcopy(model)
    check(model, result.model, True, image())
    with torch.no_grad():
        before = model(image())
        change(model)
        change(result.model)
        assert not close(before, model(image()))
    check(model, result.model, False, image())


@pytest.mark.parametrize("both", [True, False])
def test_an_attribute_may_change_where_no_graph_asks_for_it(both: bool) -> None:
    own, model = frozenset({("", "gain"), ("", "offset")}), Adjusted(heads())
    others = own if both else frozenset({("", "offset")})
    entries = [Entry(name, adopt(symbolic_trace(model)), {}, each) for name, each in (("a", own), ("b", others))]
    grafts = Grafts(Reader(model), entries)
    grafts.watch(model)
    model.offset = torch.tensor([7.0])
    assert grafts.check(model) is None
    model.gain = 3.5
    assert (grafts.check(model) is None) == both
    model.bounds = (1.0, 2.0)
    assert grafts.check(model) == "an attribute of it was set"


def test_what_is_learnt_is_seen_again_and_again(pair) -> None:
    model, dropin = pair
    watching = grafts_of(dropin).watch(dropin)
    assert watching.untouched
    stepped(torch.optim.SGD, fused=True)(dropin)
    stepped(torch.optim.SGD, fused=True)(model)
    assert not watching.untouched
    assert not watching.untouched
    check(model, dropin, False, image())


def test_the_steps_of_others_and_of_no_gradient_leave_the_graph(pair) -> None:
    model, dropin = pair
    check(model, dropin, True, image())
    stepped(torch.optim.SGD, fused=True)(heads())
    torch.optim.SGD(dropin.parameters(), fused=True).step()
    check(model, dropin, True, image())


def test_attributes_that_are_what_they_were_leave_the_graph(pair, tables) -> None:
    model, dropin = pair
    dropin.norm.eps = float(str(dropin.norm.eps))  # another object
    dropin.conv.stride = tuple(map(int, dropin.conv.stride))
    dropin.remark = "seen"
    check(model, dropin, True, image())


def test_modules_that_nobody_has_written_to_are_not_looked_at_again(pair, monkeypatch) -> None:
    model, dropin = pair
    check(model, dropin, True, image())
    monkeypatch.setattr(Watch, "_written", lambda self, versions: pytest.fail("it looked"))
    check(model, dropin, True, image())


def test_a_hook_that_comes_or_goes_is_noticed_whatever_happened_to_hooks_elsewhere() -> None:
    model = heads().eval()
    model.q.register_forward_hook(lambda module, args, result: None)
    result = optimize(model, (image(),), transformations="MergeLinears", keep="all", seconds=0.01)
    dropin = result.model
    check(model, dropin, True, image())
    torch.nn.Linear(2, 2).register_forward_hook(lambda module, args, result: None)  # of another model
    check(model, dropin, True, image())
    with torch.no_grad():
        handle = dropin.k.register_forward_hook(lambda module, args, result: result + 1)
        before, changed = calls(dropin), dropin(image())
        assert not close(changed, model(image()))
        assert close(dropin(image()), changed)
        torch.nn.Linear(2, 2).register_forward_pre_hook(lambda module, args: None)
        assert close(dropin(image()), changed)
    assert calls(dropin) == before
    handle.remove()
    check(model, dropin, True, image())
    dropin.q._forward_hooks.clear()
    check(model, dropin, False, image())


def test_hooks_of_all_modules_are_called_by_the_original() -> None:
    model = heads()
    dropin = optimize(model, (image(),), transformations=EXACT, keep="all", seconds=0.01).model
    check(model, dropin, True, image())
    called = []
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        with register(lambda module, *_: called.append(type(module).__name__)):
            check(model, dropin, False, image())
        assert called.count("BatchNorm2d") == 2, "of the model, and of the drop-in"
        called.clear()
        check(model, dropin, True, image())
    twice = (model.conv, dropin.conv)
    with register_module_forward_hook(lambda module, args, result: result * 2 if module in twice else None):
        check(model, dropin, False, image())
    check(model, dropin, True, image())


@pytest.mark.parametrize("engine", ["eager", "onednn"])
def test_a_mode_sees_the_functions_that_the_original_calls(engine: str) -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch.Tensor.relu else result

    model = heads()
    dropin = optimize(model, (image(),), transformations="exact", keep="all", seconds=0.01, engine=engine).model
    with torch.device("cpu"):
        check(model, dropin, True, image())
        with Doubled():
            check(model, dropin, False, image())
        check(model, dropin, True, image())


def frozen() -> tuple[nn.Module, nn.Module]:
    model = heads().eval()
    return model, optimize(model, (image(),), transformations=EXACT, keep="all", seconds=0.01, frozen=True).model


def test_a_frozen_drop_in_looks_at_nothing(monkeypatch) -> None:
    model, dropin = frozen()
    monkeypatch.setattr(Watch, "change", lambda self: pytest.fail("it looked"))
    check(model, dropin, True, image())
    check(model, copy.copy(dropin), True, image())


def test_a_frozen_drop_in_asks_little(berts) -> None:
    """What a call costs in Python counts beside a small network, most of all when that has emptied the caches."""
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    settings = {"keep": "all", "seconds": 0.01, "verify": False, "frozen": True}
    result = optimize(berts[0], kwargs=inputs, transformations="MergeLinears", engine="onednn", **settings)
    assert result.graphs[0].engine.engine == "onednn"
    asked = []

    def count(frame, event, argument) -> None:
        if event == "call":
            asked.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")

    with torch.no_grad():
        result.model(**inputs)
        sys.setprofile(count)
        try:
            result.model(**inputs)
        finally:
            sys.setprofile(None)
    assert len(asked) < 50, asked


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict({name: value * 1.5 for name, value in m.state_dict().items()}),
        lambda m: m.train(),
    ],
    ids=["loaded", "training"],
)
def test_a_frozen_drop_in_notices_what_is_done_to_the_whole_of_it(change) -> None:
    model, dropin = frozen()
    model = copy.deepcopy(model)
    with torch.no_grad():
        change(model)
        change(dropin)
        assert close(dropin(image()), model(image()), 1e-5)
    assert not grafts_of(dropin).calls["forward"]


def test_a_frozen_drop_in_that_is_converted_is_captured_again_and_stays_frozen(monkeypatch) -> None:
    model, dropin = frozen()
    model, dropin = copy.deepcopy(model).double(), dropin.double()
    check(model, dropin, True, image().double())
    monkeypatch.setattr(Watch, "change", lambda self: pytest.fail("it looked"))
    check(model, dropin, True, image().double())


def test_weights_of_which_nobody_counts_the_writes_are_optimized_where_they_are_promised_to_stay() -> None:
    with torch.inference_mode():
        model = heads().requires_grad_(False)
    settings = {"transformations": EXACT, "keep": "all", "seconds": 0.01}
    with pytest.raises(ValueError, match=r"conv\.weight was made in inference mode, .*deepcopy\(model\).*frozen=True"):
        optimize(model, (image(),), **settings)
    check(model, optimize(copy.deepcopy(model), (image(),), **settings).model, True, image())
    check(model, optimize(model, (image(),), frozen=True, **settings).model, True, image())


def test_converted_in_inference_mode_the_original_runs() -> None:
    model, result = optimized()
    model.requires_grad_(False)
    dropin = result.model.requires_grad_(False)
    with torch.inference_mode():
        dropin.double()
    assert any(weight.is_inference() for weight in dropin.parameters())
    check(copy.deepcopy(model).double(), dropin, False, image().double())
    assert "conv.weight was made in inference mode" in grafts_of(dropin).stale


def test_a_hook_on_the_whole_runs_with_the_graph(pair) -> None:
    _, dropin = pair
    seen = []
    dropin.register_forward_hook(lambda module, args, result: seen.append(result))
    with torch.no_grad():
        dropin(image())
    assert len(seen) == calls(dropin) == 1


class Doubling(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


def doubled_by_a_hook(*sizes: int) -> nn.Module:
    model = nn.Linear(*sizes)
    model.register_forward_hook(lambda module, args, result: result * 2)
    return model


@pytest.mark.parametrize("make", [Doubling, doubled_by_a_hook])
def test_what_a_call_does_around_the_forward_is_not_done_twice(make: Callable[..., nn.Module]) -> None:
    model, x = make(16, 8).eval(), torch.randn(3, 16)
    result = optimize(model, (x,), keep="all", seconds=0.01)
    assert "register hooks on the drop-in" in result.graphs[0].verdict
    with torch.no_grad():
        assert torch.equal(result.model(x), model(x))


def test_functional_call_uses_the_weights_it_is_given(pair) -> None:
    model, dropin = pair
    weights = {name: value * 2 for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, weights, (image(),))
        assert close(torch.func.functional_call(dropin, weights, (image(),)), expected)
    check(model, dropin, False, image())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_a_dtype_captures_the_graph_again(dtype: torch.dtype, caplog) -> None:
    model, result = optimized()
    model, dropin = copy.deepcopy(model).to(dtype), result.model.to(dtype)
    assert {p.dtype for p in dropin.parameters()} == {dtype}
    with torch.no_grad():
        expected = model(image().to(dtype))
        for _ in range(2):
            assert close(dropin(image().to(dtype)), expected, 1e-1)
    assert calls(dropin) == 2
    assert len([r for r in caplog.records if "captures and verifies its graphs again" in r.message]) == 1
    dtypes = {p.dtype for p in grafts_of(dropin).entries[0].gm.parameters()}
    assert dtypes == {dtype}
    twin = copy.deepcopy(dropin)
    with torch.no_grad():
        assert close(twin(image().to(dtype)), expected, 1e-1)
    assert calls(twin) == 1
    result.undo()
    assert "q_k" not in grafts_of(dropin).entries[0].gm.code


def test_a_graph_captured_again_has_the_types_of_the_new_one() -> None:
    class Upcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.float32)  # nothing in float32, and what keeps half precision exact
            norm = x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
            return self.a(norm) + self.b(norm)

    model = Upcast().eval()
    x = torch.full((2, 8), 300.0)
    dropin = optimize(model, (x,), transformations="MergeLinears", keep="all", seconds=0.01).model.half()
    with torch.no_grad():
        found = dropin(x.half())
        assert torch.isfinite(found).all(), "300 squared is infinite in float16"
        assert close(found, copy.deepcopy(model).half()(x.half()), 1e-2)
    assert calls(dropin) == 1


def test_converted_there_and_back_it_has_the_rounded_weights() -> None:
    model, result = optimized()
    model, dropin = copy.deepcopy(model).half().float(), result.model.half().float()
    check(model, dropin, True, image())


def test_converted_in_a_form_that_cannot_be_captured_it_runs_the_original_and_says_so(caplog) -> None:
    _, result = optimized()
    dropin = result.model.half()
    grafts_of(dropin)._again = lambda model: (_ for _ in ()).throw(RuntimeError("no kernel for this type"))
    with torch.no_grad():
        dropin(image().half())
        dropin(image().half())
    assert calls(dropin) == 0
    said = [r.message for r in caplog.records if "the original's own forward runs" in r.message]
    assert len(said) == 1
    assert "no kernel for this type" in said[0]


def test_a_converted_model_that_is_traced_is_still_right() -> None:
    model, result = optimized()
    compiled = torch.compile(result.model.double(), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert close(compiled(image().double()), copy.deepcopy(model).double()(image().double()))


def test_to_the_same_device_keeps_the_graph(pair) -> None:
    model, dropin = pair
    check(model, dropin.to("cpu").float().eval(), True, image())


def test_to_another_device() -> None:
    _, result = optimized()
    dropin = result.model.to("meta")
    assert dropin(image().to("meta"))[0].is_meta
    assert calls(dropin) == 0, "nothing can be verified there"


def test_to_another_device_with_every_weight_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    dropin = optimize(model, (torch.randn(2, 4),), transformations=[], keep="all", seconds=0.01).model
    dropin.to("meta")
    assert dropin(torch.randn(2, 4, device="meta")).is_meta
    assert grafts_of(dropin).stale is not None


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_run_their_graphs_and_are_their_own(pair, way: str) -> None:
    model, dropin = pair
    if way == "torch.save":
        buffer = io.BytesIO()
        torch.save(dropin, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = copy.deepcopy(dropin) if way == "deepcopy" else pickle.loads(pickle.dumps(dropin))
    check(model, other, True, image())
    with torch.no_grad():
        other.q.weight.zero_()
    check(model, dropin, True, image())
    with torch.no_grad():
        assert close(other(image())[0], other.q.bias.expand(2, 36, 8))


def test_traced_by_torchscript(caplog) -> None:
    model, result = optimized()
    assert any(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        traced = torch.jit.trace(result.model, (image(),))
        graph = torch.jit.trace(result.graph_module, (image(),))
    assert "give it result.graph_module" in caplog.text
    for batch in (1, 5):
        assert close(traced(image(batch)), model(image(batch)))
        assert close(graph(image(batch)), model(image(batch)))
    check(model, result.model, True, image())


class Flat(nn.Module):
    """Says itself what its state is, and is made anew from that, as the layers of einops are."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(self.axis)

    def __getstate__(self) -> dict[str, int]:
        return {"axis": self.axis}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)


@pytest.mark.parametrize("way", ["as it is", "deepcopy", "pickle"])
def test_a_layer_that_leaves_its_mode_out_of_its_state(way: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Flat(1)).eval()
    assert copy.deepcopy(model)[2].training  # torch's own copy trains
    dropin = optimize(model, (image(),), transformations=EXACT, keep="all", seconds=0.01).model
    if way != "as it is":
        dropin = copy.deepcopy(dropin) if way == "deepcopy" else pickle.loads(pickle.dumps(dropin))
    assert not any(module.training for module in (*model.modules(), *dropin.modules()))
    check(model, dropin, True, image())
    dropin[2].train()
    assert copy.deepcopy(dropin)[2].training
    check(model, dropin, False, image())


def test_a_copy_of_a_changed_model_knows_it(pair) -> None:
    _, dropin = pair
    with torch.no_grad():
        dropin(image())
        dropin.q.weight.zero_()
        assert close(copy.deepcopy(dropin)(image())[0], dropin.q.bias.expand(2, 36, 8))


def test_in_threads(pair) -> None:
    model, dropin = pair
    wrong = []

    def work(batch: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                if not close(dropin(image(batch)), model(image(batch))):
                    wrong.append(batch)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert grafts_of(dropin).stale is None


class Ramp(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.linspace(0, 1, self.out_features)


@pytest.mark.parametrize("way", ["called", "frozen", "compiled"])
def test_another_default_type(way: str) -> None:
    model, x = Ramp(4, 6).eval(), torch.randn(3, 4)
    dropin = optimize(model, (x,), keep="all", seconds=0.01, frozen=way == "frozen").model
    called = torch.compile(dropin, backend="eager") if way == "compiled" else dropin
    with torch.no_grad():
        torch.testing.assert_close(called(x), model(x))
        torch.set_default_dtype(torch.float64)
        try:
            assert called(x).dtype is torch.float64
            torch.testing.assert_close(called(x), model(x))
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(called(x), model(x))
    assert calls(dropin) == (0 if way == "compiled" else 2)


def sent(dropin: nn.Module) -> nn.Module:
    """What another process gets, whose weights it has in common with this one."""
    return pickle.loads(ForkingPickler.dumps(dropin))


@pytest.mark.parametrize("engine", ["eager", "onednn", "openvino"])
def test_frozen_and_sent_to_another_process_both_run_their_graphs(engine: str) -> None:
    model = heads().eval()
    dropin = optimize(model, (image(),), keep="all", seconds=0.01, engine=engine, frozen=True).model
    check(model, dropin, True, image())
    other = sent(dropin)
    assert all(weight.is_shared() for weight in dropin.parameters())
    for _ in range(2):
        check(model, dropin, True, image())
        check(model, other, True, image())
    assert grafts_of(dropin).check(dropin) is None
    with torch.no_grad():
        next(iter(dropin.parameters())).mul_(2)
    assert grafts_of(dropin).check(dropin) == "weights of it were written to"


def test_sent_to_another_process_that_may_write_to_its_weights() -> None:
    model = heads().eval()
    dropin = optimize(model, (image(),), keep="all", seconds=0.01, engine="eager").model
    other = sent(dropin)
    for each in (dropin, other):
        check(model, each, False, image())
        assert "memory of several processes, as frozen=True allows" in grafts_of(each).stale
    with torch.no_grad():
        next(iter(dropin.parameters())).mul_(2)
    check(dropin, other, False, image())


def test_weights_whose_memory_was_freed_are_noticed() -> None:
    dropin = optimize(heads(), (image(),), transformations=EXACT, keep="all", seconds=0.01, frozen=True).model
    weight = next(iter(dropin.parameters()))
    weight.untyped_storage().resize_(0)
    assert grafts_of(dropin).check(dropin) == "weights of it were given other memory"


@pytest.mark.parametrize("name", ["conv.weight", "norm.running_mean"])
@pytest.mark.parametrize("joined", [False, True])
def test_weights_that_lie_where_others_were_freed_are_noticed(name: str, joined: bool) -> None:
    model = heads()
    weight = model.state_dict(keep_vars=True)[name]
    memory = bytearray(weight.nbytes)

    def laid(values: torch.Tensor) -> torch.Tensor:
        """Values in that memory, which is nobody's else, so it is given to whoever asks for as much."""
        return torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values)

    others = weight.detach() * 3
    weight.data = laid(weight.detach().clone())
    address, version = weight.data_ptr(), weight._version
    watching = Watch(heads()).and_also([Watch(model)]) if joined else Watch(model)
    assert watching.change() is None
    weight.data = torch.empty(0)
    weight.data = laid(others)
    assert (weight.data_ptr(), weight._version) == (address, version)
    assert watching.change() == "weights of it were given other memory"


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_were_exchanged_for_others_in_shared_memory_are_noticed(frozen: bool) -> None:
    dropin = optimize(heads(), (image(),), transformations=EXACT, keep="all", seconds=0.01, frozen=frozen).model
    for weight in dropin.parameters():
        weight.data = (weight.data * 2).share_memory_()
    assert grafts_of(dropin).check(dropin) == "weights of it were given other memory"


@pytest.mark.parametrize("sizes", [(2, 4), (1, 3)], ids=str)
def test_compiled_in_one_graph(pair, sizes) -> None:
    model, dropin = pair
    ops = []

    def backend(gm, inputs):
        ops.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    compiled = torch.compile(dropin, fullgraph=True, backend=backend)
    with torch.no_grad():
        for batch in sizes:
            assert close(compiled(image(batch)), model(image(batch)))
    assert ops
    assert not any("batch_norm" in op for op in ops), "the rewritten graph is what was compiled"


def test_a_compiler_is_given_the_graph_and_not_its_engine() -> None:
    model = heads()
    result = optimize(model, (image(),), transformations=EXACT, keep="all", seconds=0.01, engine="onednn")
    assert result.graphs[0].engine.engine == "onednn"
    ops = []

    def backend(gm, inputs):
        ops.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    with torch.no_grad():
        assert close(torch.compile(result.model, fullgraph=True, backend=backend)(image()), model(image()))
    assert any("conv2d" in op for op in ops)
    assert not any("batch_norm" in op for op in ops)


class Parity(nn.Module):
    """Computes something else for an odd batch, and with another constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, k: int = 1) -> torch.Tensor:
        y = self.a(x) + self.b(x)
        return (y * 2 if x.shape[0] % 2 == 0 else y) * k


def test_a_compiler_keeps_the_dropins_of_two_classes_apart() -> None:
    first, second = (dropin_class(cls).forward.__code__ for cls in (nn.Linear, nn.ReLU))
    assert first is not second


def test_compiled_it_never_runs_a_graph_for_other_sizes_or_constants() -> None:
    model = Parity().eval()
    x = torch.randn(4, 4)
    result = optimize(model, (x,), {"k": 3}, transformations="MergeLinears", keep="all", seconds=0.01)
    compiled = torch.compile(result.model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for batch, k in [(4, 3), (4, 2), (3, 3), (6, 3), (5, 2)]:
            x = torch.randn(batch, 4)
            assert close(compiled(x, k), model(x, k)), (batch, k)


def test_a_graph_that_is_compiled_or_exported_refuses_other_sizes() -> None:
    gm = rg.trace(Parity().eval(), (torch.randn(4, 4),), dynamic_shapes="auto")
    compiled = torch.compile(gm, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert close(compiled(x := torch.randn(6, 4)), gm(x))
        with pytest.raises(Exception, match=r"NotCovered|Observed exception"):
            compiled(torch.randn(5, 4))
    with pytest.raises(TypeError, match="does not hold"):
        torch.export.export(gm, (torch.randn(5, 4),))


def test_compiled_with_gradients(pair) -> None:
    model, dropin = pair
    compiled = torch.compile(dropin, fullgraph=True, backend="eager")
    for each in (model, compiled):
        sum(part.sum() for part in each(image())).backward()
    assert all(close(a.grad, b.grad) for a, b in zip(model.parameters(), dropin.parameters(), strict=True))


def test_exported_for_one_image(pair) -> None:
    model, dropin = pair
    program = torch.export.export(dropin, (image(1),))
    with torch.no_grad():
        assert close(program.module()(image(1)), model(image(1)))
    assert not any("batch_norm" in str(node.target) for node in program.graph.nodes)


def test_exported(pair) -> None:
    model, dropin = pair
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(dropin, (image(),), dynamic_shapes={"x": {0: batch}})
    with torch.no_grad():
        assert close(program.module()(image(5)), model(image(5)))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any("batch_norm" in name for name in names)
    assert sum("linear" in name for name in names) == 1


def test_exported_to_onnx(pair) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, dropin = pair
    program = torch.onnx.export(dropin, (image(),), dynamo=True, verbose=False)
    buffer = io.BytesIO()
    program.save(buffer)
    session = runtime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: image().numpy()})
    with torch.no_grad():
        assert close([torch.from_numpy(part) for part in found], list(model(image())))


def test_quantized_by_torchao(pair) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, dropin = pair
    quantized = copy.deepcopy(model)
    for each in (quantized, dropin):
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    assert type(dropin.q.weight) is type(quantized.q.weight) is not nn.Parameter
    with torch.no_grad():
        assert close(dropin(image()), quantized(image()))
        assert not close(dropin(image()), model(image()), 1e-7)


def test_optimizing_what_torchao_has_quantized() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = heads()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    result = optimize(model, (image(),), transformations=EXACT, keep="all", seconds=0.01)
    with torch.no_grad():
        assert close(result.model(image()), model(image()))


def test_a_pretrained_model_is_still_one(berts, tmp_path) -> None:
    from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, PreTrainedModel

    model, dropin = berts
    assert isinstance(dropin, BertForSequenceClassification)
    assert isinstance(dropin, PreTrainedModel)
    assert dropin.config.to_dict() == model.config.to_dict()
    assert (dropin.device, dropin.dtype) == (model.device, model.dtype)
    assert list(dropin.state_dict()) == list(model.state_dict())
    dropin.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert type(loaded) is BertForSequenceClassification


def test_a_pretrained_model_by_every_way_of_calling_it(berts) -> None:
    model, dropin = berts
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[0, 3:] = 0
    check(model, dropin, True, input_ids=ids(3, 5), attention_mask=mask)
    check(model, dropin, True, ids(1, 9), torch.ones(1, 9, dtype=torch.long))
    check(model, dropin, True, input_ids=ids(3, 5), attention_mask=mask, output_attentions=False)
    check(model, dropin, True, input_ids=ids(3, 5), attention_mask=mask, return_dict=True)
    check(model, dropin, False, input_ids=ids(3, 5))
    check(model, dropin, False, input_ids=ids(3, 5), attention_mask=mask, output_hidden_states=True)
    check(model, dropin, False, input_ids=ids(3, 5), attention_mask=mask, return_dict=False)
    check(model, dropin, False, input_ids=ids(3, 5), attention_mask=mask[:, None, None].float())
    check(model, dropin, False, input_ids=ids(3, 5).int(), attention_mask=mask)
    check(model, dropin, False, input_ids=ids(3, 5), attention_mask=mask, labels=torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("nested", [False, True])
def test_a_config_is_asked_at_each_call(berts, nested) -> None:
    model, dropin = copy.deepcopy(berts[0]), copy.deepcopy(berts[1])
    config = dropin.config
    config.sizes = {"first": [1, 2]} if nested else 3
    grafts_of(dropin)._watch = None  # it was so when it was optimized
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    check(model, dropin, True, **inputs)
    check(model, dropin, True, **inputs)
    config.architectures = ["written by whoever saves it"]
    check(model, dropin, True, **inputs)
    if nested:
        config.sizes["first"][1] = 3
    else:
        config.sizes = 4
    check(model, dropin, False, **inputs)
    check(model, dropin, False, **inputs)
    config.sizes = {"first": [1, 2]} if nested else 3
    check(model, dropin, True, **inputs)
    config.further = 1
    check(model, dropin, False, **inputs)


def test_a_changed_config_runs_the_original(berts) -> None:
    model, dropin = copy.deepcopy(berts[0]), copy.deepcopy(berts[1])
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    check(model, dropin, True, **inputs)
    for each in (model, dropin):
        each.config.output_hidden_states = True
    with torch.no_grad():
        assert dropin(**inputs).hidden_states is not None
    check(model, dropin, False, **inputs)


def test_what_transformers_hangs_on_layers_to_collect_their_results_leaves_the_graph() -> None:
    model = bert()
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    settings = {"transformations": "MergeLinears", "keep": "all", "seconds": 0.01, "verify": False}
    dropin = optimize(model, kwargs=inputs, **settings).model
    hooks = [len(layer._forward_hooks) for layer in dropin.modules()]
    for asked in ("output_hidden_states", "output_attentions"):
        check(model, dropin, False, **inputs, **{asked: True})
        check(model, dropin, True, **inputs)
    assert [len(layer._forward_hooks) for layer in dropin.modules()] != hooks
    handle = dropin.bert.pooler.register_forward_hook(lambda module, args, result: result + 1)
    with torch.no_grad():
        assert not close(dropin(**inputs).logits, model(**inputs).logits)
    handle.remove()
    check(model, dropin, True, **inputs)
    again = optimize(dropin, kwargs=inputs, **settings)
    check(model, again.model, True, **inputs)


@pytest.mark.parametrize(("frozen", "compiled"), [(False, False), (True, False), (False, True)])
def test_a_part_of_a_model_that_collects_runs_its_own_layers(frozen: bool, compiled: bool) -> None:
    model, changed = bert(), bert()
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    inputs["attention_mask"][0, -2:] = 0  # transformers leaves a mask that hides nothing out, but where it is compiled
    given = []
    handle = changed.bert.encoder.register_forward_pre_hook(lambda _, *call: given.append(call), with_kwargs=True)
    with torch.no_grad():
        changed(**inputs)
    handle.remove()
    settings = {"transformations": "MergeLinears", "keep": "all", "seconds": 0.01, "frozen": frozen}
    changed.bert.encoder = optimize(changed.bert.encoder, *given[0], **settings).model
    part = changed.bert.encoder
    assert grafts_of(part) is not None
    with torch.no_grad():
        changed(**inputs)
        assert calls(part) == 1
        if compiled:
            changed.forward = torch.compile(changed.forward, backend="eager")
        for _ in range(2):
            for each in (model, changed):
                each.config.output_hidden_states = True  # of which the part's own config knows nothing
            found, expected = (each(**inputs) for each in (changed, model))
            assert len(found.hidden_states) == len(expected.hidden_states) == 2
            assert close(found.hidden_states, expected.hidden_states)
            assert calls(part) == 1
        changed.config.output_hidden_states = False
        assert close(changed(**inputs).logits, model(**inputs).logits)
        assert calls(part) == (1 if compiled else 2)  # a compiler counts none


def test_in_a_pipeline(berts) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model, dropin = berts
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)} | {"[UNK]": 3}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    results = []
    for each in (model, dropin):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        run = transformers.pipeline("text-classification", model=each, tokenizer=tokenizer, device="cpu")
        results.append(run(["w5 w6 w7", "w9"], batch_size=2))
    assert [r["label"] for r in results[0]] == [r["label"] for r in results[1]]
    assert all(abs(a["score"] - b["score"]) < 1e-5 for a, b in zip(*results, strict=True))
    assert calls(dropin) > 0
