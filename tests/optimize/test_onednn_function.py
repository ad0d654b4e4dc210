"""What a program of oneDNN Graph is made of goes when its engine goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regraft.capture import trace
from regraft.optimize.engines import onednn_function, onednn_graph
from regraft.optimize.engines.flat import Flat
from regraft.optimize.engines.onednn_forms import Forms
from regraft.optimize.engines.onednn_function import as_function, empty
from regraft.optimize.engines.onednn_pieces import in_pieces

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """Has a weight that a program takes, and one that it computes from others when it is made."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.rand(16) + 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.activation(self.first(x)))
        return torch.nn.functional.linear(y, self.second.weight.T * self.scale)[:, :5] + self.scale[:5]


def _memories(model: nn.Module) -> list[Any]:
    return [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]


@pytest.mark.parametrize("longest", [1000, 2])
def test_the_weights_go_when_the_program_goes(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(onednn_graph, "in_pieces", partial(in_pieces, longest=longest))
    model = Layers().eval()
    memories = _memories(model)
    flat = Flat(trace(model, (X,)), {"x": X})
    run = onednn_graph.build(flat)
    with torch.no_grad():
        torch.testing.assert_close(run([X])[0], model(X))
    del model, flat
    gc.collect()
    assert all(memory() is not None for memory in memories)  # the program has them
    del run
    gc.collect()
    assert [memory() for memory in memories] == [None] * len(memories)


def test_so_they_do_where_no_program_can_be_made() -> None:
    model = Layers(partial(torch.nn.functional.gelu, approximate="tanh")).eval()
    memories = _memories(model)
    flat = Flat(trace(model, (X,)), {"x": X})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn_graph, "_expect_understood", _refuse)
        with pytest.raises(ValueError, match="not this one"):
            onednn_graph.build(flat)
    del model, flat
    gc.collect()
    assert [memory() for memory in memories] == [None] * len(memories)


def _refuse(_: Any) -> None:
    raise ValueError("not this one")


@pytest.mark.parametrize("layers", [1, 7])
def test_no_class_stays(layers: int) -> None:
    flat = Flat(trace(nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers))).eval(), (X,)), {"input": X})
    gc.collect()
    before = set(nn.Module.__subclasses__())
    run = onednn_graph.build(flat)
    gc.collect()
    assert not set(nn.Module.__subclasses__()) - before
    del run


def test_a_function_computes_what_the_module_does_and_does_not_need_it() -> None:
    model = Layers().eval()
    forms = Forms(trace(model, (X,)), (X,))
    given = (X, *forms.beside)
    traced: Any = torch.jit.trace(forms, given, check_trace=False)
    frozen: Any = torch.jit.freeze(traced)
    program = as_function(frozen)
    assert program is not frozen  # if what is used here has moved, this fails
    for module in (traced, frozen):
        empty(module)
        assert not list(module.graph.nodes())
    with torch.no_grad():
        torch.testing.assert_close(forms.complete(program(*given))[0], model(X))


def test_a_module_that_has_a_state_stays_a_module() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.count

    traced: Any = torch.jit.trace(Counts().eval(), (X,), check_trace=False)
    frozen: Any = torch.jit.freeze(traced, preserved_attrs=["count"])
    assert as_function(frozen) is frozen


@pytest.mark.parametrize("missing", ["function", "erasing"])
def test_without_what_is_used_here_the_module_runs(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    model = Layers().eval()
    if missing == "function":
        monkeypatch.delattr(torch._C, "_create_function_from_graph")
    else:
        monkeypatch.setattr(onednn_function, "hasattr", lambda *_: False, raising=False)
    run = onednn_graph.build(Flat(trace(model, (X,)), {"x": X}))
    with torch.no_grad():
        torch.testing.assert_close(run([X])[0], model(X))


def test_what_was_traced_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(Layers):
        """Adds what is the same in each call, and so a constant of its trace."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.arange(20.0).reshape(4, 5).sin()

    steady: list[Any] = []

    class Spied(onednn_graph.Forms):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tensors = filter(torch.is_tensor, [*self.known.steady.values(), *self.beside])
            steady.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)

    monkeypatch.setattr(onednn_graph, "Forms", Spied)
    model = Table().eval()
    flat = Flat(trace(model, (X,)), {"x": X})
    run = onednn_graph.build(flat)
    with torch.no_grad():
        torch.testing.assert_close(run([X])[0], model(X))
    del model, flat, run
    gc.collect()
    assert steady
    assert [memory() for memory in steady] == [None] * len(steady)
