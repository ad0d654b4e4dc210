"""Branches and loops that a forward writes with torch.cond and torch.while_loop, and what torch.compile has made."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import regraft as rg
from helpers import Wrap
from regraft.verify.oracle import Oracle


def cond(_: object, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 3, (x,))


def repeated(_: object, x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.long)
    return torch.while_loop(lambda i, y: i < y.amax(), lambda i, y: (i + 1, y * 0.9), (start, x))[1]


def drawn(_: object, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + torch.rand_like(y), lambda y: y * 3, (x,))


class OfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.here = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.there(x)
        return torch.cond(x.sum() > 0, lambda y: self.here(y) + 1, lambda y: self.there(y), (x,))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cond": lambda: Wrap(cond),
    "a loop": lambda: Wrap(repeated),
    "random numbers": lambda: Wrap(drawn),
    "layers": OfLayers,
}
X = torch.full((3, 4), 2.0) + torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()  # torch compiles a branch once, and keeps it if that fails


def results(model: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    made = []
    with torch.no_grad():
        for x in (X, -X, 3 * X):
            torch.manual_seed(1)
            made.append(model(x))
    return made


def compare(model: Callable[[torch.Tensor], torch.Tensor], other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for actual, expected in zip(results(model), results(other), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_has_each_branch(name: str, sizes: str | None) -> None:
    model = MODELS[name]().eval()
    gm = rg.trace(model, (X,), dynamic_shapes=sizes)
    expected = results(model)
    assert not torch.allclose(expected[0], expected[1])
    compare(gm, model)


@pytest.mark.parametrize("name", MODELS)
def test_optimize_leaves_the_model_working(name: str) -> None:
    """Its first run and its float64 run are under modes, with which torch would remember not to compile a branch."""
    model = MODELS[name]().eval()
    result = rg.optimize(model, (X,), seconds=0.01, keep="all")
    compare(result.model, model)


def test_a_branch_is_run_in_float64_throughout() -> None:
    """Also where it asks for another precision, which it does for rounding that is no part of the right answer."""
    model = Wrap(lambda _, x: torch.cond(x.sum() > 0, lambda y: y.float() / 3, lambda y: y, (x,)))
    truth = Oracle(model, float64=True, seed=0).ask(((X,), {}))
    assert truth.exact is not None, truth.lacking
    ((_, exact),) = truth.exact.output.tensors()
    assert torch.equal(exact, X.double() / 3)


class Counted:
    """A backend of torch.compile that counts how often what it has compiled runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*args: object) -> object:
            self.runs += 1
            return gm(*args)

        return run


def test_what_is_compiled_stays_compiled() -> None:
    counted = Counted()
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend=counted)).eval()
    rg.optimize(model, (X,), seconds=0.01)
    before = counted.runs
    model(X)
    assert counted.runs == before + 1
