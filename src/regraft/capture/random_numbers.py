"""What a model draws as it runs: a graph draws from torch's own generator as it finds it, and from no other.

A seed that a forward sets is in no graph. Of the generators of Python and NumPy a graph has the numbers that they gave
for the example, which are right wherever nothing is computed with them: some models ask for one before they look
whether they are being trained.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch

_SETTING = ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state")


class _AsItIs:
    """A generator whose state this thread may not set; Dynamo may, which puts it back when it looked at a branch."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in _SETTING and threading.get_ident() == self._thread and not _by_dynamo():
            raise NotImplementedError("a forward that sets the state of torch's random generator has no graph")
        return getattr(self._generator, name)


@contextmanager
def others_drawn() -> Iterator[Set[str]]:
    """Whose generators, beside torch's, give numbers meanwhile: a set that is filled at the end.

    Raises:
        NotImplementedError: The state of torch's is set, which `torch.random.fork_rng()` does, too.
    """
    found: set[str] = set()
    before, module = _states(), vars(torch.random)
    # All functions of torch that seed and fork have it there. Torch's is put back, whatever another thread put there.
    module["default_generator"] = _AsItIs(torch.default_generator)
    try:
        yield found
    finally:
        module["default_generator"] = torch.default_generator
    found.update(name for name, state in _states().items() if state != before.get(name, state))


def expect_no_generator(generator: object) -> None:
    """Refuse numbers that are drawn with a generator that is given.

    Args:
        generator: what is given as `generator=`, if anything.

    Raises:
        NotImplementedError: One is given.
    """
    if isinstance(generator, torch.Generator):
        raise NotImplementedError("numbers that are drawn with a random generator of their own are in no graph")


def _by_dynamo() -> bool:
    """Whether it is Dynamo that sets a state; what a forward calls of torch.random goes through its eval_frame."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (torch.random.__name__, "contextlib"):
        frame = frame.f_back
    module: str = frame.f_globals.get("__name__", "")
    return module.startswith("torch._dynamo.") and module != "torch._dynamo.eval_frame"


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["NumPy's"] = (kind, keys.tobytes(), *rest)
    return states
