"""A model that sets attributes as it runs, for others to read: what its drop-in leaves on it is what it would."""

from __future__ import annotations

import copy
import io
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, Pair
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import regraft as rg
from regraft.dropin import grafts_of
from regraft.dropin.contents import Contents
from regraft.optimize import optimize
from regraft.optimize.side_effects import side_effects
from regraft.transformations import _mkldnn


class Plain(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Attention(nn.Module):
    """Keeps its weights, as a model does of which somebody wants to see them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.weights = nn.Linear(WIDTH, 3 * WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        self.weights = (query @ key.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        return self.weights @ value


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Sizes(Pair):
    """Keeps sizes and constants, with which a decoder undoes what was done to the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.batch = None, 3

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.batch, self.grid = x.shape, x.shape[0], (x.shape[1], [x.shape[1] * 2])
        self.kind, self.done, self.mask = "encoded", True, None
        return self.compute(x)


class Auxiliary(Pair):
    """Keeps a loss and a container, and returns one."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.compute(x)
        self.loss, self.info, self.found = y.square().mean(), {"top": y.amax(-1), "all": [y.mean(), 3]}, []
        self.found.append(y)
        self.found.append(x)
        return {"y": y, "more": (y + 1,)}


class Reversible(Pair):
    """Sets what it reads afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.std = x.mean(1, keepdim=True), x.square().mean(1, keepdim=True).sqrt()
        return self.compute((x - self.mean) / self.std) * self.std + self.mean


class Again(Pair):
    """Can leave out the first half of its work the next time."""

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        if not again:
            self.features = torch.relu(self.first(x))
        return self.second(self.features)


class Defaulted(Pair):
    """Has a default for what it sets in its class."""

    mean: Tensor | None = None
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.calls = x.mean(), 3
        return self.compute(x) + self.calls


class Twice(nn.Module):
    """Runs a part twice, whose last value stays."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Reversible()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x) + x)


KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (Layers, Sizes, Auxiliary, Reversible, Again, Defaulted, Twice)
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = KINDS[request.param]().eval()
    return made


def optimized(model: nn.Module, x: Tensor, **settings: Any) -> Any:
    return optimize(model, (x,), **{"seconds": 0.01, "keep": "all", **settings})


def drawn(batch: int = 3, length: int = 5) -> Tensor:
    return torch.randn(batch, length, WIDTH)


def left_on(model: nn.Module) -> dict[str, Any]:
    """What hangs on a model beside what hangs on every module, and what regraft has put there."""
    known = {*vars(nn.Module()), "_regraft", "_regraft_forward"}
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in known
    }


def assert_same(given: Any, expected: Any) -> None:
    assert type(given) is type(expected)
    given, expected = pytree.tree_leaves(given), pytree.tree_leaves(expected)
    assert list(map(type, given)) == list(map(type, expected))
    for one, other in zip(given, expected):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def assert_runs_as(served: Any, twin: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        assert_same(served(x.clone()), twin(x.clone()))
    expected = left_on(twin)
    given = left_on(served)
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(given[name], value)


@pytest.mark.parametrize(("dynamic_shapes", "ran_before"), [("auto", True), (None, False)])
def test_the_drop_in_sets_what_the_model_would(model: nn.Module, dynamic_shapes: str | None, ran_before: bool) -> None:
    twin, x = copy.deepcopy(model), drawn()
    if ran_before:
        with torch.no_grad():
            model(x), twin(x)
    before = left_on(model)
    served = optimized(model, x, dynamic_shapes=dynamic_shapes).model
    assert all(value is before[name] for name, value in left_on(model).items())  # the caller's is as it was
    for name, value in left_on(served).items():  # and so is the other
        assert_same(value, before[name])
    calls = [drawn(), drawn(), drawn(2, 7), drawn(), drawn(1, 4), drawn()]
    for x in calls:
        assert_runs_as(served, twin, x)
    by_graph = len(calls) if dynamic_shapes else sum(x.shape == (3, 5, WIDTH) for x in calls)
    assert grafts_of(served).calls["forward"] == by_graph  # those of other sizes set something too, and no harm is done
    assert all(value is before[name] for name, value in left_on(model).items())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Sizes", {"engine": "onednn"}), ("Layers", {"frozen": True}), ("Auxiliary", {"engine": "onnxruntime"})],
    ids=str,
)
def test_however_the_graph_is_run(kind: str, settings: dict[str, Any]) -> None:
    model = KINDS[kind]().eval()
    twin = copy.deepcopy(model)
    served = optimized(model, drawn(), **settings).model
    for x in (drawn(), drawn(2, 7)):
        assert_runs_as(served, twin, x)
    assert grafts_of(served).calls["forward"] == 2


@pytest.mark.parametrize("way", ["copy", "file"])
def test_copies_set_their_own(model: nn.Module, way: str) -> None:
    twin = copy.deepcopy(model)
    served = optimized(model, drawn()).model
    before = left_on(served)
    if way == "copy":
        other = copy.deepcopy(served)
    else:
        file = io.BytesIO()
        torch.save(served, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_runs_as(other, twin, drawn())
    assert grafts_of(other).calls["forward"] == 1
    assert all(value is before[name] for name, value in left_on(served).items())


def test_compiled(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    served = optimized(model, drawn()).model
    compiled, x = torch.compile(served, backend="eager", fullgraph=True), drawn()
    with torch.no_grad():
        assert_same(compiled(x), twin(x))
    for name, value in left_on(twin).items():
        assert_same(left_on(served)[name], value)


def test_converted_it_is_captured_again_with_what_it_sets() -> None:
    model = Layers().eval()
    twin = copy.deepcopy(model).double()
    served = optimized(model, drawn()).model.double()
    for _ in range(3):
        assert_runs_as(served, twin, drawn().double())
    assert grafts_of(served).calls["forward"] == 3


def test_what_the_graph_and_the_saved_program_return(model: nn.Module, tmp_path: Path) -> None:
    result, x = optimized(model, drawn()), drawn()
    (graph,) = result.graphs
    saved = torch.export.load(result.save(tmp_path / "model.pt2")).module()
    with torch.no_grad():
        expected = model(x)
        given, values = result.graph_module(x)
        torch.testing.assert_close(pytree.tree_leaves(given), pytree.tree_leaves(expected))
        torch.testing.assert_close(pytree.tree_leaves(saved(x)), pytree.tree_leaves(expected))
    found = left_on(model)
    assert len(values) == len(graph.sets) > 0
    for name, value in zip(graph.sets, values):
        key = name if "." in name else f".{name}"
        assert_same(value, tuple_of(found[key]))
    assert any(f"sets {', '.join(graph.sets)} as it runs" in note for note in result.notes)


def tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def test_a_later_call_may_read_it() -> None:
    model = Again().eval()
    twin = copy.deepcopy(model)
    served = optimized(model, drawn()).model
    with torch.no_grad():
        for x in (drawn(), drawn()):
            torch.testing.assert_close(served(x), twin(x))
        torch.testing.assert_close(served(drawn(), again=True), twin(drawn(), again=True))
    assert grafts_of(served).calls["forward"] == 2


def test_all_of_it_taken_back_it_sets_the_same_bits() -> None:
    model = Layers().eval()
    result = optimized(model, drawn())
    result.undo()
    x = drawn()
    with torch.no_grad():
        assert torch.equal(result.model(x), model(x))
    for mine, theirs in zip(result.model.layers, model.layers):
        assert torch.equal(mine.weights, theirs.weights)


class Counting(Pair):
    """Counts its calls, and keeps what it was given, with which it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape[0])
        self.last = x.mean()
        return self.compute(x)


class Listing(Pair):
    """Sets nothing, and fills a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.compute(x)


class Caching(Pair):
    """Makes a table for a length, once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.length, self.tables = None, 0, {}

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.length != x.shape[1]:
            self.table, self.length = torch.arange(x.shape[1])[:, None], x.shape[1]
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = self.table * 2
        return self.compute(x) + self.table + self.tables[x.shape[1]]


def test_what_changes_from_call_to_call_is_named(caplog: pytest.LogCaptureFixture) -> None:
    result = optimized(Counting().eval(), drawn())
    assert result.graphs[0].sets == ("last",)
    (note,) = [note for note in result.notes if "from one call to the next" in note]
    assert note.startswith("the model changes calls, seen from one call")
    assert note in caplog.messages
    assert (result.original.calls, result.original.seen) == (0, [])


def test_a_container_alone_is_named() -> None:
    result = optimized(Listing().eval(), drawn())
    assert result.graphs[0].sets == ()
    assert any("changes seen from one call to the next" in note for note in result.notes)
    assert result.original.seen == []


def test_what_a_drop_in_inside_counts_is_nothing_to_speak_of() -> None:
    inner = optimized(Plain().eval(), drawn()).model
    for model in (inner, nn.Sequential(inner, nn.ReLU()).eval()):
        assert optimized(model, drawn()).notes == ()


def test_what_is_made_once_is_no_side_effect() -> None:
    model = Caching().eval()
    result = optimized(model, drawn(), dynamic_shapes=None)
    assert (result.graphs[0].sets, result.notes) == ((), ())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for x in (drawn(), drawn(3, 8), drawn()):
            torch.testing.assert_close(result.model(x), twin(x))


class Distances(Pair):
    """Makes a table when it is first called, or called with other sizes, and keeps it in a buffer, as ConViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)

    def made(self, x: Tensor) -> Tensor:
        return (torch.arange(x.shape[1], dtype=x.dtype)[:, None] - 2.0).square()

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[1]:
            self.table = self.made(x)
        return self.compute(x) + self.table


class Calibrated(Distances):
    """Makes it of the first inputs."""

    def made(self, x: Tensor) -> Tensor:
        return x.abs().mean(0)


@pytest.mark.parametrize("engine", ["eager", "torch"])
def test_a_buffer_that_is_made_when_it_is_first_called_is_there_from_the_start(engine: str) -> None:
    model = Distances().eval()
    result = optimized(model, drawn(), engine=engine, dynamic_shapes=None)
    assert result.graphs[0].used
    assert result.verification.ok
    assert result.notes == ("the model makes table when it is first called: the drop-in has that from the start",)
    assert model.table.shape == (1, 1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for x in (drawn(), drawn()):
            torch.testing.assert_close(result.model(x), twin(x))
            assert torch.equal(result.model.table, twin.table)
        assert grafts_of(result.model).calls["forward"] == 2
        for x in (drawn(3, 8), drawn()):  # which the model makes another table for
            torch.testing.assert_close(result.model(x), twin(x))
            assert torch.equal(result.model.table, twin.table)


def test_a_buffer_that_is_made_of_the_first_inputs_is_in_no_graph() -> None:
    model = Calibrated().eval()
    result = optimized(model, drawn())
    assert not result.graphs[0].used
    assert "buffer table is not written to" in result.graphs[0].verdict


def test_a_buffer_is_made_of_values_where_no_others_can_be_tried() -> None:
    model = Distances().eval()
    found = side_effects(model, ((torch.zeros(2, 6, WIDTH),), {}))
    assert found.made == {}
    assert list(side_effects(model, ((drawn(),), {})).made) == [("", "table")]


def test_a_buffer_that_is_made_goes_with_what_is_set() -> None:
    class Both(Distances):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.mean(1)
            return super().forward(x)

    model, x = nn.Sequential(Both(), nn.ReLU()).eval(), drawn()
    result = optimized(model, x)
    assert result.graphs[0].used
    assert result.graphs[0].sets == ("0.last",)
    assert len(result.notes) == 2
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x))
        torch.testing.assert_close(result.model[0].last, x.mean(1))


class Unreturnable(Pair):
    """Sets what is in no graph: an object made anew, types, and what is not strided."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(x)
        self.made, self.dtype, self.device, self.generator = object(), x.dtype, x.device, torch.Generator()
        self.mean, self.sparse = y.mean(), y[0].to_sparse()
        return y


def test_what_no_graph_can_return_is_named() -> None:
    result = optimized(Unreturnable().eval(), drawn())
    assert result.graphs[0].sets == ("mean",)
    assert any("changes generator, made, sparse from one call to the next" in note for note in result.notes)


class Overwriting(Pair):
    def forward(self, x: Tensor) -> Tensor:
        self.total = x.sum()
        x.mul_(2)
        return self.compute(x)


def test_what_it_is_given_is_left_as_it_was() -> None:
    model, x = Overwriting().eval(), drawn()
    before = x.clone()
    result = optimized(model, x)
    assert result.graphs[0].sets == ("total",)
    assert torch.equal(x, before)


class Many(Pair):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(12):
            setattr(self, f"size_{index:02}", x.shape[0] + index)
        return self.compute(x)


def test_of_many_names_some_are_given() -> None:
    (note,) = optimized(Many().eval(), drawn()).notes
    assert note.startswith("the model sets size_00, size_01,")
    assert "size_07 and 4 more as it runs" in note


def test_what_turns_out_to_be_in_no_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, attributes: Any, contents: Contents) -> nn.Module:
        raise rg.CaptureError(f"not {list(attributes)} of {type(model).__name__}, {contents}")

    monkeypatch.setattr(sys.modules["regraft.optimize.subjects"], "returning", refuse)
    result, x = optimized(model := Reversible().eval(), drawn()), drawn()
    assert result.graphs[0].sets == ()
    assert any("changes mean, std from one call to the next" in note for note in result.notes)
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x))
    assert grafts_of(result.model).calls["forward"] == 1


def with_a_forward_of_its_own(model: nn.Module) -> nn.Module:
    model.forward = types.MethodType(type(model).forward, model)  # it hangs on the model
    return model


def with_a_hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, args, result: result * 1)
    return model


def of_a_class_with_a_call(model: nn.Module) -> nn.Module:
    class Careful(Reversible):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 1

    model.__class__ = Careful
    return model


@pytest.mark.parametrize("change", [with_a_forward_of_its_own, with_a_hook, of_a_class_with_a_call])
def test_a_model_whose_forward_is_not_all_of_a_call(change: Any) -> None:
    model, x = change(Reversible().eval()), drawn()
    result = optimized(model, x)
    assert result.graphs[0].sets == ()
    assert any("changes mean, std from one call to the next" in note for note in result.notes)
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x))


def test_a_model_that_sets_nothing_is_called_once_to_know_it() -> None:
    model, counted = Pair(), []
    model.forward = lambda x: counted.append(1) or model.compute(x)
    assert side_effects(model, ((drawn(),), {})) == ({}, [], {}, Contents())
    assert len(counted) == 1


def test_where_the_original_is_kept_it_is_the_model_itself() -> None:
    model = Reversible().eval()
    result = optimize(model, (drawn(),), transformations=[], engine="eager", seconds=0.01)
    assert result.graphs[0].verdict.startswith("the original is kept")
    assert result.model is model


class Drawing(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x) + 0 * torch.rand(()) + 0 * random.random()


def test_the_random_state_is_as_it_was() -> None:
    model = Drawing().eval()
    before, before_python = torch.get_rng_state(), random.getstate()
    result = optimized(model, torch.zeros(3, 5, WIDTH))
    assert isinstance(result, rg.Optimized)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == before_python


def test_generators_of_devices_not_yet_in_use_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed for those waits until the device is used; one of ours would take the place of the user's."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(7)
    _mkldnn.works.cache_clear()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(), nn.Linear(WIDTH, WIDTH)).eval()
    optimized(model, drawn())
    assert _mkldnn.works.cache_info().misses
    assert seeds == [7]
