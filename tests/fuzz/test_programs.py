"""Random programs of views, copies and writes: values, strides, shared memory, and what becomes of the inputs.

Every value is a matrix of 4 by 4, so that any operation fits any other; what differs is how it lies in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg
from regraft.core.errors import CaptureError
from regraft.testing.fuzzing import quiet
from regraft.testing.parts import randomised

ASKED = int(os.environ.get("REGRAFT_FUZZ", "0"))
SEED = time.time_ns() if ASKED else 0

Operation = Callable[[Any, Tensor, Tensor], Tensor]


def iadd(m: Any, a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def iadd_transposed(m: Any, a: Tensor, b: Tensor) -> Tensor:
    turned = a.T
    turned *= 0.5
    return turned


COMPUTING: dict[str, Operation] = {
    "relu": lambda m, a, b: a.relu(),
    "sin": lambda m, a, b: torch.sin(a),
    "add": lambda m, a, b: a + b,
    "multiply": lambda m, a, b: a * b,
    "divide": lambda m, a, b: a / 3.0,
    "add a buffer": lambda m, a, b: a + m.shift,
    "multiply with a constant": lambda m, a, b: a * (m.shift * 2 + 1),
    "a constant": lambda m, a, b: m.weight * 0.5,
    "a weight": lambda m, a, b: m.weight,
    "linear": lambda m, a, b: m.first(a),
    "another linear": lambda m, a, b: m.second(a),
    "functional linear": lambda m, a, b: F.linear(a, m.weight) + m.shift,
    "batch norm": lambda m, a, b: m.batch(m.third(a)),
    "layer norm": lambda m, a, b: m.layer(a),
    "attention": lambda m, a, b: ((a @ b.t()) / 2.0).softmax(-1) @ b,
    "gelu": lambda m, a, b: a * 0.5 * (1 + torch.erf(a / 1.4142135623730951)),
}
LAYING_OUT: dict[str, Operation] = {
    "transpose": lambda m, a, b: a.t(),
    "a view of another name": lambda m, a, b: a.view_as(b) if a.is_contiguous() else a[:],
    "reshape": lambda m, a, b: a.reshape(2, 8).reshape(4, 4),
    "flat view": lambda m, a, b: a.contiguous().view(-1).view(4, 4),
    "flat view of a copy": lambda m, a, b: a.clone().view(16).view(4, 4),
    "expand": lambda m, a, b: a[:, :1].expand(4, 4),
    "slice": lambda m, a, b: torch.cat([a, b], 1)[:, 2:6],
    "every second": lambda m, a, b: torch.cat([a, b], 1)[:, ::2],
    "chunk": lambda m, a, b: torch.cat([a, b], 1).chunk(2, 1)[1],
    "clone": lambda m, a, b: a.clone(),
    "contiguous": lambda m, a, b: a.contiguous(),
    "times one": lambda m, a, b: a * 1,
    "cast": lambda m, a, b: a.to(torch.float64),
    "cast and copy": lambda m, a, b: a.to(torch.float64, copy=True),
    "type as": lambda m, a, b: a.type_as(b),
    "pad by nothing": lambda m, a, b: F.pad(a, (0, 0)),
    "dropout": lambda m, a, b: F.dropout(a, 0.5, m.training),
    "dropout layer": lambda m, a, b: m.dropout(a),
    "identity": lambda m, a, b: m.identity(a),
    "detached copy": lambda m, a, b: a.detach().clone(),
    "einsum": lambda m, a, b: torch.einsum("ij->ji", a),
    "broadcast": lambda m, a, b: torch.broadcast_tensors(a, m.shift)[0],
    "at least": lambda m, a, b: torch.atleast_2d(a),
}
WRITING: dict[str, Operation] = {
    "add in place": lambda m, a, b: a.add_(1),
    "multiply in place": lambda m, a, b: a.mul_(b),
    "relu in place": lambda m, a, b: F.relu(a, inplace=True),
    "augmented": iadd,
    "augmented through a view": iadd_transposed,
    "copied into": lambda m, a, b: torch.empty_like(a).copy_(b),
}
OPERATIONS = COMPUTING | LAYING_OUT | WRITING
STEPS = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9))
RULES = [rg.RemoveDeadWork, rg.MergeLinears, rg.FoldScale, rg.FoldBatchNorm, rg.FuseBiasInLinear, rg.FuseGelu]
RULES += [rg.FuseAttention, rg.FuseNorm, rg.ChangeTrueDivToMulByInverse]


class Program(nn.Module):
    """The steps one after the other, each reading two values by how long ago they were made."""

    def __init__(self, steps: list[tuple[str, int, int]], results: list[int]) -> None:
        super().__init__()
        self.steps, self.results = steps, results
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.batch, self.layer = nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.dropout, self.identity = nn.Dropout(0.5), nn.Identity()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for name, one, other in self.steps:
            a, b = (values[-1 - back % len(values)] for back in (one, other))
            values.append(OPERATIONS[name](self, a, b))
        return tuple(values[-1 - back % len(values)] for back in (0, *self.results))


def memory(tensors: list[Tensor]) -> list[list[int]]:
    """For each tensor the positions of those that share its memory."""
    where = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[other for other, theirs in enumerate(where) if theirs == mine] for mine in where]


Seen = tuple[list[Tensor], list[list[int]], list[list[int]]]


def observed(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Seen]:
    """What a caller can see of two calls: results and inputs afterwards, strides, and what shares memory with what."""
    seen = []
    for _ in range(2):
        given = [tensor.clone() for tensor in inputs]
        with torch.no_grad():
            results = list(module(*given))
        strides = [[step for step, size in zip(r.stride(), r.shape, strict=True) if size > 1] for r in results]
        seen.append(([tensor.clone() for tensor in (*results, *given)], strides, memory([*results, *given])))
    return seen


@pytest.mark.fuzz
@pytest.mark.parametrize("capture", [rg.trace, lambda model, _: rg.symbolic_trace(model)], ids=["trace", "fx"])
@seed(SEED)
@settings(max_examples=ASKED or 60)
@given(
    st.lists(STEPS, min_size=2, max_size=10),
    st.lists(st.integers(0, 9), max_size=2),
    st.lists(st.sampled_from(RULES), min_size=1, max_size=5),
)
def test_a_caller_sees_no_difference(capture, steps, results, rules) -> None:
    inputs = (torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64))
    with quiet():
        try:
            expected = observed(made(steps, results), inputs)
            plain, gm = (capture(made(steps, results), inputs) for _ in range(2))
        except (RuntimeError, CaptureError):  # memory that overlaps itself cannot be written into
            assume(False)
        assert_same(observed(plain, inputs), expected, f"captured\n{plain.code}")
        rewritten = rg.compose(*(rule() for rule in rules))(gm)
        assert_same(observed(rewritten, inputs), expected, f"rewritten\n{rewritten.code}")


def made(steps: list[tuple[str, int, int]], results: list[int]) -> Program:
    return randomised(Program(steps, results)).double().eval()


def assert_same(found: list[Seen], expected: list[Seen], when: str) -> None:
    for (values, strides, shared), (right, right_strides, right_shared) in zip(found, expected, strict=True):
        for a, b in zip(values, right, strict=True):
            largest = torch.nan_to_num(b, 0.0, 0.0, 0.0).abs().max().item()
            bound = {"rtol": 1e-6, "atol": 1e-6 * max(1.0, largest), "equal_nan": True}
            torch.testing.assert_close(a, b, **bound, msg=lambda difference: f"{when}\n{difference}")
        assert strides == right_strides, when
        assert shared == right_shared, when
