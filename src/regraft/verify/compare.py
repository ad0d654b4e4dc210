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
