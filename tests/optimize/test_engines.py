"""An engine runs a rewritten graph where it is right; everything else about the model stays as it is."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
import transformers
from models import every_engine, heads, ids, image
from torch.autograd import forward_ad
from transformers_models import decoder

import regraft as rg
from regraft.core.errors import NotCovered
from regraft.dropin import Entry, grafts_of
from regraft.optimize import graphs, steps, work
from regraft.optimize.engines import ENGINES, choosing, inductor, wanted
from regraft.optimize.engines.flat import Engine, Flat
from regraft.optimize.graphs import Graph
from regraft.verify import Comparison
from regraft.verify.oracle import Oracle

EXACT = {"transformations": [rg.FoldBatchNorm(), rg.MergeLinears()], "seconds": 0.01}


def available(name: str) -> None:
    if wanted.missing_packages(name):
        pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(
    "name", ["onednn", "onnxruntime", "openvino", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_an_engine_runs_the_model(name: str, recwarn: pytest.WarningsRecorder) -> None:
    available(name)
    model = heads()
    result = rg.optimize(model, kwargs={"x": image()}, engine=name, keep="all", verify=False, **EXACT)
    assert result.graphs[0].engine.engine == name, result
    entry = grafts_of(result.model).entries[0]
    assert entry.engine.own_threads is (name in ("onnxruntime", "openvino"))
    for batch in (1, 5):
        with torch.no_grad():
            found, expected = result.model(image(batch)), model(image(batch))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
    assert grafts_of(result.model).calls["forward"] >= 2
    other = copy.deepcopy(result.model)
    assert grafts_of(other).entries[0].engine is None
    result.undo()
    assert entry.engine is None
    assert not any(issubclass(warning.category, FutureWarning) for warning in recwarn)


class Spectrum(torch.nn.Module):
    """Calls what no engine knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x @ x.mT) / 2


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_one_that_fails_leaves_the_users_log_as_it_was(name: str) -> None:
    available(name)
    root = logging.getLogger()
    before = root.level, root.handlers[:], root.filters[:]
    result = rg.optimize(Spectrum(), (torch.rand(4, 4),), engine=name, keep="all", **EXACT)
    assert result.graphs[0].engine.tried[name].startswith("cannot run it"), result
    assert (root.level, root.handlers, root.filters) == before


class Whole(torch.nn.Module):
    """Computes with whole numbers, and divides them in each way."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ways = [x % 7, x // 3, x // y, *(torch.div(x, by, rounding_mode="floor") for by in (3, y))]
        return *ways, torch.div(x, y, rounding_mode="trunc"), x.float() // 3, x // 2.5


def test_whole_numbers_are_to_openvino_what_they_are_to_torch() -> None:
    available("openvino")
    model, x, y = Whole().eval(), torch.arange(8).repeat(4, 1), torch.full((4, 8), 3)
    result = rg.optimize(model, (x, y), engine="openvino", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "openvino", result
    for numbers in (x - 5, 5 - x, x << 20, x + 3000, (x - 5) << 20):
        for by in (y, -y, y + 4):
            torch.testing.assert_close(result.model(numbers, by), model(numbers, by), rtol=0, atol=0)


def test_openvino_is_given_no_numbers_of_more_than_24_bits() -> None:
    available("openvino")
    model, x, y = Whole().eval(), torch.arange(8).repeat(4, 1), torch.full((4, 8), 3)
    result = rg.optimize(model, (x, y), engine="openvino", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "openvino", result
    for bits in (23, 24, 25, 30, 31, 32, 50):
        for number in (1 << bits, -1 << bits):
            numbers = x.clone()
            numbers[2, 3] = number
            torch.testing.assert_close(result.model(numbers, y)[0], model(numbers, y)[0], rtol=0, atol=0)


class Begun(torch.nn.Linear):
    """Joins what it computes with nothing, as the first call does that fills a cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor([]), super().forward(x), x], dim=-2)


def test_openvino_runs_what_is_joined_with_nothing() -> None:
    available("openvino")
    model, x = Begun(4, 4).eval(), torch.rand(2, 3, 4)
    result = rg.optimize(model, (x,), engine="openvino", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "openvino", result
    with torch.no_grad():
        assert torch.allclose(result.model(x + 1), model(x + 1), atol=1e-5)


class Halved(torch.nn.Module):
    """Takes an even number of rows, and a factor."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return (x * 2 if x.shape[0] % 2 == 0 else x) * factor + y


@pytest.mark.parametrize("constants", [{}, {"factor": 2.0}], ids=str)
def test_an_engine_is_given_the_sizes_and_constants_of_its_graph_alone(constants) -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    gm = rg.trace(Halved(), (x, y), constants, dynamic_shapes="auto")
    flat = Flat(gm, {"x": x, "y": y, **constants})
    for size in (4, 2, 6, 4):
        x, y = torch.randn(size, 3), torch.randn(size, 3)
        found = flat.take({"y": y, "x": x, **constants})
        assert [x is found[0], y is found[1]] == [True, True]
    for size, other in ((3, 3), (5, 5), (4, 2)):
        with pytest.raises(TypeError):
            flat.take({"x": torch.randn(size, 3), "y": torch.randn(other, 3), **constants})
    with pytest.raises(TypeError, match="factor"):
        flat.take({"x": x, "y": y, "factor": 3.0})


class Hearing(torch.Tensor):
    """A tensor that is told of each function."""

    names: ClassVar[set[str]] = set()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.names.add(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_of_a_class_of_its_own_is_left_to_torch() -> None:
    model = heads()
    result = rg.optimize(model, (image(),), engine="onednn", keep="all", verify=False, **EXACT)
    assert result.graphs[0].engine.engine == "onednn"
    Hearing.names.clear()
    with torch.no_grad():
        found = result.model(image().as_subclass(Hearing))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, model(image()), strict=True))
    assert {"conv2d", "linear"} & Hearing.names
    assert all(isinstance(part, Hearing) for part in found)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_an_engine_runs_attention_of_groups_of_queries(name: str) -> None:
    available(name)

    class Groups(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)

        def forward(self, x):
            q, k = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k))
            k = k.repeat_interleave(2, 1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, k)

    model, call = Groups().eval(), {"x": torch.randn(2, 5, 16)}
    options = {"transformations": [rg.FuseAttention()], "seconds": 0.01}
    result = rg.optimize(model, kwargs=call, engine=name, keep="all", **options)
    assert result.steps[0].applied == 1, result
    assert result.graphs[0].engine.engine == name, result
    with torch.no_grad():
        torch.testing.assert_close(result.model(**call), model(**call), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_openvino_computes_in_the_precision_of_the_weights(dtype: torch.dtype, monkeypatch) -> None:
    available("openvino")
    import openvino

    given, compile_model = [], openvino.Core.compile_model
    monkeypatch.setattr(openvino.Core, "compile_model", lambda *args: given.append(args[-1]) or compile_model(*args))
    model, x = heads().to(dtype), image().to(dtype)
    result = rg.optimize(model, kwargs={"x": x}, engine="openvino", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "openvino", result
    assert {each["INFERENCE_PRECISION_HINT"] for each in given} == {"f32" if dtype is torch.float32 else "bf16"}
    entry = grafts_of(result.model).entries[0]
    called, run = [], entry.engine._run
    entry.engine._run = lambda inputs: called.append(inputs) or run(inputs)
    with torch.no_grad():
        found, expected = result.model(x), copy.deepcopy(model).double()(x.double())
    assert called
    assert {each.dtype for each in found} == {dtype}
    bound = 1e-4 if dtype is torch.float32 else 3e-2
    assert all(torch.allclose(a.double(), b, atol=bound, rtol=bound) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["onednn", "inductor", "onnxruntime", "openvino"])
@pytest.mark.parametrize("measured", [True, False])
def test_an_engine_with_kernels_of_its_own_is_not_given_what_pays_with_those_of_torch(
    name: str, measured: bool, monkeypatch
) -> None:
    seen: list[torch.fx.GraphModule] = []
    every_engine(monkeypatch, lambda flat: seen.append(flat.module) or (lambda inputs: flat.module(*inputs)))
    graph = rg.optimize(heads(), kwargs={"x": image()}, keep="all", engine="eager", **EXACT).graphs[0]
    subject = Graph("forward", graph.graph_module, graph.inputs, Oracle(heads(), float64=True, seed=0))
    choosing.adopt_engine((name,), subject, Entry("forward", graph.graph_module, graph.inputs[1]), 0.01, measured, {})
    called = [str(node.target) for node in seen[0].graph.find_nodes(op="call_module")]
    apart = measured and name in ("onnxruntime", "openvino")
    assert called == (["conv", "q", "k"] if apart else ["conv", "q_k"])
    assert "q_k" in dict(graph.graph_module.named_modules()), "what runs other sizes has it"


def test_what_other_steps_stand_on_stays_in_the_graph_of_an_engine() -> None:
    gm = rg.trace(heads(), (image(),))
    for step in (rg.MergeLinears(), rg.ReducePrecision(torch.bfloat16), rg.LintAndRecompile()):
        gm = step(gm)
    before = gm.code
    twin = choosing._without(gm, ("MergeLinears",))
    assert [step.transformation for step in rg.history(twin)] == ["MergeLinears", "ReducePrecision", "LintAndRecompile"]
    assert twin.code == gm.code == before
    twin = choosing._without(gm, ("MergeLinears", "ReducePrecision"))
    assert [step.transformation for step in rg.history(twin)] == ["LintAndRecompile"]
    assert len(rg.history(gm)) == 3


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (None, [2, 3, 6, 6]),
        ("auto", [-1, 3, -1, -1]),
        ({"x": {0: torch.export.Dim.DYNAMIC}, "scale": None}, [-1, 3, 6, 6]),
    ],
    ids=["none", "auto", "batch"],
)
def test_openvino_is_told_which_sizes_vary(sizes: object, told: list[int], monkeypatch) -> None:
    """It takes all for varying where nobody does, and is slower for it."""
    available("openvino")
    import openvino

    given, compile_model = [], openvino.Core.compile_model
    monkeypatch.setattr(openvino.Core, "compile_model", lambda *args: given.append(args[1]) or compile_model(*args))
    model, call = heads(), {"x": image(), "scale": torch.tensor(2.0)}
    options = {"transformations": [], "seconds": 0.01, "dynamic_shapes": sizes}
    result = rg.optimize(model, kwargs=call, engine="openvino", keep="all", **options)
    assert result.graphs[0].engine.engine == "openvino", result
    assert [[size.get_max_length() for size in each.partial_shape] for each in given[0].inputs] == [told, []]
    with torch.no_grad():
        found, expected = result.model(**call), model(**call)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))


def test_an_engine_that_is_right_at_first_and_not_later_makes_way_for_torch(monkeypatch) -> None:
    later = []  # what is looked at between the engine's choice and the drop-in as a whole
    monkeypatch.setattr(work, "must_be_finite", lambda *_: later.append(1) or {})
    every_engine(monkeypatch, lambda flat: lambda inputs: [result + len(later) for result in flat.module(*inputs)])
    model = heads()
    result = rg.optimize(model, kwargs={"x": image()}, engine="inductor", keep="all", **EXACT)
    assert result.graphs[0].used
    assert result.graphs[0].engine.engine == "torch", result
    assert "but it was not right in a later call" in result.graphs[0].engine.tried["inductor"]
    assert grafts_of(result.model).entries[0].engine is None


class Turned(torch.nn.Module):
    """Weights of one size, which are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        for layer in self.layers:
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) - self.layers[1](self.layers[2](y).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_openvino_keeps_the_memory_that_it_computes_with(dtype: torch.dtype, monkeypatch) -> None:
    """Of bfloat16 it holds on to nothing itself: weights were what others had written over them by then."""
    available("openvino")
    import openvino

    lent, convert = [], openvino.convert_model
    monkeypatch.setattr(
        openvino,
        "convert_model",
        lambda program: lent.extend(map(weakref.ref, program.state_dict.values())) or convert(program),
    )
    torch.manual_seed(0)
    model = Turned().to(dtype).eval()
    x, y = (torch.randn(32, 4).to(dtype).t() for _ in range(2))
    result = rg.optimize(model, (x, y), engine="openvino", keep="all", transformations=[], seconds=0.01)
    assert result.graphs[0].used, result
    assert result.graphs[0].engine.engine == "openvino", result
    gc.collect()
    assert len(lent) == 6
    assert all(weight() is not None for weight in lent)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double(), y.double())
        found = result.model(x, y).double()
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    assert (found - expected).abs().max() < bound * expected.abs().max()
    del result
    gc.collect()
    assert not any(weight() is not None for weight in lent), "nobody needs it now"


@pytest.mark.slow
def test_an_engine_decodes_with_a_cache() -> None:
    available("onnxruntime")
    model = decoder("Llama")
    result = rg.optimize(
        model, kwargs={"input_ids": ids()}, engine="onnxruntime", keep="all", transformations=[], seconds=0.01
    )
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(result.model.generate(ids(1, 5), **options), model.generate(ids(1, 5), **options))
    by_torch = [graph for graph in result.graphs if graph.engine.engine != "onnxruntime"]
    assert [graph.name for graph in by_torch] == ["padded prefill"], result
    assert "a row of attention sees no key" in by_torch[0].engine.tried["onnxruntime"]


def test_an_engine_that_is_wrong_or_fails_is_not_taken(monkeypatch) -> None:
    model = heads()

    def fails(flat: Flat):
        raise RuntimeError("no form for this")

    for build, sentence in (
        (lambda flat: lambda inputs: [result + 1 for result in flat.module(*inputs)], "is not right"),
        (fails, "cannot run it (RuntimeError: no form for this)"),
    ):
        every_engine(monkeypatch, build)
        result = rg.optimize(model, kwargs={"x": image()}, engine="inductor", keep="all", **EXACT)
        assert result.graphs[0].engine.engine == "torch"
        assert sentence in str(result)
        assert grafts_of(result.model).entries[0].engine is None


@pytest.mark.parametrize("of", ["a size", "a value"])
def test_an_engine_that_keeps_what_the_sample_has_is_not_right(of: str, monkeypatch) -> None:
    def keeps(flat: Flat):
        (sample,) = flat.sample

        def off(x: torch.Tensor) -> object:
            if of == "a size":
                return len(x) - len(sample)
            return x[0, 0, 0, 0] - sample[0, 0, 0, 0] if x.shape == sample.shape else 0

        return lambda inputs: [result + off(inputs[0]) for result in flat.module(*inputs)]

    every_engine(monkeypatch, keeps)
    result = rg.optimize(heads(), kwargs={"x": image()}, engine="inductor", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "torch"
    assert ("other values of the same sizes" if of == "a value" else "on x 3x") in str(result.graphs[0].engine)


@pytest.mark.parametrize("name", ["onednn", "inductor"])
def test_inputs_of_which_memory_holds_the_negative_run_right(name: str) -> None:
    available(name)
    model, x = heads(), torch.randn(image().shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    dropin = rg.optimize(model, (image(),), engine=name, keep="all", seconds=0.01).model
    with torch.no_grad():
        for found, expected in zip(dropin(x), model(x), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_program_for_sizes_of_two_or_more_is_given_no_single_row() -> None:
    gm = rg.trace(heads().eval(), (image(),), dynamic_shapes="auto")
    given = []
    with torch.no_grad():
        for sample, ones in ((image(), image()[:1]), (image()[:1], image()[:1])):
            flat = Flat(gm, {"x": sample})
            run = flat.covering(lambda inputs: given.append(inputs) or [*inputs, torch.tensor(True)])
            run([sample])
            if len(sample) > 1:
                with pytest.raises(NotCovered, match="sizes of two or more"):
                    run([ones])
    assert len(given) == 4  # to see that it covers the sample, and then


@pytest.mark.parametrize("grad", [False, True])
def test_an_engine_is_made_alike_with_gradients_and_without(grad: bool) -> None:
    available("onnxruntime")
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4}
    model = transformers.SwinModel(transformers.SwinConfig(**sizes)).eval()
    with torch.set_grad_enabled(grad):
        call = {"pixel_values": torch.randn(1, 3, 16, 16)}
        result = rg.optimize(model, kwargs=call, engine="onnxruntime", keep="all", seconds=0.01)
    assert result.graphs[0].engine.engine == "onnxruntime", result


@pytest.mark.parametrize(("sample", "given", "covered"), [(2, 3, True), (2, 1, False), (1, 1, True), (1, 2, False)])
def test_inductor_compiles_once(monkeypatch, sample: int, given: int, covered: bool) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda module, **settings: compiled.append(settings["dynamic"]) or module)
    gm = rg.trace(heads().eval(), (image(2),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    run = inductor.build(Flat(gm, {"x": image(sample)}))
    assert compiled == [sample > 1]
    if covered:
        assert run([image(given)])[0].shape[0] == given
    else:
        with pytest.raises(NotCovered, match="another program for a size of one"):
            run([image(given)])


class Told(torch.nn.Module):
    """A layer and a number beside its result."""

    def __init__(self, number) -> None:
        super().__init__()
        self.layer, self.number = torch.nn.Linear(6, 6), number

    def forward(self, x):
        return self.layer(x), self.number(x)


@pytest.mark.parametrize(
    ("number", "refused"), [(lambda x: x.sum().item(), True), (lambda x: x.shape[1], False), (lambda x: 3, False)]
)
def test_a_number_that_a_tensor_holds_is_no_result_of_an_engine(number, refused: bool, monkeypatch) -> None:
    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs)[:1])
    result = rg.optimize(Told(number).eval(), (torch.randn(5, 6),), engine="inductor", keep="all", **EXACT)
    said = "a number among its results is made of what a tensor holds" in str(result.graphs[0].engine)
    assert said is refused, result
    x = torch.randn(5, 6)
    assert result.model(x)[1] == number(x)


def test_what_rewriting_adds_to_an_engine_is_measured_and_shown(monkeypatch) -> None:
    seen = []
    build = lambda flat: seen.append(flat.module) or (lambda inputs: flat.module(*inputs))
    every_engine(monkeypatch, build)
    ratios: list[float] = []
    monkeypatch.setattr(choosing, "compare_speed", comparing(ratios))
    for ratio, where in ((0.7, 3), (1.6, 4)):
        seen.clear()
        ratios[:] = [0.5, ratio, 0.4]
        graph = rg.optimize(heads(), kwargs={"x": image()}, keep="all", **EXACT).graphs[0]
        subject = Graph("forward", graph.graph_module, graph.inputs, Oracle(heads(), float64=True, seed=0))
        entry = Entry("forward", graph.graph_module, graph.inputs[1])
        found = choosing.adopt_engine(("inductor",), subject, entry, 0.01, True, {})
        layers = [sum(node.op == "call_module" for node in module.graph.nodes) for module in seen]
        assert layers == [2, 4], "rewritten, and as it was captured"
        assert entry.engine is not None
        assert entry.engine._flat.module is seen[where - 3], "where rewriting slows an engine down it runs alone"
        assert found.rewriting["inductor"].ratio == ratio
        assert f"regraft + inductor against inductor alone: {found.rewriting['inductor'].reason}" in str(found)
        assert found.to_dict()["rewriting"]["inductor"]["ratio"] == ratio


def test_what_cannot_change_the_choice_is_not_built_a_second_time(monkeypatch) -> None:
    built = []
    every_engine(monkeypatch, lambda flat: built.append(flat.module) or (lambda inputs: flat.module(*inputs)))
    for module in (choosing, wanted):
        monkeypatch.setattr(module, "ENGINES", dict.fromkeys(("first", "second", "third"), ("inductor", ())))
    ratios: list[float] = []
    monkeypatch.setattr(choosing, "compare_speed", comparing(ratios))
    graph = rg.optimize(heads(), kwargs={"x": image()}, keep="all", engine="eager", **EXACT).graphs[0]
    subject = Graph("forward", graph.graph_module, graph.inputs, Oracle(heads(), float64=True, seed=0))

    def adopted(asked: Sequence[str], measured: bool, *found: float) -> choosing.EngineResult:
        built.clear()
        ratios[:] = found
        entry = Entry("forward", graph.graph_module, graph.inputs[1])
        return choosing.adopt_engine(asked, subject, entry, 0.01, measured, {})

    # each but the second, which takes twice as long as the first, is compared with itself on the graph as captured
    found = adopted(("auto",), True, 0.4, 0.9, 0.8, 0.3, 0.9)
    assert (found.engine, list(found.rewriting), len(built)) == ("third", ["first", "third"], 5)
    assert (adopted(("first",), False, 0.4).rewriting, len(built)) == ({}, 1), "all that is right is kept"
    assert list(adopted(("second",), True, 1.5, 0.9).rewriting) == ["second"], "by name it is, however slow"
    found = adopted(("first", "second"), True, 0.4, 0.3, 0.9)
    assert (found.engine, found.rewriting, len(built)) == ("second", {}, 2), "of several it would double the set-up"


def test_nothing_rewritten_adds_nothing_to_an_engine() -> None:
    available("onnxruntime")
    result = rg.optimize(heads(), kwargs={"x": image()}, engine="onnxruntime", transformations=[], seconds=0.01)
    assert result.graphs[0].engine.rewriting == {}


def comparing(ratios: list[float]) -> Callable[..., Comparison]:
    """Let each comparison come out like this, and again so where it is looked at for longer."""
    now: list[float] = []

    def compare(*programs, **clock) -> Comparison:
        if clock["min_seconds"] < choosing.LONGER * EXACT["seconds"]:
            now[:] = [ratios.pop(0)]
        return Comparison(1.0, now[0], now[0], now[0] - 0.05, now[0] + 0.05, (now[0],) * 10, 1)

    return compare


@pytest.mark.parametrize(("name", "pause"), [("onednn", 0.0), ("inductor", 0.0), ("onnxruntime", 0.03)])
def test_what_has_threads_of_its_own_is_timed_with_pauses(name: str, pause: float, monkeypatch) -> None:
    available(name)
    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs))
    monkeypatch.setattr(choosing, "PAUSE", 0.03)  # of which these tests make less
    pauses = []
    for module in (choosing, work):
        compare = module.compare_speed
        monkeypatch.setattr(
            module,
            "compare_speed",
            lambda *programs, compare=compare, **clock: (
                pauses.append(clock["pause_seconds"]) or compare(*programs, **clock)
            ),
        )
    rg.optimize(heads(), kwargs={"x": image()}, engine=name, keep="all", **EXACT)
    assert set(pauses) == {pause}
    assert len(pauses) >= 2, "the engine, and the model in the end"


def test_a_block_between_pauses_is_as_long_as_a_pause() -> None:
    assert steps.clock(1.0)["block_seconds"] == 0.01
    assert steps.clock(1.0, 0.03)["block_seconds"] == 0.03
    assert steps.clock(0.1, 0.03)["block_seconds"] == 0.005


def test_auto_takes_the_fastest_that_is_right(monkeypatch) -> None:
    ratios = {"onednn": 0.99, "inductor": 0.9, "onnxruntime": 0.5, "openvino": 1.5}
    build = lambda flat: lambda inputs: flat.module(*inputs)
    monkeypatch.setattr(wanted, "missing_packages", lambda name: ())
    every_engine(monkeypatch, build)
    left = list(ratios.values())
    assert list(ratios) == list(ENGINES)
    monkeypatch.setattr(choosing, "compare_speed", comparing(left))
    result = rg.optimize(heads(), kwargs={"x": image()}, engine="auto", keep="all", **EXACT)
    assert result.graphs[0].engine.engine == "onnxruntime"
    assert set(result.graphs[0].engine.comparisons) == set(ratios)


@pytest.mark.parametrize(
    ("ratios", "second_looks", "taken"),
    [
        ([0.50, 0.30, 0.70, 1.50], {}, "inductor"),  # what lies apart needs none
        (
            [0.50, 0.52, 0.80, 0.70, 0.90],
            {"inductor": "0.80x the time (95% 0.75–0.85, 10 pairs) of onednn"},
            "inductor",
        ),
        ([0.50, 0.48, 1.10, 0.70, 0.90], {"inductor": "1.10x the time (95% 1.05–1.15, 10 pairs) of onednn"}, "onednn"),
        (
            [0.50, 0.52, 0.80, 0.49, 1.20, 0.97],
            {
                "inductor": "0.80x the time (95% 0.75–0.85, 10 pairs) of onednn",
                "onnxruntime": "1.20x the time (95% 1.15–1.25, 10 pairs) of inductor",
            },
            "inductor",
        ),
    ],
)
def test_engines_that_may_be_equally_fast_are_timed_against_each_other(
    monkeypatch, ratios, second_looks, taken
) -> None:
    monkeypatch.setattr(wanted, "missing_packages", lambda name: ())
    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs))
    model, call = heads(), {"x": image()}
    gm = rg.trace(model, (), call)
    entry, left = Entry("forward", gm, call), list(ratios)
    monkeypatch.setattr(choosing, "compare_speed", comparing(left))
    found = choosing.adopt_engine(
        ("auto",), Graph("forward", gm, ((), call), Oracle(model, float64=True, seed=0)), entry, 0.01, True, {}
    )
    assert not left
    assert found.engine == taken
    assert {name: said.partition("; ")[2] for name, said in found.tried.items() if "; " in said} == second_looks


@pytest.mark.parametrize(
    ("low", "ratio", "high", "looks", "taken", "said"),
    [
        (0.85, 0.9, 0.95, 1, True, "faster: 0.90x"),
        (0.85, 0.97, 1.02, 2, True, "likely faster: 0.97x the time (95% 0.85–1.02, 10 pairs), an interval"),
        (0.85, 0.97, 0.985, 1, True, "faster: 0.97x the time (95% 0.85–0.98"),
        (0.85, 0.985, 0.99, 2, False, "wholly below 1, but by less than the memory of its weights is worth"),
        (0.85, 0.985, 1.02, 2, False, "no difference shown: 0.985x"),
        (0.85, 1.2, 1.3, 2, False, "no difference shown: 1.20x"),
        (1.1, 1.2, 1.3, 1, False, "slower: 1.20x"),
    ],
)
def test_an_engine_is_taken_where_it_is_likely_faster(
    monkeypatch, low: float, ratio: float, high: float, looks: int, taken: bool, said: str
) -> None:
    """A look that does not tell is followed by one of three times its length."""
    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs))
    model, call, limits = heads(), {"x": image()}, []
    gm = rg.trace(model, (), call)
    entry = Entry("forward", gm, call)

    def compare(*programs, **clock) -> Comparison:
        limits.append((clock["min_pairs"], clock["min_seconds"]))
        return Comparison(1.0, ratio, ratio, low, high, (ratio,) * 10, 1)

    monkeypatch.setattr(choosing, "compare_speed", compare)
    found = choosing.adopt_engine(
        ("torch",), Graph("forward", gm, ((), call), Oracle(model, float64=True, seed=0)), entry, 0.01, True, {}
    )
    assert (found.engine, entry.engine is not None) == (("onednn", True) if taken else ("torch", False))
    assert said in found.tried["onednn"]
    assert limits == [(choosing.PAIRS, seconds) for seconds in (0.01, choosing.LONGER * 0.01)[:looks]]


@pytest.mark.parametrize(("call", "looks"), [(0.0018, 2), (0.0019, 1)])
def test_slow_calls_are_not_looked_at_for_longer_than_they_were(monkeypatch, call: float, looks: int) -> None:
    """Four pairs of blocks of two calls are sixteen calls, which take 0.03 s, three times what was asked, or more."""
    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs))
    model, x, asked = heads(), {"x": image()}, []
    gm = rg.trace(model, (), x)
    same = Comparison(call, call, 1.0, 0.9, 1.1, (1.0,) * 4, 2, ((call, call),) * 4)
    monkeypatch.setattr(choosing, "compare_speed", lambda *programs, **clock: asked.append(clock) or same)
    choosing.adopt_engine(
        ("torch",),
        Graph("forward", gm, ((), x), Oracle(model, float64=True, seed=0)),
        Entry("forward", gm, x),
        0.01,
        True,
        {},
    )
    assert len(asked) == looks


def test_of_several_engines_the_fastest_that_is_right_runs_the_model(monkeypatch) -> None:
    monkeypatch.setattr(wanted, "missing_packages", lambda name: ())
    every_engine(monkeypatch, lambda flat: lambda inputs: flat.module(*inputs))
    ratios: list[float] = []
    monkeypatch.setattr(choosing, "compare_speed", comparing(ratios))
    for found, taken in (([0.7, 0.5], "openvino"), ([0.5, 0.7], "onednn"), ([1.2, 1.3], "torch")):
        ratios[:] = found
        asked = ["torch", "openvino", "torch"]
        result = rg.optimize(heads(), kwargs={"x": image()}, engine=asked, keep="all", **EXACT)
        assert list(result.graphs[0].engine.tried) == ["onednn", "openvino"]
        assert result.graphs[0].engine.engine == taken
        assert (grafts_of(result.model).entries[0].engine is None) == (taken == "torch")


def test_an_engine_that_is_not_installed_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(wanted, "missing_packages", lambda name: ("openvino",))
    with pytest.raises(ImportError, match=r"pip install 'regraft\[openvino\]'"):
        rg.optimize(heads(), (image(),), engine="openvino")


def taken_over(
    name: str, dtype: torch.dtype = torch.float32, **options
) -> tuple[torch.nn.Module, torch.nn.Module, Engine]:
    """A model, its drop-in, and the engine that runs that one."""
    available(name)
    model = heads().to(dtype)
    result = rg.optimize(model, kwargs={"x": image().to(dtype)}, engine=name, keep="all", **{**EXACT, **options})
    assert result.graphs[0].engine.engine == name, result
    return model, result.model, grafts_of(result.model).entries[0].engine


def runs(engine: Engine, model: torch.nn.Module, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """What a drop-in gives, and how often its engine was asked for it."""
    times, run = [], engine._run
    engine._run = lambda inputs: times.append(1) or run(inputs)
    try:
        with torch.no_grad():
            return model(x), len(times)
    finally:
        engine._run = run


def same(found: tuple[torch.Tensor, ...], model: torch.nn.Module, x: torch.Tensor) -> None:
    bound = 1e-4 if x.dtype is torch.float32 else 3e-2
    with torch.no_grad():
        for a, b in zip(found, model(x), strict=True):
            torch.testing.assert_close(a, b, atol=bound, rtol=bound)


@pytest.mark.parametrize("name", ["onednn", "onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_engine_gave_stays_what_it_was(name: str, dtype: torch.dtype) -> None:
    if name == "onnxruntime" and dtype is torch.bfloat16:
        pytest.skip("it has no convolution in bfloat16")
    _, twin, engine = taken_over(name, dtype=dtype)
    (first, times), x = runs(engine, twin, image().to(dtype)), (image() + 1).to(dtype)
    copies = [each.clone() for each in first]
    second, again = runs(engine, twin, x)
    assert times == again == 1
    assert not torch.equal(first[0], second[0])
    assert all(map(torch.equal, first, copies)), "an engine uses its memory again"


@pytest.mark.parametrize("name", ["onednn", "onnxruntime", "openvino"])
def test_an_engine_is_left_alone_once_a_weight_was_written_to(name: str) -> None:
    model, twin, engine = taken_over(name, transformations=[rg.RemoveDeadWork()])
    found, times = runs(engine, twin, image())
    assert times == 1
    same(found, model, image())
    with torch.no_grad():
        twin.q.weight.mul_(2)  # which the model shares, and the graph reads
    found, times = runs(engine, twin, image())
    assert times == 0
    same(found, model, image())


@pytest.mark.parametrize("write", ["folded weight", "other memory", "hook", "training"])
def test_an_engine_is_left_alone_once_its_graph_is_another(write: str) -> None:
    available("onednn")
    result = rg.optimize(heads(), kwargs={"x": image()}, engine="onednn", keep="all", **EXACT)
    twin, engine = result.model, grafts_of(result.model).entries[0].engine
    assert runs(engine, twin, image())[1] == 1
    gm = result.graph_module
    assert runs(engine, twin, image())[1] == 1, "who has the graph may have left it as it is"
    heard = []
    if write == "folded weight":
        with torch.no_grad():
            gm.get_submodule("conv").bias.add_(1)
    elif write == "other memory":
        weight = gm.get_submodule("conv").weight
        weight.data = weight.detach() * 2
    elif write == "hook":
        gm.get_submodule("conv").register_forward_hook(lambda *_: heard.append(1))
    else:
        gm.get_submodule("conv").train()
    with torch.no_grad():
        expected = gm(x=image())
    heard.clear()
    found, times = runs(engine, twin, image())
    assert times == 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len(heard) == (write == "hook")


def test_a_weight_that_two_graphs_share_is_looked_at_in_both() -> None:
    available("onednn")
    settings = {"transformations": "MergeLinears", "engine": "onednn", "keep": "all", "seconds": 0.01}
    result = rg.optimize(decoder("Llama"), kwargs={"input_ids": ids()}, **settings)
    engines = [entry.engine for entry in grafts_of(result.model).entries if entry.engine is not None]
    assert len(engines) > 1
    assert not any(engine.lent for engine in engines)
    assert result.graphs[0].graph_module is result.graph_module
    assert all(engine.lent for engine in engines)


def test_of_a_graph_that_nobody_was_given_only_the_weights_of_others_are_looked_at() -> None:
    _, twin, engine = taken_over("onednn")
    asked = {id(tensor) for tensor in engine.watch.memory["versions"].values()}
    made = {name for name, tensor in engine._gm.named_parameters() if id(tensor) not in asked}
    assert made == {"conv.weight", "conv.bias", "q_k.weight", "q_k.bias"}
    assert asked <= {id(tensor) for tensor in (*twin.parameters(), *twin.buffers())}


def test_a_constant_that_somebody_else_holds_is_looked_at() -> None:
    available("onednn")

    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shifts = torch.nn.Linear(8, 8), [torch.randn(8)]

        def forward(self, x):
            return self.linear(x) * self.shifts[0] + self.linear(x * 2)

    model, x = Shifted().eval(), torch.randn(4, 8)
    settings = {"transformations": "RemoveDeadWork", "engine": "onednn", "keep": "all", "seconds": 0.01}
    result = rg.optimize(model, kwargs={"x": x}, **settings)
    engine = grafts_of(result.model).entries[0].engine
    with torch.no_grad():
        assert torch.allclose(result.model(x), model(x), atol=1e-6)
        for module in (model, result.model):
            if module.shifts[0] is not model.shifts[0] or module is model:
                module.shifts[0].add_(1)
        times, run = [], engine._run
        engine._run = lambda inputs: times.append(1) or run(inputs)
        assert torch.allclose(result.model(x), model(x), atol=1e-6)
    assert not times


def test_another_rewrite_of_its_graph_leaves_the_engine_alone() -> None:
    _, twin, engine = taken_over("onednn")
    engine._gm.graph.find_nodes(op="output")[0].args = (engine._gm.graph.find_nodes(op="output")[0].args[0][::-1],)
    engine._gm.recompile()
    found, times = runs(engine, twin, image())
    assert times == 0
    assert [part.shape[-1] for part in found] == [4, 8]


def test_under_autocast_and_for_other_sizes_the_graph_runs() -> None:
    model, twin, engine = taken_over("onednn")
    with torch.autocast("cpu", torch.bfloat16):
        found, times = runs(engine, twin, image())
        expected = model(image())
    assert times == 0
    assert [part.dtype for part in found] == [part.dtype for part in expected] == [torch.bfloat16] * 2
    for batch, times in ((2, 1), (3, 1)):
        assert runs(engine, twin, image(batch))[1] == times
        same(twin(image(batch)), model, image(batch))


def test_of_inputs_with_tangents_the_graph_computes_those_of_the_results() -> None:
    model, twin, engine = taken_over("onednn")
    with torch.no_grad(), forward_ad.dual_level():
        x = forward_ad.make_dual(image(), image())
        found, times = runs(engine, twin, x)
        tangents = [[forward_ad.unpack_dual(part).tangent for part in parts] for parts in (found, model(x))]
    assert times == 0
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*tangents, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("onednn", torch.float32),
        ("onnxruntime", torch.float32),
        *(("openvino", d) for d in (torch.float32, torch.bfloat16)),
    ],
)
def test_an_engine_takes_inputs_of_any_strides_and_leaves_them_as_they_are(name: str, dtype: torch.dtype) -> None:
    model, twin, engine = taken_over(name, dtype)
    x = image().to(dtype)
    for given in (x, x.transpose(2, 3), x.contiguous(memory_format=torch.channels_last), x[:1].expand(2, 3, 6, 6)):
        before = given.clone()
        found, times = runs(engine, twin, given)
        assert times == 1
        same(found, model, given)
        assert torch.equal(given, before)


def test_onednn_leaves_the_settings_of_the_process() -> None:
    for setting in (True, False):
        torch.jit.enable_onednn_fusion(setting)
        taken_over("onednn")
        assert torch.jit.onednn_fusion_enabled() is setting


@pytest.mark.parametrize(
    ("engine", "keep", "tried"),
    [("torch", "measured", ["onednn"]), ("torch", "all", []), ("eager", "measured", []), ("onednn", "all", ["onednn"])],
)
def test_torch_tries_what_comes_with_it(engine: str, keep: str, tried: list[str]) -> None:
    found = rg.optimize(heads(), kwargs={"x": image()}, engine=engine, keep=keep, **EXACT).graphs[0].engine
    assert list(found.tried if found else []) == tried


def test_torch_tries_nothing_that_takes_much_memory(monkeypatch) -> None:
    size = sum(weight.nbytes for weight in heads().parameters())
    for limit, tried in ((size, False), (size - 1, True)):
        monkeypatch.setattr(graphs, "LARGE", limit)
        found = rg.optimize(heads(), kwargs={"x": image()}, transformations=[], seconds=0.01).graphs[0].engine
        assert ("not tried unasked" in str(found)) is tried
    found = rg.optimize(heads(), kwargs={"x": image()}, engine="onednn", transformations=[], seconds=0.01).graphs[0]
    assert "not tried" not in str(found.engine)


def test_torch_tries_nothing_for_the_calls_of_generate() -> None:
    result = rg.optimize(decoder("Llama"), kwargs={"input_ids": ids()}, transformations=[], seconds=0.01)
    assert len(result.graphs) > 1
    assert [graph.engine is not None for graph in result.graphs] == [True] + [False] * (len(result.graphs) - 1)


class Counting(torch.nn.Module):
    """A model that writes to a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) * self.calls


def test_a_graph_that_writes_or_is_listened_to_is_given_to_no_engine() -> None:
    options = {"transformations": [], "keep": "all", "seconds": 0.01, "verify": False}
    found = rg.optimize(Counting().eval(), (torch.randn(2, 6),), engine="onednn", **options)
    assert "not tried: the graph writes to calls" in str(found.graphs[0].engine)
    gm = rg.trace(heads(), (image(),))
    gm.get_submodule("conv").register_forward_hook(lambda *_: None)
    assert choosing._obstacle(gm) == "conv has a hook, which an engine would not call"
    with torch.inference_mode():
        model = heads().requires_grad_(False)
    found = rg.optimize(model, (image(),), engine="onednn", frozen=True, **options)
    assert "made in inference mode" in str(found.graphs[0].engine)


def test_an_engine_is_held_to_what_its_graph_is() -> None:
    model = heads()
    halves = [rg.ReducePrecision(torch.bfloat16)]
    result = rg.optimize(model, (image(),), transformations=halves, engine="onednn", keep="all", seconds=0.01)
    assert result.graphs[0].engine.engine == "onednn", result
    with torch.no_grad():
        for found, expected in zip(result.model(image()), model(image()), strict=True):
            torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["onednn", "onnxruntime", "openvino"])
def test_an_engine_gives_the_layout_that_the_model_gives(name: str) -> None:
    available(name)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 1)).eval()
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    result = rg.optimize(model, (x,), engine=name, keep="all", seconds=0.01)
    assert result.graphs[0].engine.engine == name, result
    with torch.no_grad():
        assert result.model(x).stride() == model(x).stride()
