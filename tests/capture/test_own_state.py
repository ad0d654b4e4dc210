"""What a model keeps on itself between two calls, and who asks for it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regraft import CaptureError, optimize
from regraft.capture import trace
from regraft.capture.codegen import CallingCodeGen
from regraft.capture.own_state import changed_meanwhile, set_meanwhile, used_meanwhile
from regraft.capture.probing import Probe
from regraft.capture.signature import take_apart
from regraft.core.fx_private import codegen_of


class Counting(nn.Module):
    shared: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, None
        self.gone = 1

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        return x + (self.count if offset is None else offset)

    def note(self, x: torch.Tensor) -> None:
        self.count, self.last, self.shared = self.count + 1, x, 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Counting(), Counting()

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        return self.left(x, offset) + self.right(x, x)


OWN = {("left", "count"), ("left", "last"), ("right", "count")}


def test_what_is_set() -> None:
    model, before = Pair(), nn.Module.__setattr__
    model.right.count = 5
    with set_meanwhile(model) as found:
        Counting().count = 1  # of no module of the model
        model.left.register_buffer("table", torch.ones(1))
        model.left.table = torch.ones(2)
        model.left.note(torch.ones(1))
        model.right.count = 5
        model.right.new = 1
        del model.right.gone
    assert found == {*OWN, ("left", "shared"), ("right", "new")}
    assert nn.Module.__setattr__ is before


def test_who_is_asked() -> None:
    model, x = Pair(), torch.ones(2)
    for call, expected in (((x,), {("left", "count")}), ((x, x), set())):
        with used_meanwhile(model, OWN) as used:
            gm = trace(model, call)
        assert used.keys() == expected
        assert torch.equal(gm(*call), model(*call))
    assert "count" not in vars(Counting)
    assert (model.left.count, hasattr(model.left, "last"), hasattr(Counting, "last")) == (0, True, False)


def test_every_way_of_asking_counts() -> None:
    model = Pair()

    def assign() -> None:
        model.left.last = torch.ones(1)

    def delete() -> None:
        del model.left.last

    asking = [
        (lambda: getattr(model.left, "last", None), "get"),
        (lambda: hasattr(model.left, "last"), "get"),
        (assign, "set"),
        (delete, "delete"),
    ]
    for ask, how in asking:
        with used_meanwhile(model, OWN) as used:
            assert not hasattr(Counting, "last")
            ask()
            assert vars(model.left).get("last", 0) is getattr(model.left, "last", 0)  # which is no more the first
        assert used == {("left", "last"): how}
        assert not hasattr(Counting, "last")
    assert not hasattr(model.left, "last")


class Deriving(Counting):
    @property
    def doubled(self) -> int:
        return self.count * 2


def test_what_its_class_has_too() -> None:
    model = Pair()
    model.right = Deriving()
    model.left.shared = 2
    asked = {("left", "shared"), ("right", "shared")}
    with used_meanwhile(model, asked) as used:
        assert (Counting.shared, model.right.shared, hasattr(Counting, "shared")) == (None, None, True)
        assert used == {("right", "shared"): "get"}
        assert model.left.shared == 2
        model.right.shared = 3
        assert (model.left.shared, model.right.shared, Counting().shared) == (2, 3, None)
    assert used == {("right", "shared"): "get", ("left", "shared"): "get"}
    assert (vars(Counting)["shared"], "shared" in vars(Deriving)) == (None, False)
    with used_meanwhile(model, asked) as used:
        model.left.shared = 4
    assert used == {("left", "shared"): "set"}


def test_a_property_counts_as_asked() -> None:
    model = Pair()
    model.right = Deriving()
    with used_meanwhile(model, {("right", "doubled")}) as used:
        pass
    assert used == {("right", "doubled"): "get"}
    assert isinstance(vars(Deriving)["doubled"], property)


class Keeping(nn.Module):
    """A layer, and a forward that is given; what it keeps is `kept`."""

    calls = 0

    def __init__(self, kept: object, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("level", torch.rand(4) + 1)
        self.kept = kept
        self.function = (function,)

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, self.layer(x))


def _replaced_buffer(m: Any, y: Tensor) -> Tensor:
    m.level = 0.9 * m.level + 0.1 * y.mean(0)
    return y - m.level


def _replaced_parameter(m: Any, y: Tensor) -> Tensor:
    m.layer.bias = nn.Parameter(m.layer.bias.detach() * 2)
    return y


def _replaced_tensor(m: Any, y: Tensor) -> Tensor:
    m.kept = m.kept * 2
    return y + m.kept


def _counted(m: Any, y: Tensor) -> Tensor:
    m.kept += 1
    return y / m.kept


def _appended(m: Any, y: Tensor) -> Tensor:
    m.kept.append(y.detach())
    return y * len(m.kept)


def _entered(m: Any, y: Tensor) -> Tensor:
    m.kept["sum"] = m.kept["sum"] + 1
    return y + m.kept["sum"]


def _in_an_object(m: Any, y: Tensor) -> Tensor:
    m.kept.sum = m.kept.sum + y.mean(0)
    return y + m.kept.sum


def _in_the_class(m: Any, y: Tensor) -> Tensor:
    type(m).calls += 1
    return y / type(m).calls


CARRYING: dict[str, tuple[str, Callable[[], Keeping]]] = {
    "a buffer that is replaced": ("level", lambda: Keeping(None, _replaced_buffer)),
    "a parameter that is replaced": ("layer.bias", lambda: Keeping(None, _replaced_parameter)),
    "a tensor that is replaced": ("kept", lambda: Keeping(torch.ones(4), _replaced_tensor)),
    "a number": ("kept", lambda: Keeping(0, _counted)),
    "a list": ("kept", lambda: Keeping([], _appended)),
    "a deque": ("kept", lambda: Keeping(deque(), _appended)),
    "a dictionary": ("kept", lambda: Keeping({"sum": torch.zeros(4)}, _entered)),
    "an object": ("kept", lambda: Keeping(SimpleNamespace(sum=torch.zeros(4)), _in_an_object)),
    "its class": (r"Keeping\.calls", lambda: Keeping(None, _in_the_class)),
}


@pytest.mark.parametrize("how", [trace, optimize])
@pytest.mark.parametrize("name", CARRYING)
def test_what_the_next_call_computes_with_is_refused_by_name(name: str, how: Callable[..., object]) -> None:
    named, make = CARRYING[name]
    model, x = make().eval(), torch.randn(3, 4)
    attributes, kept, state = dict(vars(model)), repr(model.kept), copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=rf"from one call to the next \({named}\).*written in place"):
        how(model, (x,))
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert repr(model.kept) == kept
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def _in_place(m: Any, y: Tensor) -> Tensor:
    m.kept = y.detach()
    m.level.mul_(2)
    return y + m.level


def _noted(m: Any, y: Tensor) -> Tensor:
    m.kept = y
    return y


def _made_once(m: Any, y: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.arange(4.0)
    return y + m.kept


def _put_back(m: Any, y: Tensor) -> Tensor:
    bias = m.layer.bias
    m.layer.bias = nn.Parameter(bias.detach() * 2)
    z = m.layer(y)
    m.layer.bias = bias
    return z


def _drawn(m: Any, y: Tensor) -> Tensor:
    m.kept = y
    return y * torch.rand(4)


FOLLOWED = {"in place": _in_place, "noted": _noted, "made once": _made_once, "put back": _put_back, "drawn": _drawn}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_makes_no_difference_to_the_graph_is_captured(name: str) -> None:
    model, x = Keeping(None, FOLLOWED[name]).eval(), torch.randn(3, 4)
    other = copy.deepcopy(model)
    gm = trace(model, (x,))
    assert model.kept is None
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        expected = other(x + seed)
        torch.manual_seed(seed)
        torch.testing.assert_close(gm(x + seed), expected, rtol=0, atol=0)


def test_a_model_that_answers_alike_is_not_asked_what_its_graph_does() -> None:
    model, other, x = Keeping(None, _noted).eval(), Keeping(None, _noted).eval(), torch.randn(3, 4)
    gm = trace(other, (x,))
    codegen = codegen_of(gm.graph)
    assert isinstance(codegen, CallingCodeGen)
    assert Probe(model, gm, take_apart(model, (x,), {}), codegen.calling).answers_alike()


def test_without_values_nothing_is_run_twice() -> None:
    model = Keeping(0, _counted).to("meta").eval()
    del model.level
    gm = trace(model, (torch.randn(3, 4, device="meta"),))
    assert gm(torch.randn(3, 4, device="meta")).is_meta


def test_what_is_replaced_or_filled_has_a_name() -> None:
    model = Keeping([1], _counted)
    with changed_meanwhile(model) as changed:
        model.kept.append(2)
        model.layer.bias = nn.Parameter(torch.zeros(4))
        model.level = torch.ones(4)
        model.new = None
        del model.function
        model.layer.weight.data.zero_()
        model.layer.register_forward_hook(lambda *_: None)
    assert changed == {"kept", "layer.bias", "level", "new", "function"}
