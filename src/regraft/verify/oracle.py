"""What the right answer is: the reference's own run and a run in higher precision, for one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regraft.verify.compare import HALF, coarser
from regraft.verify.precise import InFewBits, InPrecision, in_precision
from regraft.verify.run import Inputs, Run, inputs_tree, run
from regraft.verify.tree import Opaque, Tree, unsupported
from regraft.verify.values import revalued


@dataclass(frozen=True)
class Truth:
    """The reference on one set of inputs.

    Args:
        own: The run in its own dtype.
        exact: The float64 run, or None, with the reason in `lacking`.
        coarse: For a reference that is float64 already: a float32 run, from which its error is estimated; where
            that overflows, one in few bits and float64's range.
        compute: The coarsest floating-point dtype of weights and inputs.
        lacking: Why there is no float64 run.
        rounded: The float64 run with each weight moved by one rounding, where it was asked for.
    """

    own: Run
    exact: Run | None
    coarse: Run | None
    compute: torch.dtype
    lacking: str | None
    rounded: Run | None = None


class Oracle:
    """A reference model, with its copy in another precision made once and used for every set of inputs."""

    def __init__(self, reference: Callable[..., Any], *, float64: bool, seed: int) -> None:
        """Hold the reference; no copy is made before the first question."""
        self.reference = reference
        self.seed = seed
        self._wanted = float64
        self._copies: dict[torch.dtype, Callable[..., Any]] = {}
        self._answers: list[tuple[Tree, dict[str, object], Truth]] = []  # the tree, so that no identity is used again
        self._others: list[tuple[Tree, dict[str, object], Inputs | None]] = []

    def ask(self, inputs: Inputs, *, keep: bool = False) -> Truth:
        """Run the reference on these inputs; where it raises, `own.error` says so.

        Args:
            inputs: Its positional and keyword arguments.
            keep: Remember the answer for whoever asks about these very objects again, if nothing was written to them.
        """
        tree = inputs_tree(*inputs)
        state = _state(tree) if keep else None
        known = next((truth for _, asked, truth in self._answers if asked == state), None)
        truth = known or self._run(inputs)
        if state is not None and known is None and truth.own.error is None:
            self._answers.append((tree, state, truth))
        return truth

    def other_values(self, inputs: Inputs) -> Inputs | None:
        """The same inputs with other values, the same ones each time; None where there are none to take.

        Args:
            inputs: The positional and keyword arguments of the reference.
        """
        tree = inputs_tree(*inputs)
        state = _state(tree)
        for _, asked, others in self._others:
            if asked == state:
                return others
        others = revalued(inputs, torch.Generator().manual_seed(self.seed))
        if state is not None:
            self._others.append((tree, state, others))
        return others

    def _run(self, inputs: Inputs) -> Truth:
        own = run(self.reference, inputs, seed=self.seed)
        compute = self._compute_dtype(inputs, own)
        if own.error is not None:
            return Truth(own, None, None, compute, None)
        if not self._wanted:
            return Truth(own, None, None, compute, "float64=False was given")
        if own.random:
            # Generators draw other numbers for other dtypes, so a float64 run would be another computation.
            return Truth(own, None, None, compute, "the model draws random numbers; call .eval() for the sharper check")
        if compute == torch.float64:
            coarse, why = self._in(torch.float32, inputs, own)
            if coarse is not None and _overflowed(coarse.output, own.output):
                wide = run(self.reference, inputs, seed=self.seed, mode=InFewBits)
                coarse = coarse if wide.error else wide
            return Truth(own, own if coarse else None, coarse, compute, why)
        exact, why = self._in(torch.float64, inputs, own)
        return Truth(own, exact, None, compute, why)

    def rounded(self, inputs: Inputs, truth: Truth, generator: torch.Generator) -> Truth:
        """The same truth, and what the float64 run gives with each weight in half precision moved by one rounding."""
        model = self._copies.get(torch.float64)
        if truth.exact is None or not isinstance(model, nn.Module) or not isinstance(self.reference, nn.Module):
            return truth
        with _rounded(model, self.reference, generator):
            rounded, _ = self._in(torch.float64, inputs, truth.own)
        return replace(truth, rounded=rounded)

    def _compute_dtype(self, inputs: Inputs, own: Run) -> torch.dtype:
        model = self.reference
        weights = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        given = [tensor for _, tensor in inputs_tree(*inputs).tensors()]
        # A function's weights cannot be seen; its results tell.
        made = [] if weights else [tensor for _, tensor in own.output.tensors()]
        found: torch.dtype | None = None
        for dtype in (tensor.dtype for tensor in (*weights, *given, *made)):
            real = dtype.to_real() if dtype.is_complex else dtype
            if real.is_floating_point:
                found = real if found is None else coarser(found, real)
        return found or torch.float32

    def _in(self, dtype: torch.dtype, inputs: Inputs, own: Run) -> tuple[Run | None, str | None]:
        try:
            model = self._copies.get(dtype) or in_precision(self.reference, dtype)
        except Exception as error:  # whatever deepcopy or conversion of a foreign model raises
            return None, f"the reference cannot be copied in {dtype} ({_first_line(error)})"
        self._copies[dtype] = model
        other = run(model, inputs, seed=self.seed, dtype=dtype, mode=lambda: InPrecision(dtype))
        if other.error is None and _shapes(other.output) == _shapes(own.output):
            return other, None
        why = _first_line(other.error) if other.error else "it gives other shapes there"
        return None, f"the reference does not run in {dtype} ({why})"


def _state(tree: Tree) -> dict[str, object] | None:
    """What tells whether inputs are the same objects as they were; None where that cannot be told."""
    uncounted = any(tensor.is_inference() for _, tensor in tree.tensors())  # they count no writes
    if uncounted or any(isinstance(leaf, Opaque) for leaf in tree.leaves.values()):
        return None
    writes = {name: tensor._version for name, tensor in tree.tensors()}
    return {**tree.containers, **{name: (id(leaf), writes.get(name)) for name, leaf in tree.leaves.items()}}


@contextmanager
def _rounded(model: nn.Module, reference: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """With each parameter of a float64 copy within half a unit in the last place that it has in the reference.

    Buffers stay: a table of frequencies moved by so little would turn the angles of late positions around.
    """
    pairs = [
        (mine, given)
        for mine, given in zip(model.parameters(), reference.parameters(), strict=True)
        if given.dtype in HALF and unsupported(given) is None
    ]
    with torch.no_grad():
        for mine, given in pairs:
            noise = torch.rand(tuple(given.shape), generator=generator, dtype=torch.float32)
            mine.mul_(noise.sub_(0.5).mul_(torch.finfo(given.dtype).eps).add_(1).to(given.device))
        try:
            yield
        finally:
            for mine, given in pairs:
                mine.copy_(given)


def _shapes(tree: Tree) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tree.tensors()}


def _overflowed(coarse: Tree, own: Tree) -> bool:
    """Whether a number was lost that the reference has."""
    rough = dict(coarse.tensors())
    return any(
        bool((tensor.isfinite() & ~rough[name].isfinite()).any())
        for name, tensor in own.tensors()
        if unsupported(tensor) is None
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:160]}".rstrip(": ")
