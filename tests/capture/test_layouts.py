"""A graph of a model that reads how its input is laid in memory is not used where another is; see `capture.layouts`."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import regraft as rg
from helpers import Wrap
from regraft.dropin import grafts_of


def frames(self: nn.Module, x: Tensor) -> Tensor:
    step = x.stride(0)
    return x.as_strided((x.shape[0] // 2 - 1, 4), (2 * step, step)) * 2


def of_what_it_computes(self: nn.Module, x: Tensor) -> Tensor:
    wide = x * 2  # which is laid as x is
    return wide.as_strided((2, 2), (wide.stride(0), wide.stride(1)))


def decides(self: nn.Module, x: Tensor) -> Tensor:
    return x + 1 if x.is_contiguous() else x - 1


def with_its_start(self: nn.Module, x: Tensor) -> Tensor:
    return x + x.storage_offset()


def in_channels(self: nn.Module, x: Tensor) -> Tensor:
    return x + 1 if x.is_contiguous(memory_format=torch.channels_last) else x - 1


STEREO, ROWS, IMAGES = torch.randn(10, 2), torch.randn(4, 2), torch.randn(2, 3, 4, 5)
LAST = IMAGES.contiguous(memory_format=torch.channels_last)
CASES = [
    pytest.param(frames, torch.randn(10), [torch.randn(10), STEREO.flatten()[5:15]], [STEREO[:, 0], STEREO.t()[1]]),
    pytest.param(of_what_it_computes, torch.randn(2, 4), [torch.randn(2, 4)], [ROWS.t(), torch.randn(2, 8)[:, ::2]]),
    pytest.param(of_what_it_computes, ROWS.t(), [torch.randn(4, 2).t()], [torch.randn(2, 4)]),
    pytest.param(decides, torch.randn(2, 4), [torch.randn(3, 4)[1:]], [ROWS.t()]),
    pytest.param(with_its_start, torch.randn(2, 4), [torch.randn(2, 4)], [torch.randn(3, 4)[1:]]),
    pytest.param(in_channels, IMAGES, [IMAGES * 2], [LAST]),
    pytest.param(in_channels, LAST, [LAST * 2], [IMAGES]),
]


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize(("forward", "example", "alike", "otherwise"), CASES)
def test_a_graph_is_for_inputs_that_are_laid_alike(
    forward: object, example: Tensor, alike: list[Tensor], otherwise: list[Tensor], sizes: str | None
) -> None:
    model = Wrap(forward).eval()
    gm = rg.trace(model, (example,), dynamic_shapes=sizes)
    for graph in (gm, pickle.loads(pickle.dumps(gm))):
        for x in (example, *alike):
            assert torch.equal(graph(x), model(x))
        for x in otherwise:
            with pytest.raises(TypeError, match="x is laid in memory otherwise"):
                graph(x)


@pytest.mark.parametrize(("forward", "example", "alike", "otherwise"), CASES)
def test_the_original_runs_others(
    forward: object, example: Tensor, alike: list[Tensor], otherwise: list[Tensor]
) -> None:
    model = Wrap(forward).eval()
    dropin = rg.optimize(model, (example,), keep="all", seconds=0.01).model
    grafts = grafts_of(dropin)
    assert grafts is not None
    for inputs, by_graph in (([example, *alike], True), (otherwise, False)):
        for x in inputs:
            before = sum(grafts.calls.values())
            assert torch.equal(dropin(x), model(x))
            assert (sum(grafts.calls.values()) > before) == by_graph


def test_the_cure_is_one() -> None:
    for forward, x in ((decides, ROWS.t()), (with_its_start, torch.randn(3, 4)[1:])):
        gm = rg.trace(Wrap(forward).eval(), (torch.randn(2, 4),))
        cure = {decides: "contiguous", with_its_start: "clone"}[forward]
        with pytest.raises(TypeError, match=rf"give it x\.{cure}\(\)"):
            gm(x)
        gm(getattr(x, cure)())


def test_a_model_that_reads_no_layout_takes_any() -> None:
    model = Wrap(lambda self, x: (x.contiguous() + self.weight.stride(0)).reshape(-1)).eval()
    model.weight = nn.Parameter(torch.randn(2, 4))
    gm = rg.trace(model, (torch.randn(2, 4),))
    assert torch.equal(gm(ROWS.t()), model(ROWS.t()))


def test_a_compiler_is_told() -> None:
    model = Wrap(decides).eval()
    dropin = torch.compile(rg.optimize(model, (torch.randn(2, 4),), keep="all", seconds=0.01).model, backend="eager")
    for x in (torch.randn(2, 4), ROWS.t()):
        assert torch.equal(dropin(x), model(x))
