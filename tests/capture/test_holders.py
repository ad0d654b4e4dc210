"""Where a model may keep something, and that it holds afterwards what it held."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from regraft import CaptureError
from regraft.capture import trace
from regraft.capture.holders import holders
from regraft.capture.torch_private import dict_version
from regraft.capture.untouched import untouched


class Own(list[Any]):
    """Is emptied by its own rules."""

    def clear(self) -> None:
        raise AssertionError("nobody else is to empty it")


class OwnTable(dict[str, Any]):
    """Is filled by its own rules, as a result of transformers is."""

    def update(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nobody else is to fill it")


class Part(nn.Module):
    seen: ClassVar[Any] = None
    table: ClassVar[dict[str, Any]] = {"kept": None}

    def __init__(self, kept: object = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("level", torch.rand(4))
        self.kept: Any = kept
        self.leave: tuple[Callable[[Part, Tensor], object], ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for leave in self.leave:
            leave(self, y)
        return y


def _class(m: Part, y: Tensor) -> None:
    type(m).seen = y


def _new_in_class(m: Part, y: Tensor) -> None:
    type(m).news = y  # type: ignore[attr-defined]


MAKES: dict[str, tuple[Callable[[], object], Callable[[Part, Tensor], object]]] = {
    "list": (lambda: [1], lambda m, y: m.kept.append(y)),
    "a place of a list": (lambda: [1], lambda m, y: m.kept.__setitem__(0, y)),
    "deque": (lambda: deque([1], maxlen=1), lambda m, y: m.kept.append(y)),
    "set": (lambda: {1}, lambda m, y: m.kept.add(y)),
    "dictionary": (lambda: {"a": 1}, lambda m, y: m.kept.update(a=y)),
    "a new key": (lambda: {"a": 1}, lambda m, y: m.kept.update(b=y)),
    "another key": (lambda: {"a": None}, lambda m, y: m.kept.update(b=m.kept.pop("a"))),
    "ordered dictionary": (lambda: OrderedDict(a=1), lambda m, y: m.kept.update(a=y)),
    "default dictionary": (lambda: defaultdict(list), lambda m, y: m.kept["a"].append(y)),
    "its own list": (lambda: Own([1]), lambda m, y: m.kept.append(y)),
    "its own dictionary": (lambda: OwnTable(a=1), lambda m, y: m.kept.__setitem__("a", y)),
    "object": (lambda: SimpleNamespace(a=1), lambda m, y: setattr(m.kept, "a", y)),
    "a new attribute": (SimpleNamespace, lambda m, y: setattr(m.kept, "a", y)),
    "in a tuple": (lambda: ({"a": 1},), lambda m, y: m.kept[0].update(a=y)),
    "far away": (lambda: SimpleNamespace(a=[SimpleNamespace(b={})]), lambda m, y: m.kept.a[0].b.update(c=y)),
    "class": (lambda: None, _class),
    "a new attribute of the class": (lambda: None, _new_in_class),
    "in the class": (lambda: None, lambda m, y: m.table.update(kept=y)),
    "attribute": (lambda: None, lambda m, y: setattr(m, "kept", y)),
    "new attribute": (lambda: None, lambda m, y: setattr(m, "other", y)),
    "buffer": (lambda: None, lambda m, y: setattr(m, "level", y)),
    "parameter": (lambda: None, lambda m, y: setattr(m.layer, "bias", nn.Parameter(y[0].detach()))),
    "module": (lambda: None, lambda m, y: setattr(m, "layer", nn.Identity())),
    "hook": (lambda: None, lambda m, y: m.layer.register_forward_hook(lambda *_: None)),
}


def picture(m: Part) -> str:
    own = {name: value for name, value in vars(m).items() if name != "leave"}
    tables = [(part._parameters, part._buffers, part._modules, part._forward_hooks) for part in m.modules()]
    return repr((own, tables, Part.seen, Part.table, hasattr(Part, "news")))


@pytest.mark.parametrize("name", MAKES)
def test_capture_leaves_nothing_behind(name: str) -> None:
    make, leave = MAKES[name]
    model = Part(make()).eval()
    whole = nn.Sequential(nn.Identity(), model)
    for part in (model, whole):
        before, kept = picture(model), model.kept
        model.leave = (leave,)
        with suppress(CaptureError):
            trace(part, (torch.randn(3, 4),))
        assert picture(model) == before
        assert model.kept is kept
        with untouched(part):
            model(torch.randn(3, 4))
            assert picture(model) != before
        assert picture(model) == before
        model.leave = ()


NAMED = {"parameter": "layer.bias", "buffer": "level", "module": "layer", "class": "Part.seen", "hook": None}
NAMED |= {"a new attribute of the class": "Part.news", "in the class": "Part.table", "new attribute": "other"}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_what_changed_is_named(name: str, inside: bool) -> None:
    make, leave = MAKES[name]
    model = Part(make())
    before = holders(nn.ModuleDict({"part": model}) if inside else model)
    leave(model, torch.zeros(2, 4))
    named = NAMED.get(name, "kept")
    path = "" if not inside or str(named).startswith("Part.") else "part."
    assert {each for holder in before for each in holder.changed()} == ({f"{path}{named}"} if named else set())
    for holder in before:
        holder.restore()
    assert not [each for holder in before for each in holder.changed()]


def test_what_refers_to_itself_and_what_is_far_away() -> None:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    model = Part([ring, SimpleNamespace(layer=torch.nn.Linear(1, 1))])
    before = holders(model)
    assert len({id(holder.what) for holder in before}) == len(before)
    model.kept.append([[[[[]]]]])
    deep = model.kept[-1][0][0][0]
    whats = {id(holder.what) for holder in holders(model)}
    assert id(model.kept[-1][0][0]) in whats
    assert id(deep) not in whats


def test_what_is_no_state_is_let_alone() -> None:
    class Made(type):
        pass

    Color = enum.Enum("Color", ["RED"])
    values = [torch.zeros(1), Part, Part(), Made("Class", (), {}), Color.RED, torch, torch.fx.Graph(), picture]
    whats = {id(holder.what) for holder in holders(nn.Sequential())}
    model = nn.Sequential()
    model.kept = values  # type: ignore[assignment]
    assert {id(holder.what) for holder in holders(model)} - whats >= {id(values)}
    assert not {id(holder.what) for holder in holders(model)} & set(map(id, values))


def test_a_class_above_is_put_back() -> None:
    class Below(Part):
        pass

    model = Below()
    with untouched(model):
        Part.seen = 1
    assert Part.seen is None


def test_what_nobody_touched_is_not_written_to() -> None:
    model = Part([{"a": 1}, SimpleNamespace(b=2)])
    before = holders(model)
    dicts = [h.what for h in before if isinstance(h.what, dict)]
    dicts += [vars(h.what) for h in before if isinstance(h.what, (nn.Module, SimpleNamespace))]
    assert len(dicts) > 10
    versions = list(map(dict_version, dicts))
    for holder in before:
        holder.restore()
    assert list(map(dict_version, dicts)) == versions
