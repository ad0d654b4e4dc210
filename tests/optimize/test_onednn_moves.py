"""What rolls and cuts into windows is one copy of rows in a program of oneDNN Graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import Of, built, result_of, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace

from regraft.optimize.engines import onednn_moves
from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor], Tensor]
X = weight(2, 8, 12, 20)


def windows(x: Tensor) -> Tensor:
    """Windows of four by four pixels, (windows, pixels, channels)."""
    return x.view(2, 2, 4, 3, 4, x.size(-1)).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, x.size(-1))


def grid(x: Tensor) -> Tensor:
    """Windows whose pixels lie apart, of an image with its channels first, as MaxViT cuts them."""
    return x.reshape(2, 20, 4, 2, 4, 3).permute(0, 3, 5, 2, 4, 1).reshape(2, 6, 16, 20)


def channels_first(x: Tensor) -> Tensor:
    """An image that was windows of two by three pixels."""
    return x.reshape(2, 4, 4, 2, 3, 20).permute(0, 5, 1, 3, 2, 4).reshape(2, 20, 8, 12)


def image(x: Tensor) -> Tensor:
    """What `windows` has cut."""
    return x.view(2, 2, 3, 4, 4, 20).transpose(2, 3).reshape((2, 8, 12, 20))


AT_ONCE: dict[str, Function] = {
    "rolled and cut": lambda x: windows(torch.roll(x, (-2, -1), (1, 2))) * 2,
    "cut by sizes of the input": lambda x: x.roll((-2, -1), (1, 2)).view(2, x.size(1) // 4, 4, -1, 20).transpose(1, 2),
    "put together and rolled back": lambda x: torch.roll(image(x.view(12, 16, 20)), shifts=(2, 1), dims=(1, 2)) + x,
    "along one axis": lambda x: x.roll(3, 1).sin(),
    "images rolled over": lambda x: torch.roll(x, 12 * 20).flatten(1, 2).cos(),
    "of what was computed": lambda x: windows((x * 2).roll((5, -7), (1, 2))).softmax(-1),
    "turned and rolled": lambda x: x.transpose(1, 2).roll(1, 1) + 0,
    "swapped and rolled": lambda x: x.swapaxes(1, 2).roll(1, 1) + 0,
    "windows cut into others": lambda x: grid(channels_first(x.view(2, 16, 6, 20))) * 2,
    "cut, and laid again": lambda x: windows(x).permute(0, 2, 1).contiguous().swapdims(1, 2).reshape(-1, 20).sin(),
    "first of all": lambda x: x.flatten(0, 1).unflatten(0, (2, 8)).roll(1, 2),
    "ends in a view that is not dense": lambda x: x.roll(1, 1).transpose(1, 2).tanh(),
}


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_moved_at_once(name: str, dtype: torch.dtype) -> None:
    function, x = AT_ONCE[name], X.to(dtype)
    forms = Forms(symbolic_trace(Of(function)), [x])
    program: Any = torch.jit.trace(forms, (x, *forms.beside), check_trace=False).graph
    kinds = [node.kind() for node in program.nodes()]
    assert ("aten::roll" in kinds, kinds.count("aten::index_select")) == (False, 1)
    torch.testing.assert_close(result_of(forms, x), function(x), rtol=0, atol=0)
    run = built(Of(function), x)
    for given in (x, -x):
        (found,), expected = run([given]), function(given)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


OTHERS: dict[str, Function] = {
    "along the rows": lambda x: x.roll(1, -1) + 0,
    "all elements": lambda x: torch.roll(x, 7) + 0,
    "narrow rows": lambda x: x[..., :15].contiguous().roll(1, 1) + 0,
    "of a view that is not dense": lambda x: x.mT.roll(1, 1) + 0,
    "of a part": lambda x: x[..., :16].roll(1, 1) + 0,
    "given by name": lambda x: torch.roll(input=x, shifts=1, dims=1) + 0,
    "sizes that are one value": lambda x: x.roll(1, 1).view(x.shape) + 0,
    "channels before pixels": lambda x: x.transpose(1, -1).contiguous().roll(1, 2) + 0,
    "nothing": lambda x: x[:0].roll(1, 1) + 0,
    "one copy": lambda x: x.view(2, 2, 4, 3, 4, 20).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 20) * 2,
    "one copy, which is seen otherwise": lambda x: windows(x).reshape(-1, 20).flatten() * 2,
    "windows with their channels first": lambda x: windows(x).mT.reshape(6, -1).view(12, 20, 16) * 2,
    "written to": lambda x: x.clone().roll(1, 1).add_(x.tanh_()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    function = OTHERS[name]
    forms = Forms(symbolic_trace(Of(function)), [X.clone()])
    program: Any = torch.jit.trace(forms, (X.clone(), *forms.beside), check_trace=False).graph
    assert not program.findAllNodes("aten::index_select")
    torch.testing.assert_close(built(Of(function), X.clone())([X.clone()])[0], function(X.clone()))


def test_what_others_read_is_left_to_them() -> None:
    """A roll that is read twice is moved by itself."""

    def function(x: Tensor) -> Tensor:
        rolled = x.roll((1, 2), (1, 2))
        return windows(rolled).sum() + rolled

    forms = Forms(symbolic_trace(Of(function)), [X])
    assert [node.name for node in forms.known.respelled] == ["roll"]
    torch.testing.assert_close(built(Of(function), X)([X])[0], function(X))


def test_a_layer_may_lay_them_otherwise() -> None:
    module = Of(lambda x: x.roll(1, 1), nn.Flatten(1, 2))
    assert len(Forms(symbolic_trace(module), [X]).known.respelled) == 2
    torch.testing.assert_close(built(module, X)([-X])[0], module(-X), rtol=0, atol=0)


class Convolved(nn.Module):
    """What moves pixels, then a convolution of an image, and before it another, perhaps."""

    def __init__(self, function: Function, first: bool = False, read_as: Function = lambda x: x) -> None:
        super().__init__()
        self.function, self.read_as = function, read_as
        self.first = nn.Conv2d(20, 20, 3, padding=1) if first else None
        self.last = nn.Conv2d(20, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x if self.first is None else self.first(x))) + self.read_as(x).sum()


def pixels(x: Tensor) -> Tensor:
    """The pixels of one place in each patch of two by two, together: MobileViT's, as transformers write it."""
    x = x.reshape(2 * 20 * 4, 2, 6, 2).transpose(1, 2).reshape(2, 20, 24, 4).transpose(1, 3)
    return x.reshape(8, 24, 20)


def of_pixels(x: Tensor) -> Tensor:
    """The image of such pixels."""
    x = x.contiguous().view(2, 4, 24, -1).transpose(1, 3).reshape(2 * 20 * 4, 6, 2, 2).transpose(1, 2)
    return x.reshape(2, 20, 8, 12)


def of_tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().view(2, 20, 8, 12)


IMAGES: dict[str, tuple[nn.Module, Tensor, int]] = {
    "of windows": (Convolved(channels_first), weight(2, 16, 6, 20), 1),
    "of pixels": (Convolved(of_pixels), weight(8, 24, 20), 1),
    "there and back": (Convolved(lambda x: of_pixels(pixels(x).sin()), first=True), weight(2, 20, 8, 12), 2),
    "of tokens": (Convolved(of_tokens), weight(2, 96, 20), 0),
    "of tokens, turned": (Convolved(lambda x: of_tokens(x).transpose(2, 3).contiguous()), weight(2, 96, 20), 1),
    "of tokens, with one copy": (Convolved(lambda x: x.mT.unflatten(2, (8, 12)).contiguous()), weight(2, 96, 20), 0),
    "with its channels last": (
        Convolved(lambda x: grid(channels_first(x)).permute(0, 3, 1, 2)),
        weight(2, 16, 6, 20),
        1,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_is_convolved_is_moved_to_where_the_convolution_has_it(name: str, dtype: torch.dtype) -> None:
    """As a copy with the channels first it would be copied again."""
    module, x, moves = IMAGES[name]
    module, x = copy.deepcopy(module).to(dtype), x.to(dtype)
    forms = Forms(symbolic_trace(module), [x])
    graph: Any = torch.jit.trace(forms, (x, *forms.beside), check_trace=False).inlined_graph
    assert len(graph.findAllNodes("aten::index_select")) == moves
    assert moves or not graph.findAllNodes("aten::contiguous")
    last = next(node for node in forms.known.forms if node.name == "last").all_input_nodes[0]
    assert forms.known.forms[last][1] == (0, 2, 3, 1)
    run = built(module, x)
    for given in (x, -x):
        expected = copy.deepcopy(module).double()(given.double())
        error, own = ((result.double() - expected).abs().max() for result in (run([given])[0], module(given)))
        assert error <= 4 * own + 1e-6


class Given(Convolved):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        image = of_tokens(x)
        return image, self.last(image)


def test_an_image_that_the_caller_gets_is_a_copy() -> None:
    x = weight(2, 96, 20).clone()
    image, _ = built(Given(of_tokens), x)([x])
    assert torch.equal(image, of_tokens(x))
    assert image.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_what_no_convolution_reads_keeps_its_order() -> None:
    module = Of(lambda x: channels_first(x) * 2, nn.Conv2d(20, 4, 1))
    forms = Forms(symbolic_trace(module), [weight(2, 16, 6, 20)])
    assert not any(node.name.startswith("reshape") for node in forms.known.respelled)


def test_an_image_that_is_no_batch_keeps_its_order() -> None:
    def of_windows(x: Tensor) -> Tensor:
        return x.reshape(4, 4, 2, 3, 20).permute(4, 0, 2, 1, 3).reshape(20, 8, 12)

    module, x = Convolved(of_windows), weight(16, 6, 20)
    assert not Forms(symbolic_trace(module), [x]).known.respelled
    torch.testing.assert_close(built(module, x)([-x])[0], module(-x))


@pytest.mark.parametrize("more", [0, 1])
def test_what_is_too_large_is_left_to_torch(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out which element goes where takes memory for each."""
    monkeypatch.setattr(onednn_moves, "_LARGEST", X.numel() - more)
    forms = Forms(symbolic_trace(Of(lambda x: x.roll(1, 1) + 0)), [X])
    assert (not forms.known.respelled) == bool(more)


class Table(nn.Module):
    """Adds a weight that is rolled and cut into windows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(X.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + windows(self.weight.roll(1, 1))


def test_a_weight_is_not_moved_in_each_call() -> None:
    gm, x = symbolic_trace(Table()), windows(X)
    assert any(node.name == "roll" for node in gm.graph.nodes)
    assert not Forms(gm, [x]).known.respelled
    torch.testing.assert_close(built(Table(), x)([-x])[0], Table()(-x))
