"""The measure itself: every bound, on both sides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from regraft.verify import parts
from regraft.verify.compare import Rule, direct_bound, floor_of
from regraft.verify.errors import measure

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def spread_values(n: int = 256) -> torch.Tensor:
    return torch.linspace(1.0, 2.0, n, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_the_floor_holds_where_the_reference_is_exact(dtype: torch.dtype, share: float, passes: bool) -> None:
    exact = torch.ones(64, dtype=torch.float64)
    steps = round(floor_of(dtype) / torch.finfo(dtype).eps)
    units = steps if share < 1 else steps + 1
    candidate = exact.clone()
    candidate[7] += units * torch.finfo(dtype).eps
    found = measure(exact.to(dtype), candidate.to(dtype), exact, None, Rule(compute=dtype))
    assert found.within is passes
    assert found.where == (7,)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 2.0), (torch.float16, 3.0), (torch.bfloat16, 3.0), (torch.float64, 2.0)]
)
@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_the_factor_scales_the_references_own_error(
    dtype: torch.dtype, factor: float, share: float, passes: bool
) -> None:
    exact = torch.ones(64, dtype=torch.float64)
    unit = torch.finfo(dtype).eps
    off = 40 * unit
    reference, candidate = exact.clone(), exact.clone()
    reference += off  # everywhere: in one place alone it would be a jump
    candidate[5] += round(share * (factor * 40 + floor_of(dtype) / unit)) * unit
    # Stored wide, so that the test's own numbers are not rounded.
    found = measure(reference, candidate, exact, None, Rule(compute=dtype, factor=factor))
    assert found.allowed == pytest.approx(factor * off + floor_of(dtype), rel=1e-3)
    assert (found.candidate_error <= found.allowed) is passes
    assert found.within is passes
    assert Rule(compute=dtype).factor_for(dtype) == factor


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_a_float64_reference_is_not_exact(share: float, passes: bool) -> None:
    """It stands in the place of the truth, so that its own error comes on top of the candidate's."""
    exact, off = torch.ones(64, dtype=torch.float64), 40 * torch.finfo(torch.float64).eps
    reference, candidate = exact + off, exact + off
    candidate[5] = 1 - share * (2 * off + floor_of(torch.float64))
    spread = torch.full((64,), off, dtype=torch.float64)
    found = measure(reference, candidate, reference, spread, Rule(compute=torch.float64))
    assert found.allowed == pytest.approx(3 * off + floor_of(torch.float64), rel=1e-3)
    assert found.within is passes


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_one_rounding_of_the_weights_is_allowed_once(share: float, passes: bool) -> None:
    exact = torch.ones(256, dtype=torch.float64)
    moved, candidate = exact + 0.25, exact.clone()
    candidate[7] += share * (0.25 + floor_of(torch.bfloat16))
    found = measure(exact.bfloat16(), candidate, exact, None, Rule(compute=torch.bfloat16), moved)
    assert found.weights_error == 0.25
    assert (found.candidate_error <= found.allowed) is passes
    assert found.within is passes


def test_a_branch_that_a_rounding_of_the_weights_decides_excuses_nothing() -> None:
    exact = spread_values()
    reference = exact.to(torch.bfloat16)
    moved = exact.clone()
    moved[7] += 100  # another expert was chosen
    found = measure(reference, reference, exact, None, Rule(compute=torch.bfloat16), moved)
    assert found.weights_error == 0


@pytest.mark.parametrize(("gap", "large", "error"), [(10.0, False, 0.01), (0.6, True, 0.6)])
def test_a_branch_is_one_by_either_scale(gap: float, large: bool, error: float) -> None:
    """The element's own, and what is typical of the output: by one alone it is a rounding."""
    exact = torch.ones(256, dtype=torch.float64)
    exact[80 if large else 255 :] = 1000
    moved = exact + (5 if large else 0) * (exact == 1000)
    moved[0 if large else 255] += gap
    reference = exact.bfloat16()  # which is exact
    found = measure(reference, reference, exact, None, Rule(compute=torch.bfloat16), moved)
    assert found.weights_error == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("unknown", [math.inf, math.nan])
def test_where_the_spread_says_nothing_nothing_is_excused_or_blamed(unknown: float) -> None:
    reference = torch.ones(64, dtype=torch.float64)
    spread = torch.full((64,), 1e-16, dtype=torch.float64)
    spread[3] = unknown
    candidate = reference.clone()
    candidate[9] += 1e-3
    assert measure(reference, reference, reference, spread, Rule(compute=torch.float64)).within
    assert not measure(reference, candidate, reference, spread, Rule(compute=torch.float64)).within


def test_where_float64_cannot_judge_the_fixed_bound_holds() -> None:
    exact = torch.ones(64, dtype=torch.float64)
    reference, candidate = exact.float(), exact.float()
    exact[5] = math.inf
    candidate[5] += 0.5 * direct_bound(torch.float32)
    assert measure(reference, candidate, exact, None, Rule()).problem is None
    candidate[5] += 0.6 * direct_bound(torch.float32)
    assert measure(reference, candidate, exact, None, Rule()).problem is not None


def test_the_cosine_of_numbers_whose_squares_overflow() -> None:
    huge = torch.full((4,), 1e200, dtype=torch.float64)
    assert measure(huge, huge, None, None, Rule(compute=torch.float64)).cosine == pytest.approx(1)


def test_a_factor_of_the_callers_own() -> None:
    exact = torch.ones(64, dtype=torch.float64)
    reference, candidate = exact + 1e-4, exact + 4e-4
    assert not measure(reference, candidate, exact, None, Rule()).within
    assert measure(reference, candidate, exact, None, Rule(factor=5)).within


def test_the_root_mean_square_sees_a_small_error_everywhere() -> None:
    exact = torch.ones(4096, dtype=torch.float64)
    reference = exact.clone()
    reference[0] += 1e-4
    candidate = exact + 5e-5  # nowhere worse than the reference's worst
    found = measure(reference.float(), candidate.float(), exact, None, Rule())
    assert found.candidate_error <= found.allowed
    assert not found.within


@pytest.mark.parametrize("huge", [1e4, -1e9, torch.finfo(torch.float32).min])
def test_huge_values_hide_nothing_in_the_others(huge: float) -> None:
    exact = spread_values()
    exact[64:] = torch.tensor(huge, dtype=torch.float32).double()
    reference = exact.float()
    candidate = reference.clone()
    assert measure(reference, candidate, exact, None, Rule()).within
    candidate[3] += 1e-5
    assert not measure(reference, candidate, exact, None, Rule()).within


def test_masks_of_the_lowest_number_grow_in_float64() -> None:
    exact = spread_values()
    reference = exact.float()
    exact[10], reference[10] = torch.finfo(torch.float64).min, torch.finfo(torch.float32).min
    assert measure(reference, reference.clone(), exact, None, Rule()).problem is None
    candidate = reference.clone()
    candidate[10] *= 0.9
    found = measure(reference, candidate, exact, None, Rule())
    assert found.problem is not None
    assert found.where == (10,)


def test_a_jump_of_the_reference_excuses_neither_side_elsewhere() -> None:
    exact = spread_values()
    reference = exact.float()
    reference[5] = 7.0  # another expert was chosen
    like_reference, like_float64 = reference.clone(), exact.float()
    for fine in (like_reference, like_float64):
        found = measure(reference, fine, exact, None, Rule())
        assert found.within
        assert found.problem is None
        assert found.jumps == 1
    elsewhere = reference.clone()
    elsewhere[9] += 1e-3
    assert not measure(reference, elsewhere, exact, None, Rule()).within
    third = reference.clone()
    third[5] = 4.0
    assert measure(reference, third, exact, None, Rule()).problem is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("share", "passes"), [(0.8, True), (1.3, False)])
def test_the_fixed_bound_without_a_float64_run(dtype: torch.dtype, share: float, passes: bool) -> None:
    reference = torch.ones(64, dtype=dtype)
    candidate = reference.clone()
    candidate[2] += share * direct_bound(dtype)
    assert measure(reference, candidate, None, None, Rule(compute=dtype)).within is passes


@pytest.mark.parametrize(("rtol", "atol"), [(1e-2, 0.0), (None, 2e-2), (5e-3, 1e-2)])
@pytest.mark.parametrize(("share", "passes"), [(0.95, True), (1.05, False)])
def test_tolerances_replace_the_bound(rtol: float | None, atol: float | None, share: float, passes: bool) -> None:
    reference = torch.full((8,), 2.0)
    candidate = reference.clone()
    candidate[4] += share * ((atol or 0) + (rtol or 0) * 2.0)
    found = measure(reference, candidate, reference.double(), None, Rule(rtol=rtol, atol=atol))
    assert (found.problem is None and found.within) is passes
    assert found.where == (4,)
    assert passes or f"is off by {float(candidate[4]) - 2:.3g}," in str(found.problem)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [(1.0, math.nan), (math.nan, 1.0), (1.0, math.inf), (math.inf, -math.inf), (math.inf, 1.0), (math.nan, math.inf)],
)
def test_special_values_have_their_places(reference: float, candidate: float) -> None:
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    ours[1, 2], theirs[1, 2] = reference, candidate
    for rule in (Rule(), Rule(rtol=1e9, atol=1e9)):
        found = measure(ours, theirs, ours.double(), None, rule)
        assert found.problem is not None
        assert found.where == (1, 2)
    same = measure(ours, ours.clone(), ours.double(), None, Rule())
    assert same.problem is None
    assert same.within
    assert (same.max_abs, same.max_rel) == (0, 0)


PLACES = [0, 36, 37, 38, 400, 999]  # around the ends of parts of 37


@pytest.mark.parametrize("place", PLACES)
def test_an_output_taken_in_parts_gives_the_numbers_of_the_whole(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(place)
    exact = torch.randn(10, 100, dtype=torch.float64)
    reference, moved = exact.float(), exact * (1 + 1e-3 * torch.randn(10, 100))
    candidate = reference + 1e-6 * torch.randn(10, 100)
    reference.view(-1)[[3, 990]] = torch.tensor([7.0, 9.0])  # two jumps, and an element that float64 does not know
    exact.view(-1)[500] = math.inf
    candidate.view(-1)[place] += 0.1
    elsewhere = reference.clone()
    elsewhere.view(-1)[place] = 50
    calls: list[tuple[Any, ...]] = [
        (reference, candidate, exact, None, Rule(), moved),
        (reference, candidate, None, None, Rule()),
        (reference, candidate, exact, None, Rule(rtol=1e-2)),
        (torch.complex(reference, reference), torch.complex(reference, candidate), None, None, Rule()),
        (reference, elsewhere * math.nan, None, None, Rule()),
        (reference, torch.where(elsewhere == 50, math.inf, reference), None, None, Rule()),
        (reference, elsewhere, None, None, Rule(atol=1e-2)),
    ]
    whole = [vars(measure(*call)) for call in calls]
    assert whole[0]["jumps"] == 2
    assert whole[-1]["where"] == (place // 100, place % 100)
    monkeypatch.setattr(parts, "_PART", 37)
    for call, expected in zip(calls, whole):
        found = vars(measure(*call))
        for name in ("where", "problem"):
            assert found.pop(name) == expected.pop(name)
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_not_a_number_is_the_most_there_is() -> None:
    """Whatever comes after it: an error that cannot be computed is within no bound."""
    most = parts.Most()
    for values in ([1.0, 2.0], [math.nan, 1.0], [3.0, 4.0]):
        tensors = [torch.tensor(values), torch.tensor(values), None, None, None]
        most.see(torch.tensor(values), parts.Part(10 * int(values[-1]), tensors, 1.0))
    assert math.isnan(most.value)
    assert most.place == 10


def test_of_a_large_output_a_sample_tells_what_is_typical(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = 1 + torch.arange(20_000, dtype=torch.float64) % 1000 / 10  # of whose parts none begins as it ends
    reference = exact.float()
    candidate = reference + 1e-3
    whole = measure(reference, candidate, exact, None, Rule())
    monkeypatch.setattr(parts, "_PART", 1000)
    monkeypatch.setattr(parts, "_SAMPLE", 2000)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            new = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor) and t.dtype == torch.float64]
            sizes.extend(t.untyped_storage().nbytes() // 8 for t in new if t.data_ptr() not in given)
            return made

    given = range(exact.data_ptr(), exact.data_ptr() + 8 * exact.numel())
    with Sizes():
        sampled = measure(reference, candidate, exact, None, Rule())
    assert sampled.candidate_error == pytest.approx(whole.candidate_error, rel=0.1)
    assert max(sizes) <= 2000  # the float64 numbers of 20,000 elements never exist at once
    sparse = torch.zeros(20_000, dtype=torch.float64)
    sparse[12_345] = 1e-3
    assert not measure(sparse.float(), sparse.float() * 1.0005, sparse, None, Rule()).within
    numbers = torch.ones(1000)
    assert (
        parts.Output([torch.ones(20_000), None, None, None, None], 1.0).sample(numbers).untyped_storage().nbytes() < 400
    )


def test_complex_numbers_by_part() -> None:
    exact = torch.complex(spread_values(), spread_values()).reshape(16, 16)
    reference = exact.to(torch.complex64)
    assert measure(reference, reference.clone(), exact, None, Rule()).within
    candidate = reference.clone()
    candidate[3, 4] += 1e-3j
    found = measure(reference, candidate, exact, None, Rule())
    assert not found.within
    assert found.where == (3, 4)
    assert measure(reference, candidate.conj(), exact, None, Rule()).max_abs > 1


def test_nothing_and_zero() -> None:
    assert measure(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3).double(), None, Rule()).within
    zero = torch.zeros(4)
    assert measure(zero, zero.clone(), zero.double(), None, Rule()).within
    assert not measure(zero, zero + 1e-5, zero.double(), None, Rule()).within
    scalar = torch.tensor(2.0)
    assert measure(scalar, scalar, scalar.double(), None, Rule()).where == ()


def test_the_numbers_reported() -> None:
    reference = torch.tensor([3.0, 4.0])
    candidate = torch.tensor([4.0, 3.0])
    found = measure(reference, candidate, reference.double(), None, Rule())
    assert found.max_abs == 1.0
    assert found.max_rel == pytest.approx(1 / 3)
    assert found.cosine == pytest.approx(24 / 25)
    assert found.ratio == math.inf
    assert measure(reference, reference, reference.double(), None, Rule()).ratio == 1.0
