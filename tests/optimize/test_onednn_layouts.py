"""Images have their channels last between oneDNN Graph's kernels, and nobody outside notices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_onednn_graph import W8, W10, Of, built, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import regraft as rg
from helpers import randomise
from regraft.optimize.engines import onednn_graph
from regraft.optimize.engines.flat import Engine, Flat
from regraft.optimize.engines.onednn_forms import Forms
from regraft.optimize.engines.onednn_layouts import anew, order, steps_oddly

SIZE = (2, 6, 12, 10)
LAST = torch.channels_last
AS_LAST = (0, 2, 3, 1)
X = weight(*SIZE)


def conv(x: Tensor) -> Tensor:
    return F.conv2d(x, weight(8, 6, 3, 3), W8, padding=1)


def layouts(function: Callable[[Tensor], Any]) -> dict[str, tuple[int, ...]]:
    """How each value lies while the graph runs."""
    return {node.name: axes for node, (_, axes) in Forms(symbolic_trace(Of(function)), [X]).known.forms.items()}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: conv(x).relu(),
        lambda x: F.conv_transpose2d(x, weight(6, 8, 3, 3)),
        lambda x: F.max_pool2d(conv(x), 2),
        lambda x: conv(x) * conv(x).mean((2, 3), keepdim=True).sigmoid(),
        lambda x: conv(x).contiguous().relu(),
        lambda x: conv(x).mean() + F.interpolate(x.tanh(), scale_factor=2, mode="bilinear"),
        lambda x: conv(x).mean() + F.interpolate(x.tanh(), (5, 6)),
        lambda x: torch.cat([x.tanh(), conv(x)], 1),
        lambda x: torch.cat(conv(x).split(3, 1), 1),
        lambda x: torch.cat([F.max_pool2d(torch.cat((conv(x), x.tanh()), dim=1), 2), F.avg_pool2d(x, 2)], 1),
    ],
)
def test_images_have_their_channels_last(function) -> None:
    found = layouts(function)
    assert found["x"] == (0, 1, 2, 3)
    assert [found[name] for name in found][-1] == AS_LAST


def test_images_that_are_joined_lie_as_they_do_where_none_has_its_channels_last() -> None:
    found = layouts(lambda x: conv(x).mean() + torch.cat([x.sin(), x.cos()], 1))
    assert found["cat"] == (0, 1, 2, 3)
    without = layouts(lambda x: torch.cat([x.sin(), x.cos().contiguous(memory_format=LAST)], 1))
    assert without["cat"] == (0, 1, 2, 3), "of keys and values, say, which no convolution reads"


class Enlarged(nn.Module):
    def __init__(self, mode: str, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.mode, self.after = nn.Conv2d(6, 8, 3), mode, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(F.interpolate(self.conv(x), scale_factor=2.0, mode=self.mode))


@pytest.mark.parametrize(("after", "axes"), [(nn.Identity(), (0, 1, 2, 3)), (torch.relu, AS_LAST)])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_an_image_is_laid_as_the_caller_gets_it_before_it_is_enlarged(mode, after, axes) -> None:
    gm = rg.trace(Enlarged(mode, after).eval(), (X,))
    lies = {node.name: axes for node, (_, axes) in Forms(gm, [X]).known.forms.items()}
    assert next(found for name, found in lies.items() if name.startswith("upsample")) == axes
    torch.testing.assert_close(built(gm, X)([X])[0], gm(X))


@pytest.mark.parametrize(
    ("between", "copies"), [(torch.relu, 1), (lambda y: y.flip(1), 1), (lambda y: y.flatten(1).cos().view(y.shape), 2)]
)
def test_an_image_that_lies_so_is_not_asked_to(between: Callable[[Tensor], Tensor], copies: int) -> None:
    """A kernel that is asked has to give it in that order, and is not fused with the next."""
    forms = Forms(symbolic_trace(Of(lambda x: F.conv2d(between(conv(x)), weight(6, 8, 1, 1)))), [X])
    traced: Any = torch.jit.trace(forms, (X,), check_trace=False).inlined_graph
    assert len(traced.findAllNodes("aten::contiguous")) == copies


@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_images_lie_as_is_faster(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    made: list[bool] = []

    def fastest(forms: Forms, program: Any, sample: Any) -> Any:
        made.append(bool(forms.images))
        return program

    monkeypatch.setattr(onednn_graph, "compare_speed", lambda *_, **__: SimpleNamespace(ratio=ratio))
    monkeypatch.setattr(onednn_graph, "_fastest", fastest)
    module = Of(lambda x: conv(conv(x)[:, 2:].relu() * x.mean((2, 3), keepdim=True)).view(2, -1))
    torch.testing.assert_close(built(module, X)([X])[0], module(X))
    assert made == [ratio > 1]  # the ratio is of the images as they are


def test_of_a_single_convolution_one_program_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    program = onednn_graph._program
    monkeypatch.setattr(
        onednn_graph, "_program", lambda forms, sample: made.append(forms.images) or program(forms, sample)
    )
    module = Of(lambda x: F.max_pool2d(conv(x), 2).flatten(2).mT)
    torch.testing.assert_close(built(module, X)([X])[0], module(X))
    assert made == [1]


def test_images_of_layers_do_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(6, 8, 3), nn.ConvTranspose2d(6, 8, 3)

        def forward(self, x):
            return self.a(x).mean() + self.b(x)

    gm = symbolic_trace(randomise(Net()))
    forms = Forms(gm, [X])
    assert [axes == AS_LAST for _, axes in forms.known.forms.values()] == [False, True, False, True, True, True]
    torch.testing.assert_close(built(gm, X)([X])[0], gm(X))


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize(
    "function",
    [
        conv,
        lambda x: conv(x).permute(0, 2, 3, 1),
        lambda x: conv(x).flatten(2),
        lambda x: conv(x).flatten(2).transpose(1, 2),
        lambda x: (conv(x), conv(x).relu().contiguous(), x * 2),
        lambda x: conv(x)[:, :, :, :1],
        lambda x: (x.tanh().transpose(1, 3), x.exp()[:, 1:, 2:]),
        lambda x: x.flatten(2).permute(2, 0, 1) + 1,
        lambda x: conv(x).permute(1, 3, 0, 2).relu(),
        lambda x: (conv(x).contiguous(), conv(x).contiguous().view(2, -1), conv(x).contiguous().mT),
        lambda x: conv(torch.split(conv(x).contiguous(), [6, 2], 1)[0]) * conv(x).contiguous()[:, 1:2],
    ],
)
def test_results_lie_as_those_of_the_model(function, layout) -> None:
    gm, x = symbolic_trace(Of(function)), X.contiguous(memory_format=layout)
    flat = Flat(gm, {"x": x})
    engine = Engine(flat, onednn_graph.build(flat), gm)
    for _ in range(2):
        wanted, found = gm(x), engine({"x": x})
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        for ours, theirs in pairs:
            # of a sum of large numbers that is small, the rounding is that of the large ones
            torch.testing.assert_close(ours, theirs, rtol=1.3e-6, atol=1e-6 * float(theirs.abs().max()))
            for kind in (torch.contiguous_format, LAST)[: theirs.ndim - 2]:
                assert ours.is_contiguous(memory_format=kind) >= theirs.is_contiguous(memory_format=kind)
            if theirs.permute(order(theirs)).is_contiguous() or ("conv2d" not in gm.code and layout is not LAST):
                assert ours.stride() == theirs.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: conv(x).view(2, -1) * 3,
        lambda x: conv(x).view(size=(2, 96, -1)).relu(),
        lambda x: conv(x).view(2, 2, 4, 12, 10).transpose(1, 2).flatten(1, 2),
        lambda x: torch.ops.aten.view.default(conv(x), [2, -1]).tanh(),
        lambda x: torch.ops.aten._unsafe_view.default(conv(x), [2, 8, -1]).tanh(),
        lambda x: conv(x).view_as(torch.empty(2, 16, 60)) + 1,
        lambda x: conv(x).view(x.size(0), x.size(1), -1) - 1,
    ],
)
def test_a_view_that_an_image_has_not(function) -> None:
    module = Of(function)
    assert AS_LAST in layouts(function).values()
    run = built(module, X)
    for _ in range(2):
        torch.testing.assert_close(run([X])[0], module(X))


class Resizing(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.larger = nn.Conv2d(6, 8, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean() + self.larger(x.tanh())


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic", nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d])
def test_layers_that_resize_images_have_their_channels_last(kind: Any) -> None:
    layer = nn.Upsample(scale_factor=2, mode=kind) if isinstance(kind, str) else kind(scale_factor=2)
    gm = symbolic_trace(randomise(Resizing(layer)))
    found = {node.name: axes for node, (_, axes) in Forms(gm, [X]).known.forms.items()}
    assert found["larger"] == AS_LAST
    torch.testing.assert_close(built(gm, X)([X])[0], gm(X))


def test_sequences_are_resized_as_they_are() -> None:
    gm = symbolic_trace(
        Of(lambda x: conv(x).mean() + F.interpolate(x.flatten(2).tanh(), scale_factor=2, mode="linear"))
    )
    torch.testing.assert_close(built(gm, X)([X])[0], gm(X))


@pytest.mark.parametrize(
    ("function", "copied"),
    [
        (lambda x: conv(x).contiguous().tanh(), False),
        (lambda x: conv(x).contiguous(memory_format=torch.contiguous_format), True),
        (lambda x: conv(x).contiguous(memory_format=LAST).tanh(), False),
        (lambda x: conv(x).flatten(2).mT.mT.contiguous(), True),
        (lambda x: x.mT.contiguous() + conv(x).mean(), True),
        (lambda x: x.contiguous(memory_format=LAST).contiguous(), True),  # no convolution, so no image
    ],
)
def test_an_image_is_laid_no_other_way_in_between(function, copied: bool) -> None:
    gm = symbolic_trace(Of(function))
    forms = Forms(gm, [X])
    node = list(gm.graph.find_nodes(op="call_method", target="contiguous"))[-1]
    before, after = (forms.known.forms[each][1] for each in (node.all_input_nodes[0], node))
    assert (before != after) is copied
    torch.testing.assert_close(built(gm, X)([X])[0], gm(X))


def test_a_view_in_sizes_that_there_are_not_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        Forms(symbolic_trace(Of(lambda x: conv(x).view(7, -1))), [X])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: conv(x).as_strided((4, 5), (5, 1)) * 2,
        lambda x: conv(x).relu() + conv(x).stride(1),
        lambda x: torch.as_strided(conv(x), (4, 5), (7, 2), 3).relu(),
    ],
)
def test_a_graph_that_reads_strides_finds_its_own(function) -> None:
    module = Of(function)
    assert LAST not in layouts(function).values()
    torch.testing.assert_close(built(module, X)([X])[0], module(X))


def test_a_kernel_is_not_given_images_of_both_kinds() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.conv2d(x, weight(6, 6, 3, 3), padding=1).relu()
        return torch.tanh(y * weight(2, 1, 12, 10) + x.sigmoid()) / y.mean(1, keepdim=True)

    module = Of(function)
    forms = Forms(symbolic_trace(module), [X])
    given = {node.name: [a.name for a in larger] for node, larger in forms.larger.items() if larger}
    assert given == {"mul": ["_tensor_constant1"], "add": ["sigmoid"], "truediv": ["mean"]}
    assert {form for larger in forms.larger.values() for form in larger.values()} == {(X.shape, AS_LAST)}
    assert all(tensor.is_contiguous(memory_format=LAST) for tensor in forms.beside)
    torch.testing.assert_close(built(module, X)([X])[0], module(X))


def test_tensors_of_four_axes_that_are_no_images_stay_as_they_are() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT + weight(12, 12), -1) @ x + F.linear(x, weight(10, 10), W10)

    assert AS_LAST not in layouts(function).values()


SOUND = weight(2, 6, 30)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x: F.conv1d(x, weight(8, 6, 3)).mT + 1, True),
        (lambda x: F.conv1d(x, weight(8, 6, 3)).mT + weight(28, 8), True),
        (lambda x: x.mT + x.mT.tanh(), True),
        (lambda x: (x.mT * 2).add_(1), True),
        (lambda x: operator.iadd(x.mT * 2, 1), True),
        (lambda x: (x.mT * 2).add_(x.mT.double()), True),
        (lambda x: x.mT * 2, False),  # no sum
        (lambda x: x[0].mT + 1, False),  # no sequences
        (lambda x: x.stride(0) * x.mT + 1, False),  # reads strides
        (lambda x: (y := x.tanh(), z := y.mT, z.add_(1), y)[-1], False),  # the write is seen through another view
    ],
)
def test_sums_of_sequences_have_their_features_last(function, rows: bool) -> None:
    gm = symbolic_trace(Of(function))
    known = Forms(gm, [SOUND]).known.forms
    axes = next(axes for node, (_, axes) in reversed(known.items()) if node.name.startswith(("add", "iadd", "mul")))
    assert (axes == tuple(range(len(axes)))) is rows
    flat = Flat(gm, {"x": SOUND})
    engine = Engine(flat, onednn_graph.build(flat), gm)
    for _ in range(2):
        wanted, found = gm(SOUND), engine({"x": SOUND})
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


@pytest.mark.parametrize(("images", "copied"), [(True, []), (False, ["getattr_1"])])
def test_layers_after_a_convolution_over_time_are_given_what_they_gave(images: bool, copied: list[str]) -> None:
    """Each sum would otherwise lie as the convolution's result does, and what the layer gives would be transposed."""

    def residuals(x: Tensor) -> Tensor:
        x = F.conv1d(x, weight(8, 6, 3)).mT + weight(28, 8)
        for _ in range(3):
            x = x + F.linear(x.tanh(), weight(8, 8), W8)
        return x

    forms = Forms(symbolic_trace(Of(residuals)), [SOUND], images=images)
    copies = [each for node, larger in forms.larger.items() for each in larger if each not in forms.known.steady]
    assert [node.name for node in copies] == copied


class Called(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__.partition(".")[0])
        return function(*args, **kwargs or {})


FAST = "_scaled_dot_product_flash_attention_for_cpu"


def attended(x: Tensor, *masks: Tensor) -> Tensor:
    """Attention between the places of an image, whose features are a channel apart."""
    query, key, value = F.conv2d(x, weight(24, 6, 1, 1)).reshape(2, 3, 2, 4, -1).permute(1, 0, 2, 4, 3)
    return F.scaled_dot_product_attention(query, key, value, *masks, scale=0.05)


@pytest.mark.parametrize("masks", [(), (weight(2, 2, 120, 120),)], ids=["no mask", "a mask"])
@pytest.mark.parametrize("images", [False, True])
def test_attention_over_an_image_is_given_features_side_by_side(images: bool, masks: tuple[Tensor, ...]) -> None:
    module = symbolic_trace(Of(lambda x: attended(x, *masks) * 2 + 1))
    forms = Forms(module, [X], images=images)
    with torch.no_grad(), Called() as by_torch:
        expected = module(X)
    with torch.no_grad(), Called() as called:
        (found,) = forms(X, *forms.beside)
    assert FAST not in by_torch.names
    assert FAST in called.names
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(built(module, X)([X])[0], expected)


def test_attention_is_given_what_it_was_where_strides_are_read() -> None:
    module = symbolic_trace(Of(lambda x: attended(x).as_strided((4, 4), (4, 1))))
    forms = Forms(module, [X])
    with torch.no_grad(), Called() as called:
        forms(X, *forms.beside)
    assert FAST not in called.names


def test_an_image_that_steps_oddly() -> None:
    tokens = weight(1, 30, 6).transpose(1, 2).view(1, 6, 5, 6)
    assert steps_oddly(tokens)
    assert not steps_oddly(anew(tokens))
    assert torch.equal(anew(tokens), tokens)
    for other in (tokens.contiguous(), tokens.clone(memory_format=LAST), tokens[0], torch.cat([tokens, tokens])):
        assert not steps_oddly(other)
        assert anew(other).stride() == other.stride()
    assert anew(X) is not X
    assert anew(X).data_ptr() == X.data_ptr()


@pytest.mark.parametrize("look", [lambda y: y.reshape(2, -1), lambda y: y.flatten(), lambda y: y.view(2, -1)])
def test_images_stay_where_a_write_is_seen_through_a_view(look) -> None:
    def written(x: Tensor) -> Tensor:
        y = conv(x)
        look(y).mul_(2)
        return y

    assert layouts(written)["conv2d"] == (0, 1, 2, 3)
    module = Of(written)
    torch.testing.assert_close(built(module, X)([X])[0], 2 * conv(X), rtol=1e-4, atol=1e-4)


def test_a_view_is_copied_only_where_nobody_writes() -> None:
    channels_last = X.contiguous(memory_format=LAST)
    read = symbolic_trace(Of(lambda x: x.clone().view(2, -1) * 2))
    torch.testing.assert_close(Forms(read, [channels_last])(channels_last)[0], 2 * X.reshape(2, -1))
    written = symbolic_trace(Of(lambda x: (lambda y: (y.view(2, -1).mul_(2), y)[1])(x.clone())))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        Forms(written, [channels_last])
