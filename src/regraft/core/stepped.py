"""How often an optimizer has written a weight: torch leaves `_version` as it is where a step is one fused kernel."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    """The steps of the optimizers of a process.

    Attributes:
        taken: How many steps there have been.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._writes: Counter[int] = Counter()  # by the identity of a weight, which lives as long as its watch

    @classmethod
    @cache
    def counted(cls) -> Steps:
        """Those of this process, counted since this was first called."""
        steps = cls()
        register_optimizer_step_post_hook(steps.count)
        return steps

    def of(self, weight: Tensor) -> int:
        """How many of them have written a weight.

        Args:
            weight: The weight.
        """
        return self._writes[id(weight)]

    def count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step: torch calls this after each.

        Args:
            optimizer: Whose step it was.
            args: What the step was given.
            kwargs: The same, by name.
        """
        if torch.compiler.is_compiling():  # a compiled step counts what it writes, as torch does
            return
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self._writes.update(id(weight) for weight in weights if weight.grad is not None)
        self.taken += 1
