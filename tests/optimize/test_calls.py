"""However a call is written, a drop-in computes what the original does, and by its graph where it is the same call."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from models import every_engine, ids
from torch import Tensor, nn
from transformers_models import bert

import regraft as rg
from regraft.dropin import Reader, grafts_of


def row(batch: int = 2) -> Tensor:
    return torch.randn(batch, 6)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: float | None = 2.0, flag: bool | None = True) -> Tensor:
        y = self.layer(x) if scale is None else self.layer(x) * scale
        return y if flag else -y


class Masked(Scaled):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(x) if mask is None else self.layer(x) * mask


class Open(Scaled):
    def forward(self, x: Tensor, **other: Any) -> Tensor:
        scale = other.get("scale", 2.0)
        return self.layer(x) * (5.0 if scale is None else scale)


class Starred(Scaled):
    def forward(self, first: Tensor, sign: int | None = 1, *others: Tensor, scale: float = 1.0, **more: Any) -> Tensor:
        result = self.layer(first) * (3 if sign is None else sign)
        for place, other in enumerate(others, start=1):
            result = result + place * self.layer(other)
        return result * scale + len(more)


class Unnamed(Scaled):
    def forward(self, x: Tensor, y: Tensor | None = None, z: float = 1.0, /, scale: float = 1.0) -> Tensor:
        result = self.layer(x) * scale - z
        return result if y is None else result * self.layer(y)


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Starred()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


def dropin_of(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    result = rg.optimize(model.eval(), args, kwargs, keep="all", seconds=0.01)
    assert result.verification is not None
    assert result.verification.ok
    return result.model


def same(model: nn.Module, dropin: nn.Module, graph: bool, *args: Any, **kwargs: Any) -> None:
    """The same result or error, and by the graph or not."""
    grafts = grafts_of(dropin)
    assert grafts is not None
    before = sum(grafts.calls.values())
    expected, made = outcome(model, args, kwargs), outcome(dropin, args, kwargs)
    assert torch.allclose(made, expected, atol=1e-5) if isinstance(expected, Tensor) else made == expected
    assert (sum(grafts.calls.values()) > before) == graph


def outcome(model: nn.Module, args: Any, kwargs: Any) -> Tensor | str:
    with torch.no_grad():
        try:
            result: Tensor = model(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return result


def test_none_is_not_a_default_that_is_something_else() -> None:
    model = Scaled()
    dropin = dropin_of(model, row())
    same(model, dropin, True, row(), 2.0, True)
    for args in ((None,), (2.0, None), (None, None), (2,), (2.0, 1)):
        same(model, dropin, False, row(), *args)
    dropin = dropin_of(model, row(), None)
    same(model, dropin, True, row(), None)
    same(model, dropin, True, row(3), scale=None, flag=True)
    for args in ((), (2.0,), (3.0,), (None, None), (2.0, None)):
        same(model, dropin, False, row(), *args)


class Sized(Scaled):
    def forward(self, x: Tensor, scale: float | None = 2.0, sizes: tuple[int, ...] = (1, 2)) -> Tensor:
        return super().forward(x, scale) + sum(sizes)


@pytest.mark.parametrize("scale", [None, 3.0])
def test_an_argument_that_is_left_out_is_not_the_one_of_the_example(scale: float | None) -> None:
    model = Sized()
    dropin = dropin_of(model, row(), scale)
    same(model, dropin, True, row(), scale)
    same(model, dropin, False, row(), sizes=(1, 2))
    same(model, dropin, False, row(), sizes=[1, 2])
    same(model, dropin_of(model, row(), sizes=(1, 2)), False, row(), scale)


def test_none_for_an_argument_that_has_to_be_given() -> None:
    model = Masked()
    dropin = dropin_of(model, row(), None)
    same(model, dropin, True, row(), None)
    same(model, dropin, True, row(), mask=None)
    same(model, dropin, False, row())
    same(model, dropin, False, row(), row())


def test_none_for_an_argument_that_only_the_model_knows() -> None:
    model = Open()
    dropin = dropin_of(model, row())
    same(model, dropin, True, row())
    same(model, dropin, False, row(), scale=None)
    same(model, dropin, False, row(), scale=2.0)
    dropin = dropin_of(model, row(), scale=None)
    same(model, dropin, True, row(), scale=None)
    same(model, dropin, False, row())


def test_an_argument_that_is_given_twice_is_refused_as_by_the_model() -> None:
    model = Scaled()
    same(model, dropin_of(model, row()), False, row(), x=row())
    with pytest.raises(TypeError, match="cannot be called with these arguments"):
        rg.optimize(model, (row(),), {"x": row()})


def test_more_arguments_than_there_are_is_what_the_error_says() -> None:
    with pytest.raises(TypeError, match=r"Linear\.forward cannot be called .*: too many positional arguments"):
        rg.optimize(nn.Linear(2, 2).eval(), (torch.ones(1, 2), torch.ones(1, 2)))


@pytest.mark.parametrize("setting", ["use_cache", "output_attentions", "output_hidden_states", "return_dict"])
@pytest.mark.parametrize("configured", [True, False])
def test_a_setting_of_a_pretrained_model_is_what_its_config_says_unless_its_forward_does(setting, configured) -> None:
    model = bert()
    model.set_attn_implementation("eager")  # which alone may be asked for the weights of attention
    setattr(model.config, setting, configured)
    reader = Reader(model)
    assert reader.read((1,), {setting: None, "head_mask": None}) == {"input_ids": 1}
    assert reader.read((1,), {setting: configured}) == {"input_ids": 1}
    assert reader.read((1,), {setting: not configured}) == {"input_ids": 1, setting: not configured}
    forward = lambda input_ids=None, **kwargs: None
    model.forward = forward
    forward.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)
            for name, value in (("input_ids", None), (setting, not configured))
        ]
    )
    reader = Reader(model)
    assert reader.read((1,), {setting: not configured}) == {"input_ids": 1}
    assert reader.read((1,), {setting: configured}) == {"input_ids": 1, setting: configured}
    assert reader.read((1, None), {}) == {"input_ids": 1, setting: None}


def test_a_pretrained_model_takes_none_for_nothing() -> None:
    model = bert()
    dropin = dropin_of(model, input_ids=ids())
    grafts = grafts_of(dropin)
    assert grafts is not None
    with torch.no_grad():
        made = dropin(ids(), None, token_type_ids=None, position_ids=None).logits
        assert torch.allclose(made, model(ids()).logits, atol=1e-5)
    assert grafts.calls == {"forward": 1}


class Call(NamedTuple):
    by_graph: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


CALLS: list[tuple[type[nn.Module], list[Call]]] = [
    (
        Starred,
        [
            Call(True, (row(5), 1, row(5), row(5)), {"scale": 1.0}),
            Call(False, (row(), None, row(), row()), {}),
            Call(False, (row(), 1, row()), {}),
            Call(False, (row(),), {}),
            Call(False, (row(), 1, row(), row()), {"scale": 2.0}),
            Call(False, (row(), 1, row()), {"others_1": row()}),
            Call(False, (row(),), {"others_0": row(), "others_1": row()}),
            Call(False, (), {}),
        ],
    ),
    (
        Starred,
        [
            Call(True, (row(5), None, row(5)), {"scale": 3.0}),
            Call(False, (row(), 1, row()), {"scale": 3.0}),
        ],
    ),
    (
        Starred,
        [Call(True, (row(5),), {}), Call(True, (), {"first": row()}), Call(False, (row(), 1, row()), {})],
    ),
    (
        Unnamed,
        [
            Call(True, (row(5),), {}),
            Call(True, (row(), None, 1.0, 1.0), {}),
            Call(False, (row(), None, 2.0), {}),
            Call(False, (row(), row()), {}),
            Call(False, (), {"x": row()}),
            Call(False, (row(),), {"y": row()}),
        ],
    ),
    (
        Unnamed,
        [
            Call(True, (row(5), row(5), 2.0, 4.0), {}),
            Call(False, (row(), row(), 2.0), {}),
            Call(False, (row(), row()), {"scale": 4.0}),
        ],
    ),
    (Unnamed, [Call(True, (row(5), None, 2.0), {}), Call(False, (row(),), {})]),
    (
        Handing,
        [Call(True, (row(5), 1, row(5)), {}), Call(False, (row(),), {}), Call(False, (), {"args_0": row()})],
    ),
    (Handing, [Call(True, (), {"first": row(5)}), Call(False, (row(),), {})]),
]


@pytest.mark.parametrize(("kind", "calls"), CALLS)
def test_arguments_that_have_no_name(kind, calls: list[Call]) -> None:
    first, model = calls[0], kind().eval()
    smaller = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor[:2], first)
    dropin = dropin_of(model, *smaller.args, **smaller.kwargs)
    for call in calls:
        same(model, dropin, call.by_graph, *call.args, **call.kwargs)
    for copied in (copy.deepcopy(dropin), pickle.loads(pickle.dumps(dropin))):
        same(model, copied, True, *first.args, **first.kwargs)
    wide = torch.utils._pytree.tree_map_only(Tensor, Tensor.double, first)
    same(copy.deepcopy(model).double(), dropin.double(), True, *wide.args, **wide.kwargs)


def test_arguments_that_have_no_name_and_an_engine(monkeypatch) -> None:
    every_engine(monkeypatch, lambda flat: lambda inputs: [flat.module(*inputs)])
    model = Starred().eval()
    result = rg.optimize(model, (row(), 1, row()), engine="inductor", keep="all", seconds=0.01)
    same(model, result.model, True, row(), 1, row())
    assert result.graphs[0].engine.engine == "inductor"


def test_arguments_that_have_no_name_compiled_and_saved(tmp_path) -> None:
    torch.compiler.reset()
    model = Starred().eval()
    result = rg.optimize(model, (row(), 1, row()), keep="all", seconds=0.01)
    compiled = torch.compile(result.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for args in ((row(), 1, row()), (row(5), 1, row(5)), (row(),), (row(), None, row())):
            assert torch.allclose(compiled(*args), model(*args), atol=1e-5)
        loaded = rg.load(result.save(tmp_path / "program.pt2"))
        args = (row(), 1, row())
        assert torch.allclose(loaded(*args), model(*args), atol=1e-5)


def test_a_name_that_begins_like_unnamed_arguments_is_a_name() -> None:
    class Handed(Scaled):
        def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
            return self.layer(named["inputs_embeds"])

    model = Handed()
    same(model, dropin_of(model, inputs_embeds=row()), True, inputs_embeds=row())
