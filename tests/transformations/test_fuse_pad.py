"""`FusePad`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
from helpers import FORMS, Wrap, check_applied, check_refused, randomise, run

FUSE = rg.FusePad()


def net(pad, conv, **more):
    return randomise(Wrap(lambda self, x: self.a(F.pad(x, pad, **more)), a=conv))


def hooked(conv):
    conv.register_forward_hook(lambda module, args, result: result * 2)
    return conv


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pad", [(1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 2, 3), (1, 2, 0, 2), (2, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 4])
def test_every_padding_and_stride(form, pad, stride, groups):
    model = net(pad, nn.Conv2d(4, 8, 3, stride=stride, groups=groups))
    gm = check_applied(FUSE, model, (torch.randn(2, 4, 9, 8),), form)
    for size in [(1, 4, 5, 7), (3, 4, 8, 8)] * (form == "fx"):
        x = torch.randn(size)
        torch.testing.assert_close(run(gm, (x,)), run(model, (x,)))


@pytest.mark.parametrize("conv", [nn.Conv1d(3, 4, 3, bias=False), nn.Conv3d(3, 4, 2)])
def test_other_numbers_of_axes(conv):
    size = (2, 3, *(7,) * (conv.weight.ndim - 2))
    check_applied(FUSE, net((0, 1), conv), (torch.randn(size),))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("pad", "conv"),
    [
        (nn.ZeroPad2d((0, 1, 1, 2)), nn.Conv2d(4, 6, 3, stride=2, padding="valid")),
        (nn.ZeroPad2d(1), nn.Conv2d(4, 6, 1, padding="same")),
        (nn.ConstantPad2d((1, 2, 0, 0), 0.0), nn.Conv2d(4, 6, (2, 3))),
        (nn.ZeroPad1d((1, 1)), nn.Conv1d(4, 6, 3, dilation=2)),
    ],
)
def test_layers_that_pad(form, pad, conv):
    model = randomise(nn.Sequential(nn.ReLU(), pad, conv))
    gm = check_applied(FUSE, model, (torch.randn(2, 4, *(8, 9)[: conv.weight.ndim - 2]),), form)
    assert len(gm.graph.nodes) == 4


def test_equal_ends_may_be_dilated():
    check_applied(FUSE, net((1, 1, 2, 2), nn.Conv2d(3, 4, 3, dilation=2)), (torch.randn(2, 3, 9, 8),))


def test_trained_weights_come_back():
    model = net((0, 1, 0, 1), nn.Conv2d(3, 4, 3, stride=2))
    gm = FUSE(rg.trace(model, (torch.randn(2, 3, 8, 8),)))
    with torch.no_grad():
        gm.a.weight.mul_(2)
    FUSE(gm, reverse=True)
    assert torch.equal(gm.a.weight, 2 * model.a.weight)


def test_what_was_trained_in_the_place_of_zeros_is_not_lost():
    gm = FUSE(rg.trace(net((0, 1, 0, 1), nn.Conv2d(3, 4, 3, stride=2)), (torch.randn(2, 3, 8, 8),)))
    with torch.no_grad():
        gm.a.weight.add_(1)
    with pytest.raises(rg.ReversalConflict):
        FUSE(gm, reverse=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (net((1, 1), nn.Conv2d(3, 4, 3), value=1.0), "zeros"),
        (net((1, 1), nn.Conv2d(3, 4, 3), mode="reflect"), "zeros"),
        (net((1, 1, 1), nn.Conv2d(3, 4, 3)), "computed"),  # which torch takes for no padding at all
        (Wrap(lambda self, x: self.a(F.pad(x, (0, x.shape[0]))), a=nn.Conv2d(3, 4, 3)), "computed"),
        (net((2, 1), nn.Conv2d(3, 4, 3)), "start"),
        (net((-1, 1), nn.Conv2d(3, 4, 3)), "start"),
        (net((1, 1, 1, 1, 0, 0), nn.Conv2d(3, 4, 3)), "axes"),
        (net((0, 1, 0, 1), nn.Conv2d(3, 4, 3, dilation=2)), "dilated"),
        (
            Wrap(lambda self, x: F.conv2d(F.pad(x, (1, 1)), self.w), w=nn.Parameter(torch.randn(4, 3, 3, 3))),
            "a function call",
        ),
        (net((1, 1), hooked(nn.Conv2d(3, 4, 3))), "a has hooks"),
        (net((1, 1), nn.Conv2d(3, 4, 3, padding=1)), "itself"),
        (net((1, 1), nn.Conv2d(3, 4, 3, padding="same")), "itself"),
        (nn.Sequential(nn.ConstantPad2d(1, 0.5), nn.Conv2d(3, 4, 3)), "zeros"),
        (nn.Sequential(hooked(nn.ZeroPad2d(1)), nn.Conv2d(3, 4, 3)), "0 has hooks"),
        (nn.Sequential(nn.ZeroPad2d((1, 0, 0, 0)), nn.Conv2d(3, 4, 3)), "start"),
        (net((1, 1), nn.Linear(10, 4)), "one convolution"),
        (Wrap(lambda self, x: (p := F.pad(x, (1, 1))) + self.a(p), a=nn.Conv2d(3, 3, 1)), "one convolution"),
        (
            Wrap(
                lambda self, x: (y := x * 2, padded := F.pad(y, (1, 1)), y.add_(1), self.a(padded))[3],
                a=nn.Conv2d(3, 3, 1),
            ),
            "changes 'mul' in place",
        ),
        (
            Wrap(lambda self, x: self.a(F.pad(x, (1, 1))) + self.a(F.pad(x, (1, 1))), a=nn.Conv2d(3, 3, 1)),
            "called 2 times",
        ),
    ],
)
def test_refused(model, words):
    check_refused(FUSE, model, (torch.randn(2, 3, 8, 8),), "fx", words, sites=1 + (words == "called 2 times"))
