"""What a model keeps on itself between two calls, and who asks for it."""

from __future__ import annotations

import torch
from torch import nn

from regraft.capture import trace
from regraft.capture.own_state import set_meanwhile, used_meanwhile


class Counting(nn.Module):
    shared: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, None
        self.gone = 1

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        return x + (self.count if offset is None else offset)

    def note(self, x: torch.Tensor) -> None:
        self.count, self.last, self.shared = self.count + 1, x, 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Counting(), Counting()

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        return self.left(x, offset) + self.right(x, x)


OWN = {("left", "count"), ("left", "last"), ("right", "count")}


def test_what_is_set() -> None:
    model = Pair()
    with set_meanwhile(model) as found:
        model.left.note(torch.ones(1))
        model.right.count = 5
        model.right.new = 1
        del model.right.gone
    assert found == OWN


def test_who_is_asked() -> None:
    model, x = Pair(), torch.ones(2)
    for call, expected in (((x,), {("left", "count")}), ((x, x), set())):
        with used_meanwhile(model, OWN) as used:
            gm = trace(model, call)
        assert used == expected
        assert torch.equal(gm(*call), model(*call))
    assert "count" not in vars(Counting)
    assert (model.left.count, hasattr(model.left, "last"), hasattr(Counting, "last")) == (0, True, False)


def test_every_way_of_asking_counts() -> None:
    model = Pair()

    def assign() -> None:
        model.left.last = torch.ones(1)

    def delete() -> None:
        del model.left.last

    asking = [lambda: getattr(model.left, "last", None), lambda: hasattr(model.left, "last"), assign, delete]
    for ask in asking:
        with used_meanwhile(model, OWN) as used:
            assert not hasattr(Counting, "last")
            ask()
            assert vars(model.left).get("last", 0) is getattr(model.left, "last", 0)
        assert used == {("left", "last")}
        assert not hasattr(Counting, "last")
    assert not hasattr(model.left, "last")


def test_what_its_class_has_too_counts_as_asked() -> None:
    model = Pair()
    model.left.shared = 2
    with used_meanwhile(model, {("left", "shared")}) as used:
        pass
    assert used == {("left", "shared")}
    assert (model.left.shared, Counting.shared) == (2, None)
