"""An input that is broken gives a result that is: kernels that make a number of a NaN are not given one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import regraft as rg
from helpers import Wrap
from regraft.dropin import Entry, grafts_of
from regraft.optimize import optimize

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
    "gelu": F.gelu,
    "silu": F.silu,
}


class Image(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.function = (function,)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.function[0](self.first(x)))
        return y


class Rows(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.function = (function,)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.function[0](self.first(x))
        if mask is not None:
            y = y * (mask + (x @ x.transpose(-1, -2))).softmax(-1).sum(-1, keepdim=True)
        return self.function[0](self.second(y))


def dropin(model: nn.Module, *inputs: Tensor, **settings: object) -> nn.Module:
    return optimize(model.eval(), inputs, seconds=0.01, keep="all", **settings).model


def finite(model: nn.Module) -> dict[str, bool]:
    return dict(grafts_of(model).entries[0].finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["eager", "onednn"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_number_stays_none(name: str, engine: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for model, x in ((Image(FUNCTIONS[name]), torch.randn(1, 8, 6, 6)), (Rows(FUNCTIONS[name]), torch.randn(4, 32))):
        model, x = model.to(dtype), x.to(dtype)
        served = dropin(model, x, engine=engine)
        for value in (math.nan, math.inf, -math.inf):
            broken = x.clone()
            broken[..., 0, 0] = value
            with torch.no_grad():
                found, expected = served(broken), model(broken)
                assert torch.equal(found.isnan(), expected.isnan())
                assert torch.equal(found.isinf(), expected.isinf())
        before = grafts_of(served).calls["forward"]
        with torch.no_grad():
            assert served(x).isfinite().all()
        assert grafts_of(served).calls["forward"] == before + 1  # what is whole the graph runs


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("largest", [lambda x: x.argmax(-1), lambda x: x.max(-1), lambda x: x.argmin(0)])
def test_the_place_of_a_nan_is_what_it_is_to_torch(engine: str, largest: Callable[[Tensor], Any]) -> None:
    pytest.importorskip(engine)
    model, x = Wrap(lambda self, x: largest(x * 2)), torch.randn(4, 32)
    served = dropin(model, x, engine=engine)
    with torch.no_grad():
        before = grafts_of(served).calls["forward"]
        torch.testing.assert_close(tuple(served(-x)), tuple(model(-x)))
        assert grafts_of(served).calls["forward"] == before + 1
        for place in (3, 31):
            broken = x.clone()
            broken[:, place] = math.nan
            torch.testing.assert_close(tuple(served(broken)), tuple(model(broken)), equal_nan=True)


class Beside(Image):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), x], 1)


class Words(Rows):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function)
        self.table = nn.Embedding(50, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.table(x), mask)


def test_what_a_part_of_the_result_loses() -> None:
    assert finite(dropin(Beside(F.relu), torch.randn(1, 8, 6, 6), engine="onednn")) == {"x": True}


class Residual(Image):
    """A NaN of one pixel stays on the way around, and goes to its neighbours on the other."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function)
        self.second = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_what_is_lost_beside_a_way_on_which_it_stays() -> None:
    model, x = Residual(F.relu), torch.randn(1, 8, 6, 6)
    served = dropin(model, x, engine="onednn")
    assert finite(served) == {"x": True}
    x[0, 0, 2, 2] = math.nan
    with torch.no_grad():
        assert torch.equal(served(x).isnan(), model(x).isnan())


class Corner(Image):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., :3, :3])


def test_what_is_lost_of_a_part() -> None:
    assert finite(dropin(Corner(F.relu), torch.randn(1, 8, 6, 6), engine="onednn")) == {"x": True}


class Notes(Image):
    """Keeps what it makes of its input, and gives what the caller has already."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function)
        self.register_buffer("kept", torch.zeros(1, 16, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.copy_(super().forward(x))
        return x + 1


def test_what_a_buffer_would_lose() -> None:
    model, x = Notes(F.relu), torch.randn(1, 8, 6, 6)
    served = dropin(model, x, transformations="exact", engine="eager")
    assert finite(served) == {"x": True}
    with torch.no_grad():
        served(torch.full_like(x, math.nan))
    assert model.kept.isnan().all()


class Several(nn.Module):
    """Sums what it makes of the tensors in a list or a dictionary, of which the second way keeps a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, given: list[Tensor] | dict[str, Tensor]) -> Tensor:
        x, y = given.values() if isinstance(given, dict) else given
        return F.gelu(self.first(x)), F.relu(self.second(y))


@pytest.mark.parametrize("kind", [list, dict])
def test_a_tensor_among_others(kind: type) -> None:
    model, tensors = Several(), [torch.randn(4, 32), torch.randn(4, 32)]

    def call() -> list[Tensor] | dict[str, Tensor]:
        return [*tensors] if kind is list else dict(zip("ab", tensors, strict=True))

    served = dropin(model, call(), engine="onednn")
    assert finite(served) == {"given": True}
    before = grafts_of(served).calls["forward"]
    with torch.no_grad():
        served(call())
        assert grafts_of(served).calls["forward"] == before + 1
        for tensor in tensors:
            tensor[1, 1] = math.nan
            for found, expected in zip(served(call()), model(call()), strict=True):
                assert torch.equal(found.isnan(), expected.isnan())
            tensor[1, 1] = 0
    assert grafts_of(served).calls["forward"] == before + 1


def remembers(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A model of which what it knows of its cache goes through a function alone."""
    transformers = pytest.importorskip("transformers")

    class Remembers(transformers.PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(transformers.PreTrainedConfig())
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
            keys, values = past_key_values.update(x[:, None], x[:, None], 0)
            known = self.second(function(self.first(keys.sum((1, 2)) + values.sum((1, 2)))))
            return transformers.modeling_outputs.BaseModelOutputWithPast(known, past_key_values)

    return Remembers().eval()


def test_a_cache_is_looked_at() -> None:
    model, x = remembers(F.relu), torch.randint(5, (2, 3, 8)).float()
    from transformers import DynamicCache

    def call(value: float = 0.5) -> dict[str, Any]:
        cache = DynamicCache()
        cache.update(torch.full((2, 1, 3, 8), 0.5), torch.full((2, 1, 3, 8), value), 0)
        return {"x": x, "past_key_values": cache}

    served = optimize(model, kwargs=call(), seconds=0.01, keep="all", engine="onednn").model
    assert finite(served) == {"x": True, "past_key_values": True}
    with torch.no_grad():
        for value, runs in ((0.25, 1), (math.nan, 0)):
            before = grafts_of(served).calls["forward"]
            found, expected = served(**call(value))[0], model(**call(value))[0]
            torch.testing.assert_close(found, expected, equal_nan=True)
            assert found.isnan().all() == math.isnan(value)
            assert grafts_of(served).calls["forward"] == before + runs
    model = remembers(F.gelu)
    assert not finite(optimize(model, kwargs=call(), seconds=0.01, keep="all", engine="onednn").model)


def test_whole_numbers_are_not_asked() -> None:
    assert not finite(dropin(Words(F.relu), torch.randint(50, (2, 5)), engine="onednn"))


def test_a_model_whose_kernels_keep_a_nan_is_not_asked() -> None:
    served = dropin(Image(F.gelu), torch.randn(1, 8, 6, 6), engine="onednn")
    assert not finite(served)


def test_what_is_lost_is_looked_for_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(1, 8, 6, 6)
    served = dropin(Image(F.relu), x, engine="onednn")
    assert finite(served) == {"x": True}
    copied = copy.deepcopy(served)
    assert finite(copied) == {"x": True}
    with torch.no_grad():
        for _ in range(3):
            assert served(x * math.nan).isnan().all()
    (said,) = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert "forward runs for (x: float32 of 4 axes on cpu): x has a NaN or an infinity, which a kernel" in said


def test_large_numbers_are_numbers() -> None:
    x = torch.randn(1, 8, 6, 6)
    served = dropin(Image(F.relu), x, engine="onednn")
    before = grafts_of(served).calls["forward"]
    with torch.no_grad():
        served(torch.full_like(x, 3e38))  # their sum is none
    assert grafts_of(served).calls["forward"] == before + 1


def test_infinities_that_the_example_has_are_taken() -> None:
    x, mask = torch.randn(4, 32), torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    model = Rows(F.relu)
    served = dropin(model, x, mask, engine="onednn")
    assert finite(served) == {"x": True, "mask": False}
    before = grafts_of(served).calls["forward"]
    with torch.no_grad():
        torch.testing.assert_close(served(x, mask), model(x, mask))
        assert grafts_of(served).calls["forward"] == before + 1
        assert torch.equal(served(x, mask * math.nan).isnan(), model(x, mask * math.nan).isnan())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_sizes_than_the_engines_keep_it_too(name: str) -> None:
    torch.manual_seed(0)
    model, x = Image(FUNCTIONS[name]), torch.randn(1, 8, 6, 6)
    served = dropin(model, x, engine="onednn", dynamic_shapes="auto")
    for size in (1, 3):
        broken = x.repeat(size, 1, 1, 1)
        broken[..., 0, 0] = math.nan
        with torch.no_grad():
            assert torch.equal(served(broken).isnan(), model(broken).isnan())


class Strict(Rows):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any():
            raise ArithmeticError("a NaN")
        return super().forward(x, mask)


def test_a_model_that_refuses_a_nan_still_does() -> None:
    x = torch.randn(4, 32)
    served = dropin(Strict(F.gelu), x, engine="onednn")
    with torch.no_grad(), pytest.raises(ArithmeticError):
        served(x * math.nan)


class Sums(TorchFunctionMode):
    """Notes how large the tensors are that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.sum:
            self.sizes.append(args[0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("own_threads", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1, 3, 150, 150),
        torch.randn(2, 3, 150, 150).to(memory_format=torch.channels_last),
        torch.randn(300, 200)[:, ::2].t(),
        torch.randn(1, 300, 1).expand(4, 300, 200),
        torch.randn(2, 3, 150, 150).to(memory_format=torch.channels_last).bfloat16(),
        torch.randn(300, 200).double().t(),
        torch.randn(5).bfloat16(),
        torch.randn(()),
        torch.randn(0, 3),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.stride()}-{x.dtype}",
)
@pytest.mark.parametrize("strictly", [False, True])
def test_threads_that_would_slow_an_engine_are_not_woken(x: Tensor, strictly: bool, own_threads: bool) -> None:
    entry = Entry("forward", rg.trace(nn.ReLU().eval(), (x,)), {"x": x})
    entry.engine = lambda call, unchanged: "the engine's"
    entry.engine.own_threads = own_threads
    entry.finite = {"x": strictly}
    with Sums() as sums:
        assert entry.run({"x": x}) == "the engine's"
    serial = 1 << 15  # from here on torch shares a sum among its threads
    by_numpy = own_threads and x.numel() >= serial and x.dtype is torch.float32
    assert all(size < serial for size in sums.sizes) if own_threads else sums.sizes == [x.numel()]
    assert sum(sums.sizes) == (0 if by_numpy else x.numel()), "each number is looked at once"
    for place in (0, x.numel() // 2, x.numel() - 1) if x.numel() else ():
        for value in (math.nan, math.inf, -math.inf):
            broken = x.clone(memory_format=torch.preserve_format)
            broken[tuple(torch.unravel_index(torch.tensor(place), x.shape))] = value
            if strictly or math.isnan(value):
                with pytest.raises(ValueError, match="x has a NaN"):
                    entry.run({"x": broken})
            else:
                assert entry.run({"x": broken}) == "the engine's"
