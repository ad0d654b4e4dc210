"""The sample's sizes are tried with other values, which stay valid for what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regraft.verify import verify
from regraft.verify.oracle import Oracle
from regraft.verify.run import Inputs
from regraft.verify.values import revalued


def another(*args: Any, **kwargs: Any) -> Inputs | None:
    return revalued((args, kwargs), torch.Generator().manual_seed(3))


def test_floats_are_drawn_from_the_samples_own() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    found = another(x)
    assert found is not None
    ((new,), _) = found
    assert torch.equal(x, before)
    assert new.shape == x.shape
    assert new.dtype == x.dtype
    assert not torch.equal(new, x)
    assert set(new.flatten().tolist()) <= set(x.flatten().tolist())
    assert len(new.unique()) > 5


def test_ids_change_places_with_those_of_the_same_masks_in_every_row_alike() -> None:
    ids, types = torch.randint(1, 90, (2, 40), generator=torch.Generator().manual_seed(0)), torch.zeros(2, 40).long()
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 25:], types[:, 10:] = 0, 1
    ids[0, 25:] = 0
    found = another(ids, kinds=types, mask=mask, more={"labels": ids + 100})
    assert found is not None
    (new,), kwargs = found
    assert torch.equal(kwargs["kinds"], types)
    assert torch.equal(kwargs["mask"], mask)
    assert torch.equal(kwargs["more"]["labels"], new + 100)
    assert torch.equal(new == 0, mask == 0)
    moved = [(new[1] == value).nonzero().flatten().tolist() for value in ids[1]]
    order = [places[0] for places in moved if len(places) == 1]
    assert order != sorted(order)
    for part in (slice(10), slice(10, 25), slice(25, 40)):  # of each kind and mask
        assert torch.equal(new[:, part].sort(-1).values, ids[:, part].sort(-1).values)
    assert not torch.equal(new[:, :10], ids[:, :10])
    assert not torch.equal(new[:, 10:25], ids[:, 10:25])
    assert not torch.equal(new[:, 25:], ids[:, 25:])


def test_bytes_are_integers() -> None:
    image = torch.arange(36, dtype=torch.uint8).flip(0).view(1, 3, 3, 4)
    found = another(image)
    assert found is not None
    assert not torch.equal(found[0][0], image)
    assert torch.equal(found[0][0].sort().values, image.sort().values)


def test_a_mask_of_pairs_does_not_hold_ids_where_they_are() -> None:
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(0))[None]
    assert another(ids, mask=torch.ones(1, 1, 30, 30).tril()) is not None
    assert another(ids, mask=torch.ones(30).cumsum(0)) is not None  # as many kinds as places, but no mask


STAYS = {
    "positions": torch.arange(12)[None],
    "where sequences begin": torch.tensor([[0, 3, 3, 9, 14]]),
    "mask": torch.tensor([[1, 1, 1, 0, 0]]),
    "yes or no": torch.tensor([[True, False, True]]),
    "mask to be added": torch.tensor([[0.0, -torch.inf, -1e9]]),
    "constant": torch.full((3, 4), 7),
    "number": torch.tensor(5),
    "float": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "no ids": torch.zeros(2, 0, dtype=torch.long),
    "one id": torch.tensor([[7]]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "sparse": torch.randn(3, 3).to_sparse(),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_tells_yes_or_no_or_where_stays(name: str) -> None:
    tensor = STAYS[name]
    assert another(tensor) is None
    found = another(tensor, x=torch.randn(9))
    assert found is not None
    assert torch.equal(found[0][0].to_dense(), tensor.to_dense())


class Sums(nn.Module):
    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return x * ids[0, 0]


def baked(at: float | None, number: int | None) -> Callable[..., Tensor]:
    """The same, with what the sample had in it."""
    return lambda ids, x: (x if at is None else torch.full_like(x, at)) * (ids[0, 0] if number is None else number)


def test_what_was_taken_from_the_sample_is_seen() -> None:
    ids, same = torch.randperm(50, generator=torch.Generator().manual_seed(0))[None], torch.full((3,), 1.5)
    assert verify(Sums(), baked(None, None), (ids, same)).ok
    found = verify(Sums(), wrong := baked(None, int(ids[0, 0])), (ids, same))
    assert [case.label for case in found.cases if not case.ok] == ["other values of the same sizes"]
    assert verify(Sums(), wrong, (ids, same), vary_values=False).ok
    x = torch.tensor([0.5, 1.5, 2.5])
    found = verify(Sums(), lambda ids, _: x * ids[0, 0], (ids, x))
    assert [case.ok for case in found.cases] == [True, False]


def test_values_that_the_reference_refuses_are_left_out_and_said() -> None:
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(0))[None]

    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(x, ids):
                raise ValueError("not these")
            return x * 2.0

    found = verify(Strict(), lambda x: x * 2.0, (ids,))
    assert found.ok
    assert "not these" in str(found)


def test_an_oracle_is_asked_once_about_them() -> None:
    calls = []

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x.dtype)
            return x * 2

    oracle, x = Oracle(Counts(), float64=True, seed=0), torch.randn(5)
    for _ in range(3):
        assert len(verify(oracle, lambda x: x * 2, (x,)).cases) == 2
    assert calls == [torch.float32, torch.float64] * 2
    with torch.inference_mode():  # where nobody could tell whether they were written to
        several = [torch.randn(5), torch.randn(5) + 9]
    assert all((oracle.other_values(((one,), {}))[0][0] > 5).all() == (one is several[1]) for one in several)
    x.add_(1)  # they are other inputs now
    verify(oracle, lambda x: x * 2, (x,))
    assert len(calls) == 8
