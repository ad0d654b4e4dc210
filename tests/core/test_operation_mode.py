"""Modes that look at operations: while one is entered nothing is compiled, whichever thread leaves its own first."""

import threading
from collections.abc import Callable

import torch

from regraft.core.copy_before_write import CopyBeforeWrite


def test_threads_whose_modes_overlap_leave_the_compiler_as_it_was() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(gm)
        return gm

    first, second = CopyBeforeWrite([]), CopyBeforeWrite([])
    entered, left = threading.Event(), threading.Event()

    def overlap() -> None:
        with second:
            entered.set()
            left.wait()

    thread = threading.Thread(target=overlap, daemon=True)
    with first:
        thread.start()
        entered.wait()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert not compiled
    left.set()
    thread.join()
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    assert compiled


def test_a_write_in_a_branch_is_seen() -> None:
    weight = torch.ones(2)
    with CopyBeforeWrite([weight]) as writes, torch.no_grad():
        made = torch.cond(weight.sum() > 0, lambda x: x.mul_(2) + 0, lambda x: x + 1, (weight,))
    assert made.tolist() == weight.tolist() == [2, 2]
    writes.restore()
    assert weight.tolist() == [1, 1]
