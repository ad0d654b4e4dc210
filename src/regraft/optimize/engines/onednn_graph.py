"""oneDNN Graph, which comes with torch, through a frozen TorchScript program.

It plans layouts and fuses across a whole network, where `PrepackForCpu` goes one layer at a time. TorchScript is the
only public way to it and is deprecated, so a torch without it says so here, and the graph runs as it is.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from regraft.core.errors import NotCovered
from regraft.core.mutation import memory_of
from regraft.core.ordinary import below_autograd
from regraft.optimize.engines.flat import Flat, Run
from regraft.optimize.engines.in_float32 import in_float32, pays_in_float32, wide
from regraft.optimize.engines.onednn_forms import Attention, Forms
from regraft.optimize.engines.onednn_function import Program, as_function, empty
from regraft.optimize.engines.onednn_pieces import in_pieces
from regraft.verify.measure import compare_speed

_shape = attrgetter("shape")

_CALLS = 2
"""So many calls until a program is what it stays: one is observed, the next is compiled for what was seen."""

_PAIRS = 4
"""So many pairs of blocks tell at least which of two programs is taken; half of them where a call is slow."""

_SLOW = 0.5
"""A call that takes so many seconds averages itself what would disturb a short one."""

_SHARE = 0.1
"""Attention that takes less of a program's time is not written out: about half of it could be gained."""


def build(flat: Flat) -> Run:
    """Make a program of a graph, for inputs of the sizes of the sample.

    Args:
        flat: The graph.

    Raises:
        Exception: What TorchScript and oneDNN raise where they have no form for the graph.
    """
    sample = tuple(_usual(flat.sample))
    sizes = list(map(_shape, sample))
    with torch.no_grad():
        raised = pays_in_float32(flat.module, sample)
        module = in_float32(flat.module) if raised else flat.module
        sample = tuple(map(wide, sample)) if raised else sample
        forms = Forms(module, sample)
        program = _program(forms, sample)
        if forms.images > 1:  # how the images between two convolutions lie may make a difference
            plain = Forms(module, sample, images=False)
            other = _program(plain, sample)
            given = (*sample, *forms.beside)
            if _is_faster(other, (*sample, *plain.beside), program, given, _seconds(program, given)):
                forms, program = plain, other
        program = _fastest(forms, program, sample)
        # a module that is called first asks for hooks and for a tracer
        call = program.forward if isinstance(program, torch.jit.ScriptModule) else program
        if _gives_own_memory(call, (*sample, *forms.beside)):
            call = _below_autograd(call)

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if list(map(_shape, inputs)) != sizes:
            raise NotCovered(f"the program was made for inputs of the sizes {[tuple(size) for size in sizes]}")
        if torch.is_grad_enabled():  # asked because to enter and leave a mode that is on anyway takes time, too
            with torch.no_grad():
                return run(inputs)
        if not raised:
            return forms.complete(call(*_usual(inputs), *forms.beside))
        results = forms.complete(call(*map(wide, _usual(inputs)), *forms.beside))
        return [result.to(dtype) for result, dtype in zip(results, flat.dtypes, strict=True)]

    return run


def _fastest(forms: Forms, program: Program, sample: tuple[Tensor, ...]) -> Program:
    """The program of a graph with its attention as torch's fused call, or written out where that is faster here."""
    given = (*sample, *forms.beside)
    if not forms.known.attentions:
        return program
    seconds = _seconds(program, given)
    if forms.known.attending < _SHARE * seconds:
        return program
    other = _written_out(forms, sample, "in float32")
    if other is None:
        return program
    if any(attention.dtype != torch.float32 for attention in forms.known.attentions.values()):
        shorter = _written_out(forms, sample, "in its own type")
        if shorter is not None and _no_further(*(forms.complete(each(*given)) for each in (shorter, program, other))):
            other = shorter
    return other if _is_faster(other, given, program, given, seconds) else program


def _gives_own_memory(program: Program, given: tuple[Tensor, ...]) -> bool:
    """Whether each result lies in memory of its own, so that nobody can tell whether it is a view.

    A view of a weight shares its memory with that of another call.
    """
    results = [*program(*given), *program(*given)]
    own, others = set(map(memory_of, results)), set(map(memory_of, given))
    return len(own) == len(results) and own.isdisjoint(others)


def _below_autograd(program: Program) -> Program:
    """A program in which no operator asks whether a gradient is recorded, which takes longer than some of them."""

    def run(*given: Tensor) -> Any:
        with below_autograd():
            return program(*given)

    return run


def _seconds(program: Program, given: tuple[Tensor, ...]) -> float:
    start = time.perf_counter()
    program(*given)
    return time.perf_counter() - start


def _written_out(forms: Forms, sample: tuple[Tensor, ...], attention: Attention) -> Program | None:
    forms.attention = attention
    try:
        return _program(forms, sample)
    except (RuntimeError, IndexError):  # it cannot fuse what lies in memory as it does here
        return None


def _is_faster(
    other: Program,
    its: tuple[Tensor, ...],
    program: Program,
    given: tuple[Tensor, ...],
    seconds: float,
) -> bool:
    # either will do where no difference shows, so a few pairs of what has just been run are enough
    warmup, pairs = (0.02, _PAIRS) if seconds < _SLOW else (0.0, _PAIRS // 2)
    both = (lambda: program(*given), lambda: other(*its))
    return compare_speed(*both, min_seconds=0.3, warmup_seconds=warmup, min_pairs=pairs).ratio < 1


def _no_further(found: Sequence[Tensor], usual: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
    """Whether results are as near to more exact ones as the usual results are, but for what chance may do.

    The errors of two programs that round equally often have the same size on average; of few numbers not by much. What
    is less than one rounding of the results themselves is no error, also where the usual results are the exact ones.
    """
    for ours, theirs, true in zip(found, usual, exact, strict=True):
        if true.is_floating_point() and true.numel():
            error, usually = ((tensor.double() - true.double()).norm() for tensor in (ours, theirs))
            rounding = torch.finfo(true.dtype).eps / math.sqrt(12) * true.double().norm()
            if not error <= max((1.25 + 3 / math.sqrt(true.numel())) * usually, rounding):
                return False
    return True


def _program(forms: Forms, sample: tuple[Tensor, ...]) -> Program:
    with warnings.catch_warnings(), _fusing():
        for remark in (DeprecationWarning, torch.jit.TracerWarning):  # sizes are fixed, so what is traced of them holds
            warnings.simplefilter("ignore", remark)
        given = (*sample, *forms.beside)
        traced: torch.jit.ScriptModule = torch.jit.trace(forms, given, check_trace=False)
        try:
            program = _function(torch.jit.freeze(traced))
        finally:
            empty(traced)
        for _ in range(_CALLS):
            program(*given)
    return program


def _function(frozen: torch.jit.ScriptModule) -> Program:
    program: Program | None = None
    try:
        _expect_understood(frozen)
        program = in_pieces(frozen)
        program = as_function(frozen) if program is frozen else program
        return program
    finally:
        if program is not frozen:
            empty(frozen)


def _expect_understood(program: torch.jit.ScriptModule) -> None:
    """Refuse what oneDNN Graph takes for something else: GELU by tanh for the exact one, off by up to 5e-4."""
    graph: Any = program.graph
    for node in graph.findAllNodes("aten::gelu"):
        if list(node.inputs())[1].toIValue() != "none":
            raise ValueError("oneDNN Graph takes GELU by tanh for the exact one")


def _usual(inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The inputs, dense: a program looks at their sizes, but takes their strides to be those that it has seen."""
    return map(Tensor.contiguous, inputs)


@contextmanager
def _fusing() -> Iterator[None]:
    before = torch.jit.onednn_fusion_enabled()
    torch.jit.enable_onednn_fusion(True)
    try:
        yield
    finally:
        torch.jit.enable_onednn_fusion(before)
