"""The errors of one output, by the rule in `compare`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regraft.verify.compare import Measured, Rule, coarser, direct_bound, floor_of
from regraft.verify.parts import Most, Output, Part


def measure(
    reference: Tensor,
    candidate: Tensor,
    exact: Tensor | None,
    spread: Tensor | None,
    rule: Rule,
    rounded: Tensor | None = None,
) -> Measured:
    """Compare two floating-point or complex tensors of one shape.

    Args:
        reference: What the reference gave, in its own dtype.
        candidate: What the candidate gave.
        exact: What the float64 run of the reference gave, or None.
        spread: The reference's error where `exact` is the reference itself: a float64 reference has none to measure,
            so its error is read off a float32 run and scaled.
        rule: How much may differ.
        rounded: What the float64 run gives with its weights moved by one rounding.

    Returns:
        The numbers, and under `problem` what is wrong beyond them.

    >>> one = torch.tensor([1.0, 2.0, 3.0])
    >>> measure(one, one, one.double(), None, Rule()).within
    True
    >>> measure(one, one + 1e-3, one.double(), None, Rule()).within
    False
    """
    dtype = reference.dtype.to_real() if reference.is_complex() else reference.dtype
    limit = min(torch.finfo(dtype).max, torch.finfo(rule.compute).max)
    output = Output((reference, candidate, exact, spread, rounded), limit)
    if output.size == 0:
        return Measured()
    for part in output:
        wrong = _special(part)
        if wrong is not None:
            nan, (place, problem) = math.nan, wrong
            return Measured(nan, nan, nan, candidate_error=math.inf, where=output.at(place), problem=problem)
    typical = _typical(output)
    numbers = _between(output, typical)
    if rule.tolerant:
        return _by_tolerance(output, rule, numbers)
    if exact is None:
        return _directly(output, typical, replace(numbers, floor=direct_bound(coarser(dtype, rule.compute))))
    eps_dtype = rule.compute if dtype == torch.float64 else dtype
    factor = rule.factor_for(dtype) + (spread is not None)
    return _by_float64(output, typical, replace(numbers, factor=factor, floor=floor_of(eps_dtype)), eps_dtype)


def _special(part: Part) -> tuple[int, str] | None:
    # One comparison for both: NaN is unequal to itself, and +inf to -inf.
    ref, can = part.ref, part.can
    for name, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
        ref_has, can_has = test(ref), test(can)
        differs = ref_has != can_has
        if name == "infinite":
            differs = differs | (ref_has & can_has & (ref != can))
        if bool(differs.any()):
            at = int(differs.to(torch.uint8).argmax())
            return part.start + at, f"is {_said(can[at])} where the reference is {_said(ref[at])}"
    return None


def _said(value: Tensor) -> str:
    number = float(value)
    return "NaN" if math.isnan(number) else f"{number:.6g}"


def _typical(output: Output) -> float:
    rounds: list[Tensor] = []
    others: list[Tensor] = []
    for part in output:
        magnitude = part.truth.abs()
        some = part.known & (magnitude > 0)
        rounds.append(output.sample(magnitude[some & (part.error > 0)]))
        others.append(output.sample(magnitude[some]))
    for found in (torch.cat(rounds), torch.cat(others)):
        if found.numel():
            return float(found.kthvalue(found.numel() // 4 + 1).values)
    return 1.0  # all zero: an absolute error


def _between(output: Output, typical: float) -> Measured:
    """How far the candidate is from the reference."""
    away, direct = Most(), Most()
    top = max(float(side.abs().max()) for part in output for side in part.numbers())
    dot = ours = theirs = 0.0
    for part in output:
        away.see(part.away, part)
        direct.see(part.direct(typical), part)
        a, b = (side / (top or 1.0) for side in part.numbers())  # so that no square overflows
        dot += float(a.dot(b))
        ours, theirs = math.hypot(ours, float(a.norm())), math.hypot(theirs, float(b.norm()))
    norm = ours * theirs
    cosine = 1.0 if top == 0 else dot / norm if norm else 0.0
    return Measured(away.value, direct.value, cosine)


def _by_tolerance(output: Output, rule: Rule, numbers: Measured) -> Measured:
    away, over = Most(), Most()
    for part in output:
        allowed = (rule.atol or 0.0) + (rule.rtol or 0.0) * torch.where(part.finite, part.ref.abs(), 0.0)
        away.see(part.away, part)
        over.see(part.away - allowed, part)
    if over.value == 0:
        return replace(numbers, where=output.at(away.place))
    off = float(output.part(over.place, over.place + 1).away)
    problem = f"is off by {off:.3g}, more than the tolerance given"
    return replace(numbers, where=output.at(over.place), problem=problem)


def _directly(output: Output, typical: float, numbers: Measured) -> Measured:
    most, squares = Most(), 0.0
    for part in output:
        direct = part.direct(typical)
        most.see(direct, part)
        squares += float(direct.square().sum())
    rms = math.sqrt(squares / output.size)
    return replace(numbers, candidate_error=most.value, candidate_rms=rms, where=output.at(most.place))


def _by_float64(output: Output, typical: float, numbers: Measured, dtype: torch.dtype) -> Measured:
    eps = torch.finfo(dtype).eps
    jump_from, *moved_from = _thresholds(output, typical, eps)
    ours, theirs, moved, sided = Most(), Most(), Most(), Most()
    squares = [0.0, 0.0, 0.0]
    count = jumps = 0
    for part in output:
        scale = part.truth.abs().clamp(min=typical)
        own, other = _errors(part, scale)
        jump = own > jump_from
        smooth = part.known & ~jump
        seen = [torch.where(smooth, error, 0.0) for error in (own, other, _moved(part, scale, typical, moved_from))]
        for index, (most, error) in enumerate(zip((ours, theirs, moved), seen)):
            most.see(error, part)
            squares[index] += float(error.square().sum())
        count, jumps = count + int(smooth.sum()), jumps + int(jump.sum())
        # What the float64 run cannot judge: the candidate must side with the reference, or with float64 at a jump.
        direct = part.direct(typical)
        unjudged = torch.where(part.finite & ~part.known, direct, 0.0)
        sided.see(torch.where(jump, torch.minimum(direct, other), unjudged), part)
    reference_rms, candidate_rms, weights_rms = (math.sqrt(total / max(count, 1)) for total in squares)
    result = replace(
        numbers,
        reference_error=ours.value,
        candidate_error=theirs.value,
        reference_rms=reference_rms,
        candidate_rms=candidate_rms,
        weights_error=moved.value,
        weights_rms=weights_rms,
        where=output.at(theirs.place),
        jumps=jumps,
    )
    if sided.value > max(result.allowed, direct_bound(dtype)):
        where, problem = output.at(sided.place), "differs where float64 cannot judge"
        return replace(result, candidate_error=sided.value, where=where, problem=problem)
    return result


def _errors(part: Part, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's error and the candidate's."""
    own, other = part.error / scale, (part.can - part.truth).abs() / scale
    return torch.where(part.known, own, 0.0), torch.where(part.known, other, 0.0)


def _thresholds(output: Output, typical: float, eps: float) -> list[float]:
    """From where on rounding decided a branch, as the error is out of all proportion to the others.

    Of the reference's error, and of what a rounding of the weights does, by either scale.
    """
    samples: list[list[Tensor]] = [[], [], []]
    for part in output:
        scale = part.truth.abs().clamp(min=typical)
        gap = _gap(part)
        for sample, errors in zip(samples, (_errors(part, scale)[0], gap / scale, gap / typical)):
            sample.append(output.sample(errors))
    return [max(100 * float(torch.cat(sample).median()), math.sqrt(eps)) for sample in samples]


def _gap(part: Part) -> Tensor:
    """What one rounding of the weights does."""
    if part.rounded is None:
        return torch.zeros_like(part.truth)
    gap = (part.rounded - part.truth).abs()
    return torch.where(gap.isfinite(), gap, 0.0)


def _moved(part: Part, scale: Tensor, typical: float, moved_from: Sequence[float]) -> Tensor:
    """The same, relative, where it decides no branch: that would be a jump by any scale."""
    gap = _gap(part)
    jumps = (gap / scale > moved_from[0]) & (gap / typical > moved_from[1])
    return torch.where(jumps, 0.0, gap / scale)
