"""What export is told of a model as it runs: numbers that no input decides, and rows that the values of one do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import regraft as rg
from helpers import Wrap
from regraft.capture.known_numbers import KnownNumbers
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
@pytest.mark.parametrize(
    "function",
    [
        centred,
        one_by_one,
        lambda x: x * torch.arange(4).unbind()[3].item(),
        lambda x: x.mean(torch.arange(1, 3).data.tolist()),
        lambda x: x + F.pad(torch.arange(3), (1, 0)),  # a range stays a tensor where it is one
    ],
)
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


def written_by_its_data(x: Tensor) -> Tensor:
    axes = torch.arange(1, 3)
    axes.data[0] = 0
    return x.mean(axes.tolist())


def read_by_its_data(x: Tensor) -> Tensor:
    axes = torch.arange(1, 3)
    memory = axes.data
    axes.sub_(1)
    return x.mean(memory.tolist())


def by_value(x: Tensor) -> Tensor:
    return x.mean(int((x > 9).sum()))


@pytest.mark.parametrize("function", [written_in_part, written_by_one, written_by_its_data, read_by_its_data])
def test_numbers_of_which_a_part_is_written_are_not_known(function: Any) -> None:
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        rg.trace(Wrap(lambda _, x: function(x)), (X,))


def test_a_number_that_is_written_as_a_whole_is_what_was_written() -> None:
    gm = rg.trace(Wrap(lambda _, x: written(x)), (X,))
    for x in (X, -2 * X):
        assert torch.equal(gm(x), written(x))


def test_a_value_of_the_inputs_is_asked_for() -> None:
    gm = rg.trace(Wrap(lambda _, x: by_value(x)), (X,))
    for x in (X, -2 * X):
        assert torch.equal(gm(x), by_value(x))
    with pytest.raises(NotCovered, match=r"reads 0 of its inputs and flags, and now it reads 24, at .*x\.mean\(int"):
        gm(torch.full_like(X, 9.5))


def test_what_torch_divides_of_numbers_is_a_number() -> None:
    def halved(x: Tensor) -> Tensor:  # as Longformer does
        y = x.reshape(torch.div(x.shape[0] * x.shape[1], 2, rounding_mode="trunc"), -1)
        return y * 2 if y.shape[1] > 3 else y

    gm = rg.trace(Wrap(lambda _, x: halved(x)), (X,), dynamic_shapes="auto")
    assert torch.equal(gm(-X), halved(-X))
    with pytest.raises(NotCovered):
        gm(torch.cat((X, X)))


def test_a_range_of_a_size_that_varies_does_not_become_that_of_the_example() -> None:
    model = Wrap(lambda _, x: x * sum(torch.arange(x.shape[0]).tolist()))
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    assert torch.equal(gm(-X), model(-X))
    with pytest.raises(NotCovered):
        gm(torch.cat((X, X)))


class Padded(nn.Module):
    """A convolution over time that pads as EnCodec's does: by numbers in buffers, and by what is left of the length."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 5, 3, stride=2)
        for name, number in {"reach": 3, "stride": 2, "padding": 1}.items():
            self.register_buffer(name, torch.tensor(number), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        frames = torch.ceil((length - self.reach + self.padding) / self.stride + 1).to(torch.int64) - 1
        beyond = frames * self.stride + self.reach - self.padding - length
        if length <= max(self.padding, beyond):
            x = F.pad(x, (0, 1))
        left, right = self.padding // 2, self.padding - self.padding // 2 + beyond
        padded: Tensor = self.conv(F.pad(input=x, pad=[left, right], mode="reflect"))
        return padded


def test_numbers_of_a_layer_are_no_values_of_the_inputs() -> None:
    model = Padded().eval()
    x = torch.randn(1, 4, 8)
    gm = rg.trace(model, (x,), dynamic_shapes="auto")
    for other in (-x, torch.randn(3, 4, 8)):
        assert torch.equal(gm(other), model(other))
    with pytest.raises(NotCovered, match="size 9, expected 8"):  # its padding is that of the example's length
        gm(torch.randn(1, 4, 9))
    odd = torch.randn(2, 4, 9)
    assert torch.equal(rg.trace(model, (odd,))(-odd), model(-odd))


class PaddedByZeros(Padded):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.padding, x.shape[-1] // self.stride))


def test_a_size_that_is_computed_with_them_may_vary_where_nothing_is_decided_by_it() -> None:
    model = PaddedByZeros().eval()
    gm = rg.trace(model, (torch.randn(1, 4, 8),), dynamic_shapes="auto")
    for other in (torch.randn(3, 4, 8), torch.randn(1, 4, 9)):
        assert torch.equal(gm(other), model(other))


def turned(x: Tensor) -> Tensor:
    """As compressai's entropy models do, which compute channel by channel."""
    others = torch.arange(2, x.ndim, dtype=torch.long, device=x.device)
    axes = torch.cat((torch.tensor([1, 0], dtype=torch.long, device=x.device), others))
    return x.permute(*axes).softmax(-1).reshape([x.shape[axis] for axis in axes]).permute(dims=list(axes))


def test_axes_that_are_joined_of_numbers_are_no_values_of_the_inputs() -> None:
    model = Wrap(lambda _, x: turned(x))
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    for x in (X, torch.randn(5, 7, 2)):
        assert torch.equal(gm(x), model(x))


JOINED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a size that varies": lambda x: [torch.tensor([x.shape[0]]), torch.arange(1)],
    "a value": lambda x: [torch.arange(1), (x > 9).sum().reshape(1)],
    "what is rounded": lambda _: [torch.tensor([1.3]).half().ceil().long(), torch.arange(1)],
}


@pytest.mark.parametrize("name", JOINED)
def test_axes_that_are_joined_of_anything_else_are(name: str) -> None:
    model = Wrap(lambda _, x: x.mean(sum(torch.cat(JOINED[name](x)).tolist())))
    gm = rg.trace(model, (X,), dynamic_shapes={"x": {0: torch.export.Dim("rows", max=99)}})
    longer, many = torch.cat((X, X[:1])), torch.full_like(X, 9.5)
    assert torch.equal(gm(X), model(X))
    for x, covered in ((longer, name != "a size that varies"), (many, name != "a value")):
        if covered:
            assert torch.equal(gm(x), model(x))
        else:
            with pytest.raises(NotCovered, match="and now it reads"):
                gm(x)


OF_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole numbers": lambda x: torch.tensor([x.sum().long(), x.argmax(), 3]),
    "all kinds": lambda x: torch.tensor((x.sum(), x.argmax(), True, 2.5)),
    "a half": lambda x: torch.tensor([x.sum().half(), x.argmax()]),
    "a half and a number": lambda x: torch.tensor([x.sum().half(), 2.5]),
    "another type": lambda x: torch.tensor([x.sum().double(), x.argmax()], dtype=torch.float32),
    "bools": lambda x: torch.tensor([x.sum() > 0, (x > 0).all()]),
    "a bool and a number": lambda x: torch.tensor([x.sum() > 0, 2]),
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_tensor_that_is_made_of_tensors_is_joined_of_them(name: str) -> None:
    gm = rg.trace(Wrap(lambda _, x: OF_TENSORS[name](x)), (X,), dynamic_shapes="auto")
    for x in (X, -X, torch.randn(5, 2, 2)):
        expected, given = OF_TENSORS[name](x), gm(x)
        assert torch.equal(given, expected)
        assert (given.dtype, given.device) == (expected.dtype, expected.device)


def test_no_gradient_reaches_the_tensors_that_a_tensor_is_made_of() -> None:
    model = Wrap(lambda _, x: torch.tensor([x.sum(), x.max()]) * x[0, 0, :2])
    gm = rg.trace(model, (X,))
    gradients = [torch.autograd.grad(each(x := X.clone().requires_grad_()).sum(), x)[0] for each in (gm, model)]
    assert torch.equal(*gradients)


def test_numbers_that_a_checkpoint_has_are_asked_for_at_each_call() -> None:
    model, x = Padded(persistent=True).eval(), torch.randn(1, 4, 8)
    checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gm = rg.trace(model, (x,))
    assert torch.equal(gm(-x), model(-x))
    model.load_state_dict({**checkpoint, "reach": torch.tensor(6)})
    with pytest.raises(NotCovered, match="of its inputs and flags, and now it reads"):
        gm(x)
    model.load_state_dict(checkpoint)
    assert torch.equal(gm(x), model(x))


class Counted(Padded):
    def forward(self, x: Tensor) -> Tensor:
        self.reach.add_(1)
        return super().forward(x) if self.reach > 0 else x


class Drawn(Padded):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, int(torch.rand_like(self.reach.float()).mul(9).ceil())))


class Measured(Padded):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, int((self.reach + x.sum()).ceil())))


class Rounded(Padded):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.3), persistent=False)  # another number after `.half()`

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, int(self.factor * 3)))


def test_numbers_that_are_drawn_are() -> None:
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        rg.trace(Drawn().eval(), (torch.randn(1, 4, 8),))


@pytest.mark.parametrize("kind", [Counted, Measured, Rounded])
def test_numbers_that_are_written_rounded_or_computed_of_inputs_are_asked_for(kind: type[Padded]) -> None:
    model, x = kind().eval(), torch.randn(1, 4, 8)
    model.reach.fill_(5)
    gm = rg.trace(model, (x,))
    twin = copy.deepcopy(model)
    assert torch.equal(gm(x), twin(x))
    assert torch.equal(model.reach, twin.reach)
    with torch.no_grad():
        for number in model.buffers():
            number.add_(2)
    with pytest.raises(NotCovered, match="of its inputs and flags, and now it reads"):
        gm(x)


def test_what_is_computed_with_an_unknown_number_that_is_given_by_name_is_unknown() -> None:
    three, unknown = torch.tensor(3), torch.tensor(1)
    known = KnownNumbers([(three, three)])
    for function, given in {torch.add: {"other": unknown}, torch.neg: {"out": unknown}}.items():
        result = function(three, **given)
        known.follow(function, (three,), given, result)
        assert known.read(Tensor.item, (result,)) is None
    known.follow(torch.neg, (three,), {}, unknown)
    assert known.read(Tensor.item, (unknown,)) == -3


def test_what_is_made_of_an_array_that_may_be_written_to_is_unknown() -> None:
    known = KnownNumbers()
    for made_of, expected in (([3], 3), (numpy.array([3]), None)):
        result = torch.tensor(made_of)
        known.follow(torch.tensor, (made_of,), {}, result)
        assert known.read(Tensor.item, (result,)) == expected


def test_a_number_of_a_layer_that_is_written_to_later_is_seen() -> None:
    model, x = Padded().eval(), torch.randn(2, 4, 8)
    result = rg.optimize(model, (x,), keep="all", engine="eager")
    with torch.no_grad():
        assert torch.allclose(result.model(-x), model(-x), atol=1e-5)
        model.padding.add_(1)
        assert model(x).shape[-1] > result.graph_module(x).shape[-1]
        assert torch.equal(result.model(x), model(x))


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


class Causal(nn.Module):
    """Attention that is causal if there are several queries, as in Whisper; by the name that this module has for it."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        key = x if past is None else torch.cat([past, x], 1)
        plain = scaled_dot_product_attention(x, key, key, is_causal=x.shape[1] > 1)
        return plain + F.scaled_dot_product_attention(x, key, key, None, 0.0, x.shape[1] > 1)


def test_attention_may_be_causal_by_a_comparison_of_sizes() -> None:
    own = (scaled_dot_product_attention, F.scaled_dot_product_attention)
    gm = rg.trace(Causal(), (torch.randn(2, 5, 8),), dynamic_shapes="auto")
    assert own == (scaled_dot_product_attention, F.scaled_dot_product_attention)
    for length in (1, 2, 9):
        x = torch.randn(3, length, 8)
        torch.testing.assert_close(gm(x), Causal()(x))


def test_what_is_not_causal_for_one_query_has_another_graph() -> None:
    past = torch.randn(2, 4, 8)
    gm = rg.trace(Causal(), (torch.randn(2, 5, 8), past), dynamic_shapes="auto")
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(gm(x, past), Causal()(x, past))
    with pytest.raises(TypeError, match="axis 1 of x has size 1"):
        gm(x[:, :1], past)
    gm = rg.trace(Causal(), (x[:, :1], past), dynamic_shapes="auto")
    torch.testing.assert_close(gm(x[:, :1], past), Causal()(x[:, :1], past))


class Table(nn.Module):
    """Has a table that torch can neither clone and write back nor compare."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heads", torch.eye(3).to_sparse())
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        return self.kept * 2


def test_a_sparse_buffer_is_in_nobodys_way() -> None:
    model = Table().eval()
    gm = rg.trace(model, (torch.randn(2, 8),), dynamic_shapes="auto")
    for rows in (1, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(gm(x), model(x))
    assert rg.optimize(model, (torch.randn(2, 8),), keep="all", seconds=0.02).graphs[0].sets == ("kept",)


class OneAlone(nn.Module):
    """Takes one row in another way than several, and no symbol for its columns."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x.shape[1]) is not int:
            raise TypeError("must be int, not SymInt")
        return x * 2 if x.shape[0] > 1 else x * 3


def test_where_one_row_is_another_case_what_cannot_vary_is_fixed_again() -> None:
    x = torch.randn(1, 5)
    gm = rg.trace(OneAlone(), (x,), dynamic_shapes="auto")
    torch.testing.assert_close(gm(x), x * 3)
    with pytest.raises(TypeError, match="axis 0 of x has size 2"):
        gm(torch.randn(2, 5))


class Policy(nn.Module):
    """As those of stable-baselines3."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.linear(x)
        found = torch.distributions.Normal(mean, mean.exp())
        return found.log_prob(found.mean + 1)


def test_a_distribution_that_looks_at_its_arguments_is_refused_with_the_cure() -> None:
    x, model = torch.randn(2, 8), Policy().eval()
    kept = torch.distributions.Distribution._validate_args  # torch.compile sets it to False
    try:
        torch.distributions.Distribution.set_default_validate_args(True)
        with pytest.raises(CaptureError, match="set_default_validate_args\\(False\\)"):
            rg.trace(model, (x,))
        torch.distributions.Distribution.set_default_validate_args(False)
        torch.testing.assert_close(rg.trace(model, (x,))(x), model(x))
    finally:
        torch.distributions.Distribution.set_default_validate_args(kept)


def _share(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """What a window has whose number is divided by, along some axes of images, flattened."""
    for axis in axes:
        size = x.shape[axis]
        x = x.narrow(axis, 0, size // (size // 8))
    return x.flatten(2) * 2


@pytest.mark.parametrize(("axes", "varying"), [((), {0, 1, 2, 3}), ((2,), {0, 1, 2, 3}), ((2, 3), {0})])
def test_sizes_divided_by_what_was_divided_are_fixed(axes: tuple[int, ...], varying: set[int]) -> None:
    model = Wrap(lambda _, x: _share(x, axes))
    gm = rg.trace(model, (torch.randn(2, 3, 16, 24),), dynamic_shapes="auto")
    value = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    assert {axis for axis, size in enumerate(value.shape) if isinstance(size, torch.SymInt)} == varying
    for batch in (1, 3):
        x = torch.randn(batch, 3, 16, 24)
        torch.testing.assert_close(gm(x), model(x))


def test_numpy_is_refused_with_the_cure() -> None:
    model = Wrap(lambda _, x: torch.from_numpy(x.detach().numpy().cumsum()))
    with pytest.raises(CaptureError, match="what NumPy computes is in no graph"):
        rg.trace(model, (X,))
