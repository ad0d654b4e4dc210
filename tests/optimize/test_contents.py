"""A model that changes the lists and dictionaries that it is given: its drop-in changes them as it does."""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import WIDTH, Pair
from torch import Tensor, nn
from transformers import BatchEncoding, BertConfig, PreTrainedModel

import regraft as rg
from regraft.dropin import grafts_of
from regraft.dropin.contents import Contents, Given, with_own_containers
from regraft.optimize import optimize
from regraft.verify.tree import tree_of


class Features(Pair):
    """As those of sentence-transformers do."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["tokens"] = self.compute(features["x"])
        features.update({"embedding": features["tokens"].mean(1), "shape": [3, 4]})
        return features


class Replaced(Pair):
    """Replaces what it is given, as SlowFast does, and returns part of it."""

    def forward(self, x: list[Tensor]) -> Tensor:
        for i in range(len(x)):
            x[i] = self.compute(x[i])
        return x[0] + x[1]


class Moved(Pair):
    """Takes out, moves and adds, at the beginning as well."""

    def forward(self, x: Tensor, states: list[Tensor], more: dict[str, Any] | None = None) -> tuple[Tensor, Any]:
        last = states.pop()
        states.insert(0, self.compute(x))
        if more is not None:
            more["old"] = more.pop("x")
            del more["unread"]
        return last + x, (states, {"more": more})


class Nested(Pair):
    """Changes what lies within, and leaves what is around it."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x, extra = batch["pair"]
        extra["y"] = y = self.compute(x)
        return y.sum(-1)


class Empties(Pair):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.compute(features.pop("x"))


def _x(batch: int = 2) -> Tensor:
    return torch.randn(batch, 5, WIDTH)


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "dictionary": (Features, lambda n: {"features": {"x": _x(n), "mask": torch.ones(n, 5), "kind": "text"}}),
    "ordered": (Features, lambda n: {"features": OrderedDict(x=_x(n), unread=torch.ones(1))}),
    "list": (Replaced, lambda n: {"x": [_x(n), _x(n)]}),
    "moved": (Moved, lambda n: {"x": _x(n), "states": [_x(n), _x(n)]}),
    "two": (Moved, lambda n: {"x": _x(n), "states": [_x(n)], "more": {"x": _x(n), "unread": _x(n), "z": 3}}),
    "user": (Features, lambda n: {"features": UserDict(x=_x(n), kind="text")}),
    "encoding": (Features, lambda n: {"features": BatchEncoding({"x": _x(n), "mask": torch.ones(n, 5)})}),
    "nested": (Nested, lambda n: {"batch": {"pair": (_x(n), {"unread": _x(n)})}}),
    "empties": (Empties, lambda n: {"features": {"x": _x(n)}}),
}


def _randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def _compare(model: nn.Module, dropin: nn.Module, call: dict[str, Any]) -> None:
    """The same results, the same contents, and the same objects where the model has those of the caller."""
    mine, theirs = with_own_containers(call), with_own_containers(call)
    with torch.inference_mode():
        found, wanted = dropin(**mine), model(**theirs)
    found, wanted = tree_of((found, mine)), tree_of((wanted, theirs))
    assert list(found.leaves) == list(wanted.leaves)  # their order is that of the entries
    assert found.containers == wanted.containers
    for name, leaf in wanted.leaves.items():
        if isinstance(leaf, Tensor):
            torch.testing.assert_close(found.leaves[name], leaf)
        else:
            assert found.leaves[name] == leaf


@pytest.mark.parametrize("engine", ["eager", "torch"])
@pytest.mark.parametrize("name", CALLS)
def test_the_drop_in_changes_what_it_is_given_as_the_model_does(name: str, engine: str) -> None:
    make, call = CALLS[name]
    model = _randomised(make())
    example = call(2)
    before = tree_of(example)
    result = optimize(model, kwargs=example, engine=engine, keep="all", seconds=0.02)
    assert tree_of(example).leaves == before.leaves  # the example is as it was
    assert result.graphs[0].used, result.graphs[0].verdict
    assert result.verification is not None
    assert result.verification.ok
    for batch in (2, 3):
        _compare(model, result.model, call(batch))
    grafts = grafts_of(result.model)
    assert grafts is not None
    assert grafts.calls == {"forward": 2}


def test_what_is_returned_is_what_was_given() -> None:
    features = {"x": _x()}
    dropin = optimize(_randomised(Features()), kwargs={"features": features}, keep="all", seconds=0.02).model
    with torch.inference_mode():
        found = dropin(features)
    assert found is features
    assert list(found) == ["x", "tokens", "embedding", "shape"]
    call = CALLS["two"][1](2)
    states, more, kept = call["states"], call["more"], call["more"]["x"]
    dropin = optimize(_randomised(Moved()), kwargs=call, keep="all", seconds=0.02).model
    with torch.inference_mode():
        _, (found, within) = dropin(**call)
    assert found is states
    assert within["more"] is more
    assert more["old"] is kept


def test_what_a_tokenizer_says_beside_the_tensors_stays() -> None:
    model = _randomised(Features())
    dropin = optimize(model, (BatchEncoding({"x": _x()}),), keep="all", seconds=0.02).model
    features = BatchEncoding({"x": _x()}, n_sequences=2)
    wanted = model.compute(features["x"])
    with torch.inference_mode():
        assert dropin(features) is features
    assert features.n_sequences == 2
    torch.testing.assert_close(features["tokens"], wanted)


def test_the_names_are_said_and_returned_by_the_graph(tmp_path: Any) -> None:
    features = {"x": _x()}
    model = _randomised(Features())
    result = optimize(model, kwargs={"features": features}, keep="all", seconds=0.02)
    names = ("features['tokens']", "features['embedding']", "features['shape']")
    assert result.graphs[0].sets == names
    assert any(", ".join(names) in note for note in result.notes)
    returned, values = result.graph_module(features=dict(features))
    assert list(returned) == ["x", "tokens", "embedding", "shape"]
    assert len(values) == 3
    result.save(tmp_path / "features.pt2")
    saved = rg.load(tmp_path / "features.pt2")(features=dict(features))
    torch.testing.assert_close(saved["embedding"], model(dict(features))["embedding"])
    removed = optimize(_randomised(Empties()), kwargs={"features": {"x": _x()}}, keep="all", seconds=0.02)
    assert removed.graphs[0].sets == ("features",)


def test_what_is_replaced_by_itself_in_one_precision_alone() -> None:
    class Converts(Pair):
        def forward(self, features: dict[str, Tensor]) -> Tensor:
            features["x"] = features["x"].to(torch.float32)  # the same object, but in the float64 run
            features["y"] = self.compute(features["x"])
            return features["y"].sum(-1)

    model = _randomised(Converts())
    result = optimize(model, ({"x": _x()},), keep="all", engine="eager", seconds=0.02)
    assert result.graphs[0].used, result.graphs[0].verdict
    assert result.graphs[0].sets == ("features['y']",)
    _compare(model, result.model, {"features": {"x": _x(3)}})


def test_a_container_given_twice_runs_the_original(caplog: pytest.LogCaptureFixture) -> None:
    class Two(Pair):
        def forward(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
            one["y"] = self.compute(one["x"])
            other["y"] = self.compute(other["x"])
            return one["y"] + other["y"]

    model = _randomised(Two())
    dropin = optimize(model, ({"x": _x()}, {"x": _x()}), keep="all", seconds=0.02).model
    both = {"x": _x()}
    with torch.inference_mode():
        wanted = {"x": both["x"], "y": model.compute(both["x"])}
        found = dropin(both, both)
    assert "given twice" in caplog.text
    torch.testing.assert_close(found, 2 * wanted["y"])
    torch.testing.assert_close(both, wanted)


def test_an_example_that_gives_one_twice_says_nothing_of_two() -> None:
    class Merged(Pair):
        def forward(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
            one["y"] = self.compute(one["x"])
            other["z"] = one["y"] + 1
            return other["z"]

    model, both = _randomised(Merged()), {"x": _x()}
    result = optimize(model, (both, both), keep="all", engine="eager", seconds=0.02)
    assert not result.graphs[0].used
    assert list(both) == ["x"]
    _compare(model, result.model, {"one": {"x": _x()}, "other": {"x": _x()}})


def test_what_is_moved_is_the_same_object_where_an_engine_runs() -> None:
    call = CALLS["two"][1](2)
    result = optimize(_randomised(Moved()), kwargs=call, engine="onednn", seconds=0.02, keep="all")
    assert result.graphs[0].engine is not None
    more, kept = call["more"], call["more"]["x"]
    with torch.inference_mode():
        result.model(**call)
    assert more["old"] is kept


def test_what_a_hook_puts_there_keeps_the_original() -> None:
    model = _randomised(Features())
    model.register_forward_hook(lambda module, args, result: result.update({"seen": True}))
    result = optimize(model, ({"x": _x()},), keep="all", engine="eager", seconds=0.02)
    assert not result.graphs[0].used
    features: dict[str, Any] = {"x": _x()}
    wanted = dict(features)
    with torch.inference_mode():
        found, expected = result.model(features), model(wanted)
    assert found is features
    assert list(found) == list(expected)
    torch.testing.assert_close(found["embedding"], expected["embedding"])


def test_a_model_of_transformers() -> None:
    class Encoder(PreTrainedModel):
        """Replaces what it is given, as RT-DETR's does."""

        config_class = BertConfig

        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.layers = Pair()
            self.post_init()

        def forward(self, inputs_embeds: list[Tensor]) -> Tensor:
            inputs_embeds[1] = self.layers.compute(inputs_embeds[1])
            return inputs_embeds[0] + inputs_embeds[1]

    model = _randomised(Encoder(BertConfig()))
    result = optimize(model, ([_x(), _x()],), keep="all", engine="eager", seconds=0.02)
    assert result.graphs[0].used
    assert result.graphs[0].sets == ("inputs_embeds[1]",)
    _compare(model, result.model, {"inputs_embeds": [_x(3), _x(3)]})


def test_what_depends_on_the_values_keeps_the_original() -> None:
    class Depends(Pair):
        def forward(self, features: dict[str, Any]) -> Tensor:
            y = self.compute(features["x"])
            features["many" if len(y) > 2 else "few"] = y
            return y

    model = _randomised(Depends())
    result = optimize(model, ({"x": _x()},), keep="all", seconds=0.02)
    for batch in (2, 3, 4):
        _compare(model, result.model, {"features": {"x": _x(batch)}})


def test_what_no_graph_can_return_keeps_the_original() -> None:
    class Puts(Pair):
        def forward(self, features: dict[str, Any]) -> Tensor:
            features["hook"] = io.StringIO()
            return self.compute(features["x"])

    result = optimize(_randomised(Puts()), ({"x": _x()},), keep="all", seconds=0.02)
    assert not result.graphs[0].used
    features: dict[str, Any] = {"x": _x()}
    with torch.inference_mode():
        result.model(features)
    assert "hook" in features


def test_attributes_and_contents_together() -> None:
    class Both(Pair):
        def forward(self, features: dict[str, Any]) -> Tensor:
            self.kept = self.compute(features["x"])
            features["y"] = self.kept * 2
            return self.kept + 1

    model = _randomised(Both())
    result = optimize(model, ({"x": _x()},), keep="all", seconds=0.02)
    assert result.graphs[0].used
    assert result.graphs[0].sets == ("kept", "features['y']")
    _compare(model, result.model, {"features": {"x": _x(3)}})
    torch.testing.assert_close(result.model.kept, model.kept)


def test_under_torch_compile() -> None:
    model = _randomised(Features())
    dropin = optimize(model, ({"x": _x()},), keep="all", engine="eager", seconds=0.02).model
    features = {"x": _x()}
    with torch.inference_mode():
        wanted = model(dict(features))
        found = torch.compile(dropin, backend="eager")(features)
    assert list(found) == list(wanted) == list(features)
    torch.testing.assert_close(found["embedding"], wanted["embedding"])


def test_a_call_that_puts_in_something_else_is_seen() -> None:
    features: dict[str, Any] = {"x": _x()}
    given = Given({"features": features})
    features["y"] = y = _x()
    contents = given.contents(features)
    assert contents.values(given)[0] is y
    assert contents.returned == (((), ("features",)),)
    features["z"] = y
    assert contents.values(given)[-1] == "other entries"
    assert Contents().values(Given({"features": {"x": y}})) == []
