"""Does a candidate compute what a reference computes?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from regraft.core.errors import NotCovered
from regraft.core.expect import expect_number
from regraft.core.fx_private import is_export_guard
from regraft.core.history import history
from regraft.core.vocabulary import attribute
from regraft.verify.call import VERIFY, check_call, checked_extra, described
from regraft.verify.compare import HALF, Measured, Rule
from regraft.verify.contrast import Numbers, contrast, leaf_from
from regraft.verify.oracle import Oracle, Truth
from regraft.verify.result import Case, Leaf, Verification
from regraft.verify.run import Inputs, Run, inputs_tree, run
from regraft.verify.sizes import dynamic_axes, other_sizes, redrawn, resized

_MARGIN = 32.0  # beyond this many times the bound no luck with rounding explains an error
_DRAWS = 12
_LONG = 3.0
"""So many seconds for the comparison on the sample are long."""
_ERRORS = ("reference_error", "candidate_error", "weights_error", "reference_rms", "candidate_rms", "weights_rms")

Model = Callable[..., Any] | ExportedProgram


def verify(
    reference: Model | Oracle,
    candidate: Model,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    factor: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    extra_inputs: Iterable[Any] = (),
    vary_sizes: bool = True,
    vary_values: bool = True,
    float64: bool = True,
    seed: int = 0,
) -> Verification:
    """Compare a candidate with a reference, by the error that the reference itself has.

    The reference runs in its own dtype and, as a copy, in float64. A candidate passes if it is off from float64 by
    at most twice what the reference is off (three times in half precision, and what one rounding of its weights does),
    plus a few units in the last place; `regraft.verify.compare` has the formula and its reasons. Integers, booleans and
    other values must be equal. Classes, dtypes, shapes, devices and the places of NaN and infinities must agree, and so
    must inputs that the call changes, and buffers that it writes to, where both have one of that name.

    Inputs of the sample's sizes with other values are tried too: a candidate that has a number of the sample's in it
    is right on the sample. So are inputs of other sizes, where shapes of the candidate (or else the reference) are
    dynamic; where the sample takes seconds, of fewer rows, not of more. Where the reference cannot run in float64, the
    result notes why, and the candidate is held to a fixed bound instead.

    Neither model, nor the inputs, nor any random generator is changed, but for what a model itself sets on it as it
    runs, other than buffers. A float64 copy of the reference exists while this runs.

    Args:
        reference: What is right: a module, a graph module, an `ExportedProgram` or any callable. An `Oracle` of one
            keeps its float64 copy, and its answers to inputs that were given, for the next verification; it has
            `float64` and `seed` of its own.
        candidate: What is checked: a module, a graph module, an `ExportedProgram` or any callable.
        args: Positional arguments of both, a tuple.
        kwargs: Keyword arguments of both.
        factor: How many times the reference's error the candidate's may be, in place of 2 and 3.
        rtol: For what does not preserve the computation: the bound becomes |C - R| <= atol + rtol * |R|.
        atol: See `rtol`; either one alone leaves the other at zero.
        extra_inputs: More inputs: each a tuple of positional arguments, a dictionary of keyword arguments, or a pair
            of the two.
        vary_sizes: Try other sizes where shapes are dynamic.
        vary_values: Try other values: those of the sample's floating-point inputs drawn anew, its token ids and the
            like in another order. False where these must be what they are; give such as `extra_inputs`.
        float64: Make the float64 run; False saves its memory and time and holds the candidate to a fixed bound.
        seed: For random inputs and for models that draw random numbers.

    Returns:
        The result: `ok`, `raise_for_status()`, a table when printed.

    Raises:
        TypeError: The call does not fit the reference, or something cannot be compared (sparse, nested, meta).
        ValueError: A tolerance is negative, or a transformation of the candidate wrote to weights in place that the
            reference has, too.
        Exception: Whatever the reference itself raises on the given inputs.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> x = torch.randn(3, 4)
        >>> verify(model, lambda x: model(x), (x,)).ok
        True
        >>> verify(model, lambda x: model(x) + 1e-3, (x,)).ok
        False
    """
    oracle = reference if isinstance(reference, Oracle) else None
    for name, number in (("factor", factor), ("rtol", rtol), ("atol", atol)):
        if number is not None:
            expect_number(number, name, f"verify(reference, candidate, args, {name}={1 if name == 'factor' else 1e-3})")
    right = expect_callable(reference, "reference") if oracle is None else oracle.reference
    checked = expect_callable(candidate, "candidate")
    _expect_unwritten(right, checked)
    inputs = check_call(right, args, kwargs)
    more = checked_extra(right, extra_inputs)
    check = _Check(oracle or Oracle(right, float64=float64, seed=seed), checked, Rule(factor, rtol, atol))
    start = time.perf_counter()
    cases = [check.case("the sample", inputs, given=True)]
    seconds = time.perf_counter() - start
    other = check.oracle.other_values(inputs) if vary_values else None
    if other is not None:
        cases.append(check.case("other values of the same sizes", other, given=False, keep=True))
    if vary_sizes:
        cases += check.other_sizes(inputs, few_rows=seconds > _LONG)
    cases += [check.case(f"extra input {i} ({described(extra)})", extra, given=True) for i, extra in enumerate(more)]
    return Verification(tuple(cases), tuple(dict.fromkeys((*_remarks(right, checked), *check.notes))))


def expect_callable(model: Any, argument: str, call: str = VERIFY) -> Callable[..., Any]:
    """What runs a model.

    Args:
        model: A module, a graph module, an `ExportedProgram` or any callable.
        argument: What it was given as.
        call: As for `check_call`.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(model, ExportedProgram):
        return model.module()
    if not callable(model):
        raise TypeError(
            f"{argument} is a {type(model).__name__}; {call.partition('(')[0]} takes a module, a graph module, an "
            f"ExportedProgram or a callable: {call.replace('{}', 'args=(x,)')}"
        )
    return model  # type: ignore[no-any-return]


def _expect_unwritten(reference: Callable[..., Any], candidate: Callable[..., Any]) -> None:
    """What was written into a weight of both has changed both alike, and no comparison would show it."""
    if not isinstance(reference, nn.Module) or not isinstance(candidate, fx.GraphModule):
        return
    own = {id(tensor) for tensor in (*reference.parameters(), *reference.buffers())}
    for step in history(candidate):
        for name in (".".join(filter(None, key)) for site in step.applied for key in site.written):
            if id(attribute(candidate, name)) in own:
                raise ValueError(
                    f"{step.transformation} wrote to {name!r} in place, a weight of the reference, too, which is not "
                    "what it was any more; keep a copy as the reference: reference = copy.deepcopy(model), before the "
                    "transformation is applied"
                )


def _remarks(reference: Callable[..., Any], candidate: Callable[..., Any]) -> Iterable[str]:
    if reference is candidate:
        yield (
            "reference and candidate are one object; a transformation works in place, so keep the model it was traced "
            "from, or a copy.deepcopy, as the reference"
        )
    # A graph from torch.export has the flag set and reads it nowhere.
    plain = isinstance(reference, nn.Module) and not isinstance(reference, fx.GraphModule)
    both = plain and isinstance(candidate, nn.Module)
    if both and reference.training and not candidate.training:  # type: ignore[attr-defined]
        yield "the reference is in training mode and the candidate is not; call .eval() on the reference"


class _Check:
    """One verification under way."""

    def __init__(self, oracle: Oracle, candidate: Callable[..., Any], rule: Rule) -> None:
        self.candidate = candidate
        self.rule = rule
        self.seed = oracle.seed
        self.oracle = oracle
        self.generator = torch.Generator().manual_seed(oracle.seed)
        self.notes: list[str] = []

    def other_sizes(self, inputs: Inputs, few_rows: bool) -> list[Case]:
        """A case for every other size to try."""
        reference = self.oracle.reference
        for graph in (getattr(self.candidate, "graph", None), getattr(reference, "graph", None)):
            dynamic = dynamic_axes(graph, reference, inputs) if isinstance(graph, fx.Graph) else None
            if dynamic is None:
                continue
            return [
                self.case(described(other), other, given=False)
                for other in (
                    resized(inputs, dynamic, sizes, self.generator) for sizes in other_sizes(dynamic, few_rows)
                )
            ]
        return []

    def case(self, label: str, inputs: Inputs, *, given: bool, keep: bool = False) -> Case:
        """Compare on one set of inputs; ones that were made here may be too odd for the reference."""
        truth = self.oracle.ask(inputs, keep=given or keep)
        if truth.own.error is not None:
            if given:
                truth.own.error.add_note(f"raised by the reference itself on {label} given to regraft.verify")
                raise truth.own.error
            return Case(label, skipped=f"the reference does not take it ({_name(truth.own.error)})")
        if truth.lacking is not None:
            self.notes.append(f"compared with the reference alone, within a fixed bound: {truth.lacking}")
        made = run(self.candidate, inputs, seed=self.seed, beside=self.oracle.reference)
        if not given and (isinstance(made.error, NotCovered) or is_export_guard(made.error, self.candidate)):
            return Case(label, skipped=f"the captured graph refuses these sizes ({made.error})")
        if made.error is not None:
            return Case(label, problems=(f"the candidate raised {_name(made.error)}",))
        rule = replace(self.rule, compute=truth.compute)
        leaves, problems, numbers = contrast(truth, made, inputs_tree(*inputs), rule)
        wrong = [leaf for leaf in leaves if not leaf.ok]
        by_luck = wrong and not problems and all(_doubtful(leaf, numbers) for leaf in wrong)
        if by_luck and not rule.tolerant and truth.exact is not None:
            leaves = self._look_again(inputs, truth, made, leaves, numbers, rule)
        return Case(label, tuple(leaves), tuple(problems))

    def _look_again(
        self, inputs: Inputs, truth: Truth, made: Run, leaves: list[Leaf], numbers: Numbers, rule: Rule
    ) -> list[Leaf]:
        # The error of a reference with few outputs is one draw of a random number, which may be near zero by luck.
        # More draws of both errors, on inputs that round differently, tell luck from a fault.
        pooled = numbers
        for other in redrawn(inputs, _DRAWS, self.generator, None if truth.coarse is None else torch.float32):
            if truth.compute in HALF:  # of the weights' rounding too, where they are all that differs
                rounded = self.oracle.rounded(inputs, truth, self.generator)
                pooled = _pool(pooled, _numbers(inputs, rounded, made, rule))
            again = self.oracle.ask(other)
            remade = run(self.candidate, other, seed=self.seed, beside=self.oracle.reference)
            if again.own.error is not None or again.exact is None or remade.error is not None:
                break
            pooled = _pool(pooled, _numbers(other, again, remade, rule))
        return [
            leaf_from(leaf.name, leaf.dtype, leaf.shape, pooled[leaf.name]) if _doubtful(leaf, numbers) else leaf
            for leaf in leaves
        ]


def _numbers(inputs: Inputs, truth: Truth, made: Run, rule: Rule) -> Numbers:
    _, _, numbers = contrast(truth, made, inputs_tree(*inputs), rule)
    return numbers


def _doubtful(leaf: Leaf, numbers: Numbers) -> bool:
    m = numbers.get(leaf.name)
    return m is not None and m.problem is None and not m.within and m.candidate_error <= _MARGIN * m.allowed


def _pool(some: Numbers, others: Numbers) -> Numbers:
    return {name: _worse(m, others[name]) if name in others else m for name, m in some.items()}


def _worse(one: Measured, other: Measured) -> Measured:
    if other.problem is not None:
        return one
    return replace(one, **{name: max(getattr(one, name), getattr(other, name)) for name in _ERRORS})


def _name(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}".rstrip(": ")
