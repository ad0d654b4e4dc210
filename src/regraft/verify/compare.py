"""The measure: how far one tensor may be from another, given how far the reference is from a float64 run.

Errors are taken per element and relative to s_i = max(|E_i|, s), where E is the float64 value and s the typical
magnitude of this output: the lower quartile of |E| over the elements that involve rounding at all. Relative alone
would make every cancellation a failure; the largest element as the scale (as in `atol`) would let one huge value, a
mask of -1e9 say, hide any error in the others.

    max_i |C_i - E_i| / s_i  <=  factor * max_i |R_i - E_i| / s_i  +  floor * eps(dtype)

and the same for the root mean square, which sees a small error in every element that the maximum does not. The floor
is for references that happen to round to nothing. A float64 reference is compared with itself, in the place of E:
|C - R| <= |C - E| + |R - E|, and so the factor is one more there.

In half precision the bound grows by what one rounding of the weights does to the float64 run, max_i |E'_i - E_i| / s_i,
where E' has each parameter moved at random within half a unit in its last place. Without it a weight that is computed
anew could not be told from a wrong one: rounding w moves a sum by up to u |w| |x|, whatever is left of it after
cancellation, while the reference, whose weights are taken for exact and whose sums are made in float32, rounds the sum
itself, by u |w x|. Where |w x| is small the reference is better by as much, and on the whole it is not: a bfloat16
convolution with its batch norm folded is off by 2.34e-3 of the norm of the output, the reference by 2.33e-3. In float32
sums round as much as weights do, and the term would be a quarter of what is there.

Elements that a float64 run says nothing about are compared with
the reference directly: values beyond the dtype's range (masks made with `finfo.min`), and jumps, where the reference
itself lost half its digits because its rounding decided a branch (an expert, a tie).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

HALF = (torch.float16, torch.bfloat16)
_SAMPLE = 1 << 20  # elements looked at for the typical magnitude


@dataclass(frozen=True)
class Rule:
    """How much may differ.

    Args:
        factor: Candidate's error over the reference's; None means 2, and 3 in half precision.
        rtol: With `atol`, replaces the bound by |C - R| <= atol + rtol * |R|.
        atol: See `rtol`.
        compute: The coarsest floating-point dtype of the model and its inputs.
    """

    factor: float | None = None
    rtol: float | None = None
    atol: float | None = None
    compute: torch.dtype = torch.float32

    def factor_for(self, dtype: torch.dtype) -> float:
        """The factor for an output of this dtype."""
        if self.factor is not None:
            return self.factor
        return 3.0 if coarser(dtype, self.compute) in HALF else 2.0

    @property
    def tolerant(self) -> bool:
        """Whether the caller gave tolerances of their own."""
        return self.rtol is not None or self.atol is not None


@dataclass(frozen=True)
class Measured:
    """The numbers of one output. Errors are relative to s_i; `max_abs` and `max_rel` are candidate to reference."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    reference_error: float = 0.0
    candidate_error: float = 0.0
    reference_rms: float = 0.0
    candidate_rms: float = 0.0
    weights_error: float = 0.0
    weights_rms: float = 0.0
    factor: float = 2.0
    floor: float = 0.0
    where: tuple[int, ...] = ()
    problem: str | None = None
    jumps: int = 0

    @property
    def allowed(self) -> float:
        """The largest relative error that the candidate may have."""
        return self.factor * self.reference_error + self.weights_error + self.floor

    @property
    def allowed_rms(self) -> float:
        """The largest root mean square of them that it may have."""
        return self.factor * self.reference_rms + self.weights_rms + self.floor

    @property
    def ratio(self) -> float:
        """The candidate's error over the reference's; 1 where neither has any."""
        if self.reference_error == 0:
            return 1.0 if self.candidate_error == 0 else math.inf
        return self.candidate_error / self.reference_error

    @property
    def within(self) -> bool:
        """Whether both errors, the largest and the root mean square, are within the bound."""
        return self.candidate_error <= self.allowed and self.candidate_rms <= self.allowed_rms


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype of lower precision."""
    return one if torch.finfo(one).eps >= torch.finfo(other).eps else other


def floor_of(dtype: torch.dtype) -> float:
    """The error that is allowed whatever the reference's is: 8 units in the last place, 2 in half precision."""
    return (2 if torch.finfo(dtype).eps > 1e-6 else 8) * torch.finfo(dtype).eps


def direct_bound(dtype: torch.dtype) -> float:
    """The bound where no float64 run says how far the reference itself is off: 128 eps, 8 in half precision."""
    return (8 if torch.finfo(dtype).eps > 1e-6 else 128) * torch.finfo(dtype).eps


def measure(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    exact: torch.Tensor | None,
    spread: torch.Tensor | None,
    rule: Rule,
    rounded: torch.Tensor | None = None,
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
    shape = tuple(reference.shape)
    dtype = reference.dtype.to_real() if reference.is_complex() else reference.dtype
    ref, can = _real(reference), _real(candidate)
    pairs = 2 if reference.is_complex() else 1
    if ref.numel() == 0:
        return Measured()
    wrong = _special(ref, can)
    if wrong is not None:
        index, sentence = wrong
        return Measured(
            math.nan, math.nan, math.nan, candidate_error=math.inf, where=_index(index, shape, pairs), problem=sentence
        )
    truth = ref if exact is None else _real(exact)
    error = _real(spread) if spread is not None else (ref - truth).abs()
    limit = min(torch.finfo(dtype).max, torch.finfo(rule.compute).max)
    finite = ref.isfinite()
    known = finite & truth.isfinite() & (truth.abs() <= limit) & error.isfinite()
    typical = _typical(truth, error, known)
    scale = truth.abs().clamp(min=typical)
    away = torch.where(finite, (can - ref).abs(), 0.0)
    direct = torch.where(finite, away / ref.abs().clamp(min=typical), 0.0)
    numbers = (float(away.max()), float(direct.max()), _cosine(ref[finite], can[finite]))
    if rule.tolerant:
        return _by_tolerance(ref, away, finite, rule, numbers, shape, pairs)
    eps_dtype = rule.compute if dtype == torch.float64 else dtype
    if exact is None:
        return Measured(
            *numbers,
            candidate_error=float(direct.max()),
            candidate_rms=float(direct.square().mean().sqrt()),
            floor=direct_bound(coarser(dtype, rule.compute)),
            where=_index(int(direct.argmax()), shape, pairs),
        )
    ours = torch.where(known, error / scale, 0.0)
    theirs = torch.where(known, (can - truth).abs() / scale, 0.0)
    eps = torch.finfo(eps_dtype).eps
    jump = _jumps(ours, eps)
    ours, smooth = torch.where(jump, 0.0, ours), torch.where(jump, 0.0, theirs)
    moved = _moved(truth, rounded, scale, typical, eps) if rounded is not None else torch.zeros_like(ours)
    moved = torch.where(known & ~jump, moved, 0.0)
    factor = rule.factor_for(dtype) + (spread is not None)
    count = max(int((known & ~jump).sum()), 1)
    result = Measured(
        *numbers,
        reference_error=float(ours.max()),
        candidate_error=float(smooth.max()),
        reference_rms=math.sqrt(float(ours.square().sum()) / count),
        candidate_rms=math.sqrt(float(smooth.square().sum()) / count),
        weights_error=float(moved.max()),
        weights_rms=math.sqrt(float(moved.square().sum()) / count),
        factor=factor,
        floor=floor_of(eps_dtype),
        where=_index(int(smooth.argmax()), shape, pairs),
        jumps=int(jump.sum()),
    )
    # What the float64 run cannot judge: the candidate must side with the reference, or with float64 at a jump.
    sided = torch.where(jump, torch.minimum(direct, theirs), torch.where(finite & ~known, direct, 0.0))
    bound = max(result.allowed, direct_bound(eps_dtype))
    if float(sided.max()) > bound:
        return _replace(result, "differs where float64 cannot judge", _index(int(sided.argmax()), shape, pairs), sided)
    return result


def _jumps(error: torch.Tensor, eps: float) -> torch.Tensor:
    """Where rounding decided a branch: the error is out of all proportion to the others."""
    return error > max(100 * float(error.median()), math.sqrt(eps))


def _moved(truth: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor, typical: float, eps: float) -> torch.Tensor:
    """What one rounding of the weights does, where it decides no branch: that would be a jump by any scale."""
    gap = (_real(rounded) - truth).abs()
    gap = torch.where(gap.isfinite(), gap, 0.0)
    return torch.where(_jumps(gap / scale, eps) & _jumps(gap / typical, eps), 0.0, gap / scale)


def _replace(result: Measured, problem: str, where: tuple[int, ...], error: torch.Tensor) -> Measured:
    values = dict(vars(result), problem=problem, where=where, candidate_error=float(error.max()))
    return Measured(**values)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128)).flatten()
    return tensor.to(torch.float64).flatten()


def _special(ref: torch.Tensor, can: torch.Tensor) -> tuple[int, str] | None:
    # One comparison for both: NaN is unequal to itself, and +inf to -inf.
    for name, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
        ref_has, can_has = test(ref), test(can)
        differs = ref_has != can_has
        if name == "infinite":
            differs = differs | (ref_has & can_has & (ref != can))
        if bool(differs.any()):
            at = int(differs.to(torch.uint8).argmax())
            return at, f"is {_said(can[at])} where the reference is {_said(ref[at])}"
    return None


def _said(value: torch.Tensor) -> str:
    number = float(value)
    return "NaN" if math.isnan(number) else f"{number:.6g}"


def _typical(truth: torch.Tensor, error: torch.Tensor, known: torch.Tensor) -> float:
    magnitude = truth.abs()
    for chosen in (known & (error > 0) & (magnitude > 0), known & (magnitude > 0)):
        values = magnitude[chosen]
        if values.numel():
            values = values[:: values.numel() // _SAMPLE + 1]
            return float(values.kthvalue(values.numel() // 4 + 1).values)
    return 1.0  # all zero: an absolute error


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    top = max(float(a.abs().max()), float(b.abs().max())) if a.numel() else 0.0
    if top == 0:
        return 1.0
    a, b = a / top, b / top  # so that no square overflows
    norm = float(a.norm() * b.norm())
    return float(a.dot(b)) / norm if norm else 0.0


def _by_tolerance(
    ref: torch.Tensor,
    away: torch.Tensor,
    finite: torch.Tensor,
    rule: Rule,
    numbers: tuple[float, float, float],
    shape: tuple[int, ...],
    pairs: int,
) -> Measured:
    allowed = (rule.atol or 0.0) + (rule.rtol or 0.0) * torch.where(finite, ref.abs(), 0.0)
    over = away > allowed
    excess = torch.where(over, away - allowed, 0.0)
    where = _index(int((excess if bool(over.any()) else away).argmax()), shape, pairs)
    problem = f"is off by {float(away[int(excess.argmax())]):.3g}, more than the tolerance given"
    return Measured(*numbers, where=where, problem=problem if bool(over.any()) else None)


def _index(flat: int, shape: tuple[int, ...], pairs: int) -> tuple[int, ...]:
    flat //= pairs
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))
