"""Tests for the mutants of packed layers and `PrepackForCpu` that had survived; see docs/mutation.md."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from regraft.testing.parts import randomised, traced_with_shapes
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations import _packed as packed
from regraft.transformations._activations import NONE, Activation

IMAGE = torch.randn(2, 4, 6, 6)
ADDEND = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
RELU = Activation("relu")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")


class Sums:
    """Notes which of oneDNN's additions is called, with which activation, and says of some that they do not work."""

    def __init__(self, patch: pytest.MonkeyPatch, broken=lambda kind, activation: False) -> None:
        self.calls: list[tuple[str, Activation]] = []
        works = mkldnn.works
        for kind in (mkldnn.CONV, mkldnn.CONV_ADD, mkldnn.CONV_SUM):  # which is tried once, before calls are noted
            assert all(works(kind, torch.float32, activation, 2) for activation in (NONE, RELU))
        patch.setattr(
            mkldnn,
            "works",
            lambda kind, dtype, activation=NONE, axes=2: (
                works(kind, dtype, activation, axes) and not broken(kind, activation)
            ),
        )
        for name in ("conv_add", "conv_sum"):
            patch.setattr(mkldnn, name, self.noted(name, getattr(mkldnn, name)))

    def noted(self, name: str, real):
        def call(*args):
            self.calls.append((name, args[-1]))
            return real(*args)

        return call


def summed(activation: Activation, inplace: bool) -> None:
    """What a packed convolution with an addend computes, against torch."""
    conv = nn.Conv2d(4, 4, 1)
    layer = packed.PackedConv2d.of(conv, activation, inplace)
    with torch.no_grad():
        torch.testing.assert_close(layer(IMAGE, ADDEND.clone()), activation.plain(conv(IMAGE) + ADDEND))


@needs_onednn
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("activation", [NONE, RELU])
def test_the_addition_computes_the_activation_where_it_can(
    activation: Activation, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Sums(monkeypatch)
    summed(activation, inplace)
    assert sums.calls == [("conv_sum" if inplace else "conv_add", activation)]


@needs_onednn
@pytest.mark.parametrize("inplace", [True, False])
def test_the_addition_is_used_without_the_activation_that_it_does_not_know(
    inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Sums(monkeypatch, lambda kind, activation: kind != mkldnn.CONV and activation is not NONE)
    summed(RELU, inplace)
    assert sums.calls == [("conv_sum" if inplace else "conv_add", NONE)]


@needs_onednn
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("broken", [mkldnn.CONV_ADD, mkldnn.CONV_SUM])
def test_only_the_addition_that_is_called_has_to_work(
    broken: str, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Sums(monkeypatch, lambda kind, activation: kind == broken)
    summed(RELU, inplace)
    wanted = [] if inplace is (broken == mkldnn.CONV_SUM) else ["conv_sum" if inplace else "conv_add"]
    assert [name for name, _ in sums.calls] == wanted


def test_the_plain_way_adds_too() -> None:
    conv = nn.Conv2d(4, 4, 1)
    layer = packed.PackedConv2d.of(conv, RELU)
    torch.testing.assert_close(layer(IMAGE, ADDEND), F.relu(conv(IMAGE) + ADDEND))  # which records a gradient


def test_an_addend_that_is_read_again_is_not_taken_for_written() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(4, 4, 1) for _ in range(3))

        def forward(self, x):
            first = self.a(x)
            second, third = self.b(x), self.c(first)
            return second + first, F.relu(third), first

    model = randomised(Twice()).eval()
    gm = rg.PrepackForCpu()(traced_with_shapes(model, (IMAGE,), {}))
    assert {site.where: site.sentence for site in rg.history(gm)[-1].applied if site.where in "abc"} == {
        "a": "packed",
        "b": "packed, with add",
        "c": "packed, with relu",
    }
    with torch.no_grad():
        torch.testing.assert_close(gm(IMAGE), model(IMAGE))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL")
def test_mkls_product_is_tried_with_the_rows_that_it_is_packed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another number torch takes the plain product, and nothing would be tried."""
    rows, pack, product = [], mkldnn.pack_sgemm, mkldnn.sgemm

    def packed_for(weight: torch.Tensor, count: int) -> torch.Tensor:
        rows.append(count)
        return pack(weight, count)

    def multiplied(x: torch.Tensor, *args) -> torch.Tensor:
        rows.extend([len(x), args[-1]])
        return product(x, *args)

    monkeypatch.setattr(mkldnn, "pack_sgemm", packed_for)
    monkeypatch.setattr(mkldnn, "sgemm", multiplied)
    assert mkldnn.works.__wrapped__(mkldnn.MKL, torch.float32)
    assert len(rows) == 3
    assert len(set(rows)) == 1


def test_a_slope_that_is_computed_is_no_activation_of_onednn() -> None:
    class Sloped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return F.leaky_relu(self.a(x), x.size(0) / 8)

    model = randomised(Sloped()).eval()
    gm = rg.PrepackForCpu()(torch.fx.symbolic_trace(model))
    assert [site.sentence for site in rg.history(gm)[-1].applied if site.where == "a"] == ["packed"]
    with torch.no_grad():
        torch.testing.assert_close(gm(IMAGE), model(IMAGE))
