"""What rolls and cuts into windows is one copy of rows in a program of oneDNN Graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_onednn_graph import Of, built, result_of, weight
from torch import Tensor, nn
from torch.fx import symbolic_trace

from regraft.optimize.engines.onednn_forms import Forms

Function = Callable[[Tensor], Tensor]
X = weight(2, 8, 12, 20)


def windows(x: Tensor) -> Tensor:
    """Windows of four by four pixels, (windows, pixels, channels)."""
    return x.view(2, 2, 4, 3, 4, x.size(-1)).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, x.size(-1))


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
    "of a view that is not dense": lambda x: x.swapaxes(1, 2).roll(1, 1) + 0,
    "of a part": lambda x: x[..., :16].roll(1, 1) + 0,
    "given by name": lambda x: torch.roll(input=x, shifts=1, dims=1) + 0,
    "sizes that are one value": lambda x: x.roll(1, 1).view(x.shape) + 0,
    "channels before pixels": lambda x: x.transpose(1, -1).contiguous().roll(1, 2) + 0,
    "nothing": lambda x: x[:0].roll(1, 1) + 0,
    "no roll": lambda x: windows(x) * 2,
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
