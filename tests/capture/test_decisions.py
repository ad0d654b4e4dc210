"""What a model decides by the values of its inputs: fixed as in the example, and asked for at each call."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap
from regraft.capture import decisions, transformers_adapter
from regraft.capture.codegen import decided_in
from regraft.capture.given_numbers import GivenNumbers
from regraft.core.errors import CaptureError, NotCovered
from regraft.core.fx_private import codegen_of
from regraft.dropin import grafts_of

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]
LENGTHS = torch.tensor([6, 4, 2])
X = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))


class Decides(nn.Module):
    """A linear layer, and something that is decided around it."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))
        self.register_buffer("flag", torch.tensor(True))
        self.function = function

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.function(self, x, lengths)


def filled(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, :length] = True
    return m.linear(x) * mask[..., None]


def doubled_once_written(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    shorter = lengths.clone()
    longest = shorter.max()
    shorter[0] = 1
    y = m.linear(x)[:, : int(shorter.max())]
    return y * 2 if longest > 5 else y


def written_later(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    shorter = lengths.clone()
    first = int(shorter[0])
    shorter[0] = 1
    return m.linear(x)[:, : int(shorter.max())] * first


def picked(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    y: Tensor = m.linear(x)[torch.arange(x.shape[1]) < lengths[:, None]]
    return y * 2 if y.shape[0] > 5 else y


def picked_within(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    y: Tensor = m.linear(x)[None, ..., torch.arange(x.shape[1]) < lengths[0], 1:]
    return y * 2 if y.shape[2] > 2 else y


def found(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows, columns = torch.where(torch.arange(x.shape[1]) < lengths[:, None])
    return m.linear(x) if len(rows) == 0 else m.linear(x)[rows, columns] + 1


def listed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    places = (lengths > 3).nonzero()
    return m.linear(x)[places.flatten()] if places.shape[0] > 1 else m.linear(x)


def repeated(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    y: Tensor = m.linear(x).repeat_interleave(lengths, 0)
    places = torch.repeat_interleave(lengths)
    return y * 2 if y.shape[0] > 5 else y + places.sum() + torch.repeat_interleave(x, repeats=lengths, dim=0)


def repeated_otherwise(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    y = m.linear(x) if lengths.sum() > 5 else x
    y = torch.repeat_interleave(input=y, repeats=torch.tensor([2, 1, 0]), dim=0)
    return y.repeat_interleave(torch.tensor([2]), 0) + y.repeat_interleave(2, dim=0) - y.repeat(2, 1, 1)


def selected(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    y: Tensor = m.linear(x)[..., 0].masked_select(mask)
    return y * 2 if y.shape[0] > 5 else y + x.masked_select(mask[..., None]).sum()


def filled_at(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """As UDOP does, whose mask is as large as what weights have made."""
    y: Tensor = m.linear(x)
    masks = [torch.full_like(y[:, :, 0], False, dtype=torch.bool), torch.ones_like(y[:, :, 0]) < 0]
    masks += [torch.zeros_like(y[..., 0]).bool(), torch.full_like(y[..., 0], fill_value=2) < 1]
    rows, columns = zip(*torch.stack([torch.arange(3), lengths.clamp(0, 5)], 1), strict=True)
    for mask in masks:
        mask[rows, columns] = True
    return y[masks[0]] * 2 if all(y[mask].shape[0] > 2 for mask in masks) else y


FIXED: dict[str, tuple[Forward, list[list[int]], list[list[int]]]] = {
    # what is decided, lengths that decide it alike, and lengths that do not
    "a bool": (lambda m, x, n: m.linear(x) if (n > 3).any() else x, [[1, 1, 4]], [[1, 1, 1]]),
    "an item": (lambda m, x, n: m.linear(x) if (n.float().mean() > 2).item() else x, [[3, 3, 3]], [[1, 1, 1]]),
    "a number": (lambda m, x, n: m.linear(x)[:, : int(n.max())] * 2, [[1, 6, 6]], [[5, 5, 5], [1, 1, 1]]),
    "a number and a bool": (
        lambda m, x, n: m.linear(x) * int(n[0]) if n[0] else x,
        [[6, 1, 1]],
        [[5, 4, 2], [0, 0, 0]],
    ),
    "an equal": (lambda m, x, n: m.linear(x) if torch.equal(n, n.flip(0)) else x, [[5, 4, 3]], [[5, 4, 5]]),
    "a close": (lambda m, x, n: m.linear(x) if n.float().allclose(n * 1.1) else x, [[5, 4, 3]], [[0, 0, 0]]),
    "a member": (lambda m, x, n: m.linear(x) if 4 in n else x, [[4, 4, 4]], [[1, 2, 3]]),
    "a mask that is filled": (filled, [], [[6, 5, 2], [1, 1, 1]]),
    "what is written": (doubled_once_written, [[6, 1, 4]], [[5, 4, 2], [6, 3, 2]]),
    "what is written later": (written_later, [[6, 1, 4]], [[5, 4, 2], [6, 3, 2]]),
    "a list": (lambda m, x, n: m.linear(x) * len([k for k in n.tolist() if k > 2]), [], [[6, 4, 1], [0, 0, 0]]),
    "a set of sums with a size": (
        lambda m, x, n: m.linear(x) * len({k + x.shape[1] for k in n.tolist()}),  # as Lumina asks whether to mask
        [],
        [[6, 4, 4], [0, 0, 0]],
    ),
    "what its data holds": (lambda m, x, n: m.linear(x) * int(n.data.max()), [[6, 1, 1]], [[5, 4, 2]]),
    "lists": (lambda m, x, n: m.linear(x) * len(set(map(tuple, (n > n[:, None]).tolist()))), [[9, 8, 7]], [[1, 1, 1]]),
    "rows of a mask": (picked, [[2, 4, 6], [4, 4, 4]], [[6, 6, 6], [0, 0, 0]]),
    "rows of an axis": (picked_within, [[6, 1, 1]], [[5, 4, 2], [1, 4, 2]]),
    "places": (found, [[2, 4, 6]], [[6, 6, 6], [0, 0, 0]]),
    "places of entries": (
        lambda m, x, n: m.linear(x) * (2 if torch.argwhere(n > 3).shape[0] > 1 else 1),
        [[4, 1, 6]],
        [[6, 6, 6]],
    ),
    "repeats": (repeated, [[2, 4, 6], [4, 4, 4]], [[6, 6, 6], [0, 0, 0]]),
    "repeats of each": (repeated_otherwise, [[2, 4, 6]], [[1, 1, 1]]),
    "what a mask selects": (selected, [[2, 4, 6]], [[6, 6, 6], [1, 1, 1]]),
    "what lies at some places": (filled_at, [[2, 4, 5]], []),
    "the largest": (lambda m, x, n: m.linear(x) * (2 if max(n) > 5 else 1), [[6, 1, 1]], [[5, 4, 2]]),
    "the smallest": (lambda m, x, n: m.linear(x) if min(n) > 1 else x, [[2, 2, 2]], [[1, 1, 1]]),
    "places in a list": (listed, [[1, 5, 6], [4, 4, 0]], [[6, 6, 6], [0, 0, 0]]),
}


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("name", FIXED)
def test_what_is_decided_alike_is_computed_alike_and_anything_else_refused(name: str, sizes: str | None) -> None:
    function, alike, others = FIXED[name]
    model = Decides(function).eval()
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes=sizes)
    assert decided_in(gm)
    loaded = pickle.loads(pickle.dumps(gm))
    for graph in (gm, copy.deepcopy(gm), loaded):
        for lengths in ([*LENGTHS.tolist()], *alike):
            given = torch.tensor(lengths)
            assert torch.equal(graph(-X, given), model(-X, given))
        for lengths in others:
            with pytest.raises(
                NotCovered, match=r"reads .* of its inputs and flags, and now it reads .* an example of this"
            ):
                graph(X, torch.tensor(lengths))


@torch.library.custom_op("regraft_test::noise", mutates_args=())
def noise(lengths: Tensor) -> Tensor:
    return lengths + torch.rand(lengths.shape)


@noise.register_fake
def _(lengths: Tensor) -> Tensor:
    return torch.empty(lengths.shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, n: m.linear(x) if torch.rand(3).max() > 0.1 else x,  # what is drawn
        lambda m, x, n: m.linear(x) if (torch.rand_like(x).max() > 0.1) | (n > 1).any() else x,
        lambda m, x, n: m.linear(x) if noise(n).max() > 3 else x,  # what nobody knows
        lambda m, x, n: m.linear(x) if m.linear.bias.max() > -9 else x,  # what is no flag
        lambda m, x, n: m.linear(x) if (n > 1).all() & (m.linear.bias > -9).all() else x,
        lambda m, x, n: m.linear(x) if m.linear(x).max() > n.max() else x,  # what weights make
        lambda m, x, n: x if m.linear(x)[m.linear(x) > 0].shape[0] > n.max() else x + 1,
        lambda m, x, n: m.linear(x) * float(x.max()) if float(x.max()) > 1 else x,  # what no other call would have
    ],
)
def test_what_is_decided_by_anything_else_is_refused(function: Forward) -> None:
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        rg.trace(Decides(function).eval(), (X, LENGTHS))


FLAGS: dict[str, Forward] = {
    "a flag": lambda m, x, n: m.linear(x) if m.flag else x,
    "a flag of several kinds": lambda m, x, n: m.linear(x) if m.flag and int(m.flag.long()) == 1 else x,
    "a flag and an input": lambda m, x, n: m.linear(x) if (n > 1).all() & m.flag else x,
    "a number": lambda m, x, n: m.linear(x) if m.level > 0.5 else x,
    "a weight": lambda m, x, n: m.linear(x) if (m.scale > 0.5).item() else x,
    "a length": lambda m, x, n: m.linear(x)[:, : int(m.level)] * 2,
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_the_model_is_fixed_and_asked_for_as_it_is_at_each_call(name: str) -> None:
    model = Decides(FLAGS[name]).eval()
    model.register_buffer("level", torch.ones(1))
    model.scale = nn.Parameter(torch.tensor(1.0))
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    assert decided_in(gm)
    loaded = pickle.loads(pickle.dumps(gm))
    expected = model(-X, LENGTHS)
    for graph in (gm, copy.deepcopy(gm), loaded):
        assert torch.equal(graph(-X, LENGTHS), expected)
    with torch.no_grad():
        for flag in (model.flag, model.level, model.scale):
            flag.zero_()
    with pytest.raises(NotCovered, match=r"reads (1|True) of its inputs and flags, and now it reads (0|False), at"):
        gm(-X, LENGTHS)
    assert torch.equal(loaded(-X, LENGTHS), expected)  # its flags are its own
    with torch.no_grad():
        for flag in (model.flag, model.level, model.scale):
            flag.fill_(1)
    assert torch.equal(gm(-X, LENGTHS), expected)


def within_a_region(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """As vector_quantize_pytorch does, which switches autocast off around all of a forward."""
    with torch.autocast("cpu", enabled=False):
        y: Tensor = m.linear(x)
        return y if m.flag and (lengths @ lengths) > 5 else x


def test_a_region_without_autocast_may_decide_where_there_is_none() -> None:
    model = Decides(within_a_region).eval()
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    assert torch.equal(gm(-X, LENGTHS), model(-X, LENGTHS))
    with pytest.raises(NotCovered, match="of its inputs and flags, and now it reads False"):
        gm(X, LENGTHS * 0)
    with torch.autocast("cpu"), pytest.raises(NotCovered, match="under autocast, which the model switches off"):
        gm(X, LENGTHS)
    codegen: Any = codegen_of(gm.graph)
    assert codegen.calling.covers({"x": X, "lengths": LENGTHS})
    with torch.autocast("cpu"):
        assert not codegen.calling.covers({"x": X, "lengths": LENGTHS})


def test_a_region_with_autocast_may_not() -> None:
    def within(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return m.linear(x) if (lengths.float() @ lengths.float()) > 5 else x

    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        rg.trace(Decides(within).eval(), (X, LENGTHS))


SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": torch.arange,
    "linspace": lambda n: torch.linspace(0, 1, n),
    "zeros": torch.zeros,
    "ones": lambda n: torch.ones((n, 2)),
    "empty": lambda n: torch.empty(n).fill_(1),
    "eye": torch.eye,
    "pad": lambda n: F.pad(torch.ones(1), (0, n)),
    "permute": lambda n: torch.ones(3, 7).permute(n - 5, n - 6),
    "permuted": lambda n: torch.permute(torch.ones(3, 7), (n - 5, n - 6)),
    "view": lambda n: torch.ones(12).view(n, -1),
    "reshape": lambda n: torch.ones(12).reshape((n, -1)),
    "reshaped": lambda n: torch.reshape(torch.ones(12), (n, -1)),
    "expand": lambda n: torch.ones(1).expand(n),
    "repeat": lambda n: torch.ones(1).repeat(n),
    "narrow": lambda n: torch.ones(9).narrow(0, 0, n),
    "narrowed": lambda n: torch.narrow(torch.ones(9), 0, 0, n),
    "split": lambda n: torch.ones(9).split(n)[0],
    "new_zeros": lambda n: torch.ones(1).new_zeros(n),
    "new_ones": lambda n: torch.ones(1).new_ones((n, n)),
    "new_empty": lambda n: torch.ones(1).new_empty(n).fill_(2),
    "a slice": lambda n: torch.ones(9)[:n],
    "a slice of an axis": lambda n: torch.ones(2, 9)[1, 1 : n + 1],
}


@pytest.mark.parametrize("name", SIZED)
def test_a_size_that_is_a_value_of_the_inputs_is_read(name: str) -> None:
    model = Decides(lambda m, x, n: m.linear(x) * (SIZED[name](n.max()).sum() if len(SIZED[name](n.max())) > 4 else 1))
    gm = rg.trace(model.eval(), (X, LENGTHS))
    assert torch.equal(gm(-X, LENGTHS), model(-X, LENGTHS))
    with pytest.raises(NotCovered, match="of its inputs"):
        gm(X, LENGTHS - 1)


def test_a_mask_of_other_sizes_than_what_it_picks_from_is_refused_as_the_model_refuses_it() -> None:
    model = Decides(lambda m, x, n: picked_by(m.linear(x), n)).eval()
    mask = torch.arange(6) < LENGTHS[:, None]
    gm = rg.trace(model, (X, mask), dynamic_shapes="auto")
    assert torch.equal(gm(-X, mask), model(-X, mask))
    for sizes in ((4, 6, 4), (3, 7, 4), (2, 6, 4)):
        with pytest.raises(IndexError):
            model(torch.randn(sizes), mask)
        with pytest.raises(NotCovered):
            gm(torch.randn(sizes), mask)


def picked_by(y: Tensor, mask: Tensor) -> Tensor:
    return y[mask] * 2 if y[mask].shape[0] > 5 else y[mask]


def test_what_varies_still_varies() -> None:
    model = Decides(FIXED["a bool"][0]).eval()
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    for rows, length in ((3, 9), (5, 6), (1, 1)):
        x, lengths = torch.randn(rows, length, 4), torch.full((rows,), 5)
        assert torch.equal(gm(x, lengths), model(x, lengths))
        with pytest.raises(NotCovered, match="reads True of its inputs"):
            gm(x, lengths - 3)


def test_of_the_tries_with_sizes_that_vary_one_tells_that_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    exporting, varying = torch.export.export, []

    def export(flat: Any, *args: Any, **kwargs: Any) -> Any:
        varying.append((kwargs["dynamic_shapes"] is not None, flat.values is not None))
        return exporting(flat, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    model = Decides(lambda m, x, n: m.linear(x) if n.max() > 5 else x).eval()
    assert decided_in(rg.trace(model, (X, LENGTHS), dynamic_shapes="auto"))
    assert varying.count((True, False)) == 1, "the others take as long, and end there too"
    assert varying[-1] == (True, True)


def test_a_way_in_which_it_does_not_decide_is_tried_with_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decides(lambda m, x, n: m.linear(x) if m.told or n.max() > 5 else x).eval()
    model.told = False  # type: ignore[assignment]

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        model.told = True  # type: ignore[assignment]
        try:
            yield
        finally:
            model.told = False  # type: ignore[assignment]

    monkeypatch.setattr(transformers_adapter, "ways", lambda _: [contextlib.nullcontext, told])
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    assert not decided_in(gm)
    for x in (torch.randn(3, 9, 4), torch.randn(5, 6, 4), torch.randn(4, 7, 4)):
        assert torch.equal(gm(x, torch.full((len(x),), 6)), model(x, torch.full((len(x),), 6)))


def test_where_a_question_asks_for_a_size_of_what_weights_make_no_size_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torchaudio's Emformer does."""
    expect_plain = decisions._expect_plain

    def expect_numbers(program: torch.export.ExportedProgram, nodes: set[torch.fx.Node], flags: Any) -> None:
        if any(isinstance(size, torch.SymInt) for node in nodes for size in getattr(node.meta["val"], "shape", ())):
            raise NotImplementedError("a size of what weights make")
        expect_plain(program, nodes, flags)

    monkeypatch.setattr(decisions, "_expect_plain", expect_numbers)
    model = Decides(FIXED["a bool"][0]).eval()
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    assert torch.equal(gm(-X, LENGTHS), model(-X, LENGTHS))
    with pytest.raises(NotCovered, match="axis 0 of x has size 4, expected 3"):
        gm(torch.randn(4, 6, 4), LENGTHS)


def test_sizes_in_a_set_are_fixed() -> None:
    model = Wrap(lambda _, x: x * 2 if len(set(x.shape)) > 1 else x * 3)
    gm = rg.trace(model, (X,), dynamic_shapes="auto")
    assert torch.equal(gm(X), X * 2)
    with pytest.raises(NotCovered):
        gm(torch.randn(4, 4, 4))


def test_a_size_that_is_read_of_a_tensor_is_asked_for_as_well() -> None:
    model = Decides(lambda m, x, n: m.linear(x) * (2 if torch.tensor(x.shape).max() > 6 else 3)).eval()
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    for length in (2, 6, 7, 9):
        x = torch.randn(3, length, 4)
        try:
            assert torch.equal(gm(x, LENGTHS), model(x, LENGTHS))
        except NotCovered:
            assert length != 6
        else:
            assert length <= 6


class NamedOtherwise(Decides):
    def forward(self, input: Tensor, lambda_: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input, lambda_)


def test_an_input_may_have_a_name_that_python_has_for_something_else() -> None:
    model = NamedOtherwise(lambda m, x, n: m.linear(x) if (x > 9).any() or (n > 3).any() else x).eval()
    gm = rg.trace(model, (X, LENGTHS), dynamic_shapes="auto")
    assert torch.equal(gm(-X, LENGTHS), model(-X, LENGTHS))
    with pytest.raises(NotCovered):
        gm(X + 10, LENGTHS)


def test_a_model_that_a_graph_holds_for_without_asking_is_not_asked() -> None:
    model = Decides(lambda m, x, n: m.linear(x)[:, : n.max()]).eval()
    assert not decided_in(rg.trace(model, (X, LENGTHS), dynamic_shapes="auto"))
    written = Decides(lambda m, x, n: m.linear(x) * written_number()).eval()
    gm = rg.trace(written, (X, LENGTHS))
    assert not decided_in(gm)
    assert torch.equal(gm(-X, LENGTHS), written(-X, LENGTHS))


def written_number() -> int:
    numbers = torch.zeros(2)
    numbers[1] = 3
    return int(numbers.sum())


def test_a_trace_with_proxies_would_lose_the_question_and_is_refused() -> None:
    gm = rg.trace(Decides(FIXED["a bool"][0]).eval(), (X, LENGTHS))
    with pytest.raises(NotCovered, match="would be lost in a trace"):
        torch.fx.symbolic_trace(gm)


class Encoder(nn.Module):
    """Three layers that pay, around what a mask of padding decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all():
            x = x * mask[..., None]
        return self.layers(x)


@pytest.fixture(scope="module")
def encoder() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Encoder().eval(), torch.randn(4, 32, 64), torch.ones(4, 32, dtype=torch.bool)


def test_a_dropin_runs_the_original_where_it_decides_otherwise(encoder: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, mask = encoder
    result = rg.optimize(model, (x, mask), keep="all", seconds=0.01)
    assert any("the original runs forward where it reads anything else" in note for note in result.notes)
    assert any("if not mask.all()" in note for note in result.notes)
    padded = mask.clone()
    padded[1, 9:] = False
    grafts = grafts_of(result.model)
    assert grafts is not None
    with torch.inference_mode():
        for given, calls in ((mask, 1), (padded, 1), (mask, 2)):
            truth = copy.deepcopy(model).double()(x.double(), given)
            assert torch.allclose(result.model(x, given).double(), truth, rtol=0, atol=1e-6)
            assert grafts.calls == {"forward": calls}


class Initialized(nn.Module):
    """Three layers that pay, behind an offset that the first call finds, as layers of normalizing flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU())])
        self.register_buffer("offset", torch.zeros(64))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            self.offset.copy_(x.mean((0, 1)))
            self.initialized.fill_(True)
        return self.layers(x - self.offset)


def test_a_call_that_sets_what_it_reads_is_refused(encoder: tuple[nn.Module, Tensor, Tensor]) -> None:
    model = Initialized().eval()
    with pytest.raises(CaptureError, match=r"inputs and flags is not the same in each call: False at .*initialized"):
        rg.optimize(model, (encoder[1],), keep="all", seconds=0.01)
    assert not model.initialized


def test_a_dropin_asks_for_its_own_flag(encoder: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, (_, x, _) = Initialized().eval(), encoder
    model.initialized.fill_(True)
    plain = copy.deepcopy(model)
    result = rg.optimize(model, (x,), keep="all", seconds=0.01)
    others = [copy.deepcopy(result.model), pickle.loads(pickle.dumps(result.model))]
    with torch.inference_mode():
        for given in (x + 1, x - 2, x * 3):
            expected = plain(given)
            for each in (result.model, *others):
                assert torch.allclose(each(given), expected, atol=1e-5)
        grafts = grafts_of(result.model)
        assert grafts is not None
        assert grafts.calls == {"forward": 3}
        for each in (plain, result.model, *others):
            each.initialized.fill_(False)
        expected = plain(x + 5)
        for each in (result.model, *others):
            assert torch.allclose(each(x + 5), expected, atol=1e-5)
            assert each.initialized


def test_a_saved_program_raises_where_it_decides_otherwise(
    encoder: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, mask = encoder
    path = tmp_path / "encoder.pt2"
    rg.optimize(model, (x, mask), keep="all", seconds=0.01).save(path)
    for program in (torch.export.load(path).module(), rg.load(path), rg.trace(rg.load(path), (x, mask))):
        assert torch.allclose(program(x, mask), model(x, mask), atol=1e-6)
        with pytest.raises(RuntimeError, match=r"holds only where the model reads True at .*if not mask\.all\(\)"):
            program(x, ~mask)


def test_a_number_that_was_read_as_a_bool_is_asked_for_as_one(tmp_path: Path) -> None:
    model = Decides(lambda m, x, n: m.linear(x) if n.sum() else x).eval()
    gm = rg.trace(model, (X, LENGTHS))
    assert torch.equal(gm(X, LENGTHS + 1), model(X, LENGTHS + 1))
    torch.export.save(torch.export.export(gm, (X, LENGTHS), strict=False), file := io.BytesIO())
    file.seek(0)
    program = torch.export.load(file).module()
    assert torch.equal(program(X, LENGTHS + 1), model(X, LENGTHS + 1))
    with pytest.raises(RuntimeError, match="reads True"):
        program(X, LENGTHS * 0)


def test_what_is_read_twice_is_asked_once() -> None:
    def function(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        for _ in range(3):
            x = m.linear(x) * int(lengths.max()) if lengths.max() else x
        return x

    gm = rg.trace(Decides(function).eval(), (X, LENGTHS))
    assert decided_in(gm).count(" at ") == 2  # as a number, and as a bool
    with pytest.raises(NotCovered):
        gm(X, LENGTHS - 1)


def test_a_graph_that_does_not_read_what_the_model_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = GivenNumbers.read

    def misread(self: GivenNumbers, function: Any, args: Any) -> Any:
        number = read(self, function, args)
        if number is None:
            return None
        self.asked[-1] = replace(self.asked[-1], number=not number)
        return not number

    monkeypatch.setattr(GivenNumbers, "read", misread)
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        rg.trace(Decides(FIXED["a bool"][0]).eval(), (X, LENGTHS))


@pytest.mark.parametrize("kind", [Tensor.bool, Tensor.int, Tensor.long])
def test_a_list_is_asked_for_once_in_a_saved_program_too(kind: Any) -> None:
    model = Decides(lambda m, x, n: m.linear(x) * len(list(filter(None, kind(n - 2).tolist())))).eval()
    gm = rg.trace(model, (X, LENGTHS))
    assert decided_in(gm).count(" at ") == 1
    torch.export.save(torch.export.export(gm, (X, LENGTHS), strict=False), file := io.BytesIO())
    file.seek(0)
    program = torch.export.load(file).module()
    assert torch.equal(program(-X, LENGTHS), model(-X, LENGTHS))
    with pytest.raises(RuntimeError, match=r"the model reads \[.*\] at"):
        program(X, LENGTHS.flip(0))


def test_a_long_list_is_not_written_out() -> None:
    model = Decides(lambda m, x, n: m.linear(x) * len(list(filter(None, n.tolist())))).eval()
    lengths = torch.arange(1000)
    gm = rg.trace(model, (X, lengths))
    assert len(decided_in(gm)) < 300
    with pytest.raises(NotCovered, match=r"reads \[0, 1, 2, 3, 4, 5, \.\.\.\] of its inputs"):
        gm(X, lengths + 1)


def test_a_compiled_graph_asks_too() -> None:
    model = Decides(FIXED["a bool"][0]).eval()
    compiled = torch.compile(rg.trace(model, (X, LENGTHS)), backend="eager")
    assert torch.equal(compiled(X, LENGTHS), model(X, LENGTHS))
    with pytest.raises(NotCovered):
        compiled(X, LENGTHS * 0)
    with torch.no_grad():
        dropin = torch.compile(rg.optimize(model, (X, LENGTHS), keep="all", seconds=0.01).model, backend="eager")
        for lengths in (LENGTHS, LENGTHS * 0, LENGTHS):
            assert torch.allclose(dropin(X, lengths), model(X, lengths), atol=1e-6)


def test_inputs_that_the_question_cannot_be_asked_of_are_refused() -> None:
    model = Decides(lambda m, x, n: F.relu(m.linear(x)) if n.max() > 3 else x).eval()
    gm = rg.trace(model, (X, LENGTHS))
    with pytest.raises(NotCovered):
        gm(X.to("meta"), LENGTHS.to("meta"))
