"""What export is told of a model as it runs: numbers that no input decides, and rows that the values of one do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import regraft as rg
from helpers import Wrap
from regraft.core.errors import CaptureError, NotCovered

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def centred(x: Tensor) -> Tensor:
    """As asteroid's norms are written, over all axes but the first."""
    return x - x.mean(torch.arange(1, x.ndim).tolist(), keepdim=True)


def one_by_one(x: Tensor) -> Tensor:
    for number in torch.arange(5, 1, -2):
        x = x * int(number) + sum(range(number))
    return x


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("function", [centred, one_by_one, lambda x: x * torch.arange(4).unbind()[3].item()])
def test_the_numbers_of_a_range_are_no_values_of_the_inputs(function: Any, sizes: str | None) -> None:
    gm = rg.trace(Wrap(lambda _, x: function(x)), (X,), dynamic_shapes=sizes)
    for x in (X, -2 * X) if sizes is None else (X, torch.cat((X, 3 * X))):
        assert torch.equal(gm(x), function(x))


def written(x: Tensor) -> Tensor:
    axes = torch.arange(1, 3)
    axes[0] = 0
    return x.mean(axes.tolist())


def written_in_part(x: Tensor) -> Tensor:
    axes = torch.arange(1, 3)
    axes[:1].sub_(1)
    return x.mean(axes.tolist())


def written_by_one(x: Tensor) -> Tensor:
    first, second = torch.arange(1, 3)
    first -= 1
    return x.mean((int(first), int(second)))


def by_value(x: Tensor) -> Tensor:
    return x.mean(int((x > 9).sum()))


@pytest.mark.parametrize("function", [written, written_in_part, written_by_one, by_value])
def test_others_are(function: Any) -> None:
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        rg.trace(Wrap(lambda _, x: function(x)), (X,))


def test_a_range_of_a_size_that_varies_does_not_become_that_of_the_example() -> None:
    model = Wrap(lambda _, x: x * sum(torch.arange(x.shape[0]).tolist()))
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    assert torch.equal(gm(-X), model(-X))
    with pytest.raises(NotCovered):
        gm(torch.cat((X, X)))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        result, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))
        padded: Tensor = pad_packed_sequence(result, batch_first=True)[0]
        return padded


def test_a_packed_sequence_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="has as many rows as the values of its lengths say"):
        rg.trace(Packed(), (X, torch.tensor([3, 2])))
