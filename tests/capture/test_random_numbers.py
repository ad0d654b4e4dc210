"""What a model draws: torch's numbers are drawn by its graph; a seed, and what others draw, are refused by name."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regraft as rg
from helpers import Wrap
from regraft.capture.random_numbers import others_drawn

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
DEFAULT = torch.random.default_generator
GENERATOR = torch.Generator()


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.randn(4)


def put_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn(4)
    torch.set_rng_state(state)
    return x + noise


SETTING: dict[str, Callable[[Tensor], Tensor]] = {
    "a seed": lambda x: x + torch.randn(4) if torch.manual_seed(0) else x,
    "any seed": lambda x: x + torch.randn(4) if torch.seed() else x,
    "a fork": forked,
    "a state": put_back,
    "a generator": lambda x: x + torch.randn(4, generator=torch.Generator().manual_seed(3)),
    "a generator that is kept": lambda x: x.clone().normal_(generator=GENERATOR),
    "torch's own": lambda x: torch.bernoulli(x.sigmoid(), generator=DEFAULT),
}


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("name", SETTING)
def test_what_sets_or_brings_a_generator_is_refused_with_the_cure(name: str, sizes: str | None) -> None:
    model = Wrap(lambda _, x: SETTING[name](x)).eval()
    with pytest.raises(rg.CaptureError, match=r"random generator.*\n.*leave the seed to whoever calls.* a buffer"):
        rg.trace(model, (X,), dynamic_shapes=sizes)
    assert torch.random.default_generator is DEFAULT


def by_python(x: Tensor) -> Tensor:
    return x * random.random()


def by_numpy(x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


@pytest.mark.parametrize(("function", "whose"), [(by_python, "Python"), (by_numpy, "NumPy")])
def test_numbers_of_others_that_are_computed_with_are_refused(function: Callable[..., Tensor], whose: str) -> None:
    random.seed(5)
    numpy.random.seed(5)
    with pytest.raises(rg.CaptureError, match=rf"numbers of {whose}'s random generator.*torch\.rand\(\(\)\)"):
        rg.trace(Wrap(lambda _, x: function(x)), (X,), dynamic_shapes="auto")
    found = random.random(), numpy.random.rand()
    random.seed(5)
    numpy.random.seed(5)
    assert found == (random.random(), numpy.random.rand()), "capture leaves the generators as they were"


@pytest.mark.parametrize(
    ("function", "whose"),
    [(by_python, "Python's"), (by_numpy, "NumPy's"), (lambda x: x + torch.randn(4), "torch's")],
)
def test_without_an_example_numbers_that_were_drawn_for_the_graph_are_refused(
    function: Callable[..., Tensor], whose: str
) -> None:
    with pytest.raises(rg.CaptureError, match=rf"numbers of {whose} random generator.*rg\.trace\(model, args"):
        rg.symbolic_trace(Wrap(lambda _, x: function(x)))


def test_without_an_example_numbers_that_the_graph_draws_are_drawn_alike() -> None:
    model = Wrap(lambda _, x: torch.dropout(x + torch.randn_like(x), 0.5, True))
    gm = rg.symbolic_trace(model)
    assert torch.equal(*(torch.manual_seed(7) and each(X) for each in (gm, model)))


def test_without_an_example_it_may_be_among_fake_tensors() -> None:
    with FakeTensorMode():
        model = torch.nn.Linear(4, 4)
        assert rg.symbolic_trace(model).weight is model.weight


@pytest.mark.parametrize("name", ["a seed", "any seed", "a fork", "a state"])
def test_without_an_example_a_seed_is_refused_as_well(name: str) -> None:
    with pytest.raises(rg.CaptureError, match="leave the seed to whoever calls"):
        rg.symbolic_trace(Wrap(lambda _, x: SETTING[name](x)))


def test_captures_that_overlap_leave_the_generator() -> None:
    first, second = others_drawn(), others_drawn()
    for step in (first.__enter__, second.__enter__):
        step()
    for each in (first, second):
        each.__exit__(None, None, None)
    assert torch.random.default_generator is DEFAULT


def test_another_thread_may_seed_meanwhile() -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        done = []
        thread = threading.Thread(target=lambda: done.append(torch.manual_seed(3)))
        thread.start()
        thread.join()
        assert done
        return x * 2

    assert torch.equal(rg.trace(Wrap(forward), (X,))(X), X * 2)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
@pytest.mark.parametrize("noise", [False, True])
def test_those_that_decide_nothing_are_in_nobodys_way(draw: Callable[[], float], noise: bool) -> None:
    """As in models that ask whether to leave out a layer, and then whether they are being trained."""

    def forward(module: Any, x: Tensor) -> Tensor:
        left_out = draw() < 0.5
        return x if module.training and left_out else x * 2 + (torch.randn_like(x) if noise else 1)

    model = Wrap(forward).eval()
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    for x in (X, torch.cat((X, X))):
        assert torch.equal(*(torch.manual_seed(7) and each(x) for each in (gm, model)))


def test_what_torch_draws_is_drawn_alike_of_one_row_as_well() -> None:
    model = Wrap(lambda _, x: x + torch.randn_like(x) * torch.rand(())).eval()
    state = torch.get_rng_state()
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    assert torch.equal(torch.get_rng_state(), state), "capture leaves the generator as it was"
    for x in (X, X[:1]):
        assert torch.equal(*(torch.manual_seed(7) and each(x) for each in (gm, model)))


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_a_model_that_seeds_itself_is_not_verified_by_the_luck_of_the_seed(seed: int) -> None:
    model = Wrap(lambda _, x: x + torch.randn(4) if torch.manual_seed(seed) else x)
    assert not rg.verify(model, Wrap(lambda _, x: x + torch.randn(4)), (X,), seed=seed).ok
    assert rg.verify(model, Wrap(lambda _, x: x + torch.randn(4) if torch.manual_seed(seed) else x), (X,)).ok


def test_a_deep_copy_of_a_tensor_is_a_copy() -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        inputs = copy.deepcopy({"x": [x, x]})
        inputs["x"][0].mul_(2)
        return inputs["x"][1] + x

    gm = rg.trace(Wrap(forward), (X,), dynamic_shapes="auto")
    for x in (X, torch.cat((X, X))):
        given = x.clone()
        assert torch.equal(gm(given), 3 * x)
        assert torch.equal(given, x)
