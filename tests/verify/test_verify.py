"""Planted errors are seen, honest rewrites pass, and nothing is left behind."""

from __future__ import annotations

import collections
import copy
import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regraft as rg
from regraft.core.errors import VerificationError
from regraft.verify import oracle as oracle_module
from regraft.verify import verify
from regraft.verify.precise import in_precision
from regraft.verify.run import run

HALF = [torch.float16, torch.bfloat16]
DTYPES = [torch.float64, torch.float32, *HALF]
Pair = collections.namedtuple("Pair", ["first", "second"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = self.norm(F.gelu(self.up(x)))
        if mask is not None:
            hidden = hidden * mask[..., None]
        out = self.down(hidden)
        return {"hidden": hidden, "out": out, "pair": (out.sum(-1), out.argmax(-1)), "n": 3, "none": None}


class Reassociated(nn.Module):
    """The same sums in another order."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        m = self.model
        parts = [F.linear(x[..., i : i + 8], m.up.weight[:, i : i + 8]) for i in range(24, -8, -8)]
        hidden = m.norm(F.gelu(sum(parts[1:], parts[0]) + m.up.bias))
        if mask is not None:
            hidden = hidden * mask[..., None]
        out = F.linear(hidden.flip(-1), m.down.weight.flip(-1), m.down.bias)
        return {"hidden": hidden, "out": out, "pair": (out.flip(-1).sum(-1), out.argmax(-1)), "n": 3, "none": None}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 6, 32)


def spoilt(model: nn.Module, key: str, change: Any) -> Any:
    def candidate(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        result[key] = change(result[key])
        return result

    return candidate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_reassociation_passes(model: Model, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 6, 32).to(dtype)
    result = verify(model.to(dtype), Reassociated(model), (x,))
    wrong = [leaf.name for leaf in result.cases[0].leaves if not leaf.ok]
    assert set(wrong) <= {"output['pair'][1]"} if dtype in HALF else not wrong, result
    assert not result.notes


@pytest.mark.parametrize("key", ["hidden", "out"])
@pytest.mark.parametrize("size", [1e-3, 2e-5])
def test_an_error_on_one_element(model: Model, x: torch.Tensor, key: str, size: float) -> None:
    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[2, 3, 7] += size
        return t

    result = verify(model, spoilt(model, key, change), (x,))
    assert not result.ok
    assert result.worst is not None
    assert result.worst[1].name == f"output['{key}']"
    assert result.worst[1].where == (2, 3, 7)
    with pytest.raises(VerificationError, match=rf"(?s){key}.*\[2, 3, 7\].*regraft.bisect"):
        result.raise_for_status()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("units", "right"), [(0.25, True), (40, False)])
def test_half_precision_on_both_sides(
    model: Model, x: torch.Tensor, dtype: torch.dtype, units: float, right: bool
) -> None:
    model, x = model.to(dtype), x.to(dtype)
    candidate = spoilt(model, "hidden", lambda t: t * (1 + units * torch.finfo(dtype).eps))
    assert verify(model, candidate, (x,)).ok is right


PLANTED = {
    "nan": lambda t: t.masked_fill(t == t.max(), torch.nan),
    "inf": lambda t: t.masked_fill(t == t.max(), torch.inf),
    "dtype": lambda t: t.double(),
    "half": lambda t: t.half(),
    "transposed": lambda t: t.transpose(0, 1),
    "transposed square": lambda t: t[:, :4].transpose(0, 1).contiguous() if t.shape[1] == 4 else t.flip(0),
    "shape": lambda t: t[None],
    "scaled": lambda t: t * 1.00005,
    "wrapped": lambda t: (t,),
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
}


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("loose", [False, True])
def test_planted_errors(model: Model, x: torch.Tensor, planted: str, loose: bool) -> None:
    options = {"rtol": 1e-6} if loose else {}
    result = verify(model, spoilt(model, "out", PLANTED[planted]), (x,), **options)  # type: ignore[arg-type]
    assert not result.ok
    assert "out" in str(result)
    with pytest.raises(VerificationError):
        result.raise_for_status()


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("n", lambda n: 4, "is 4 where the reference gives 3"),
        ("n", lambda n: 3.0, "is a float where the reference gives a int"),
        ("none", lambda n: 0, "is a int where the reference gives a NoneType"),
        ("pair", lambda p: Pair(*p), "is a Pair where the reference gives a tuple"),
        ("pair", list, "is a list where the reference gives a tuple"),
        ("pair", lambda p: p[:1], "is missing"),
        ("pair", lambda p: (*p, 1), "is not an output of the reference"),
        ("pair", lambda p: (p[0], p[1].int()), "dtype"),
        ("pair", lambda p: (p[0], (p[1] + 1) % 16), "must be equal"),
    ],
)
def test_structure_and_plain_values(model: Model, x: torch.Tensor, key: str, change: Any, says: str) -> None:
    result = verify(model, spoilt(model, key, change), (x,))
    assert not result.ok
    assert says in str(result)


@pytest.mark.parametrize("empty", [[], {}, (), types.SimpleNamespace()])
def test_what_is_empty_is_missed(empty: Any) -> None:
    x = torch.ones(2)
    having, lacking = (lambda x: {"x": x, "none": empty}), (lambda x: {"x": x})
    assert verify(having, having, (x,)).ok
    assert "output['none'] is missing" in str(verify(having, lacking, (x,)))
    assert "output['none'] is not an output of the reference" in str(verify(lacking, having, (x,)))
    assert not verify(having, lambda x: {"x": x, "none": [x]}, (x,)).ok
    assert not verify(lambda x: {"x": x, "none": [x]}, having, (x,)).ok


@pytest.mark.parametrize("empty", [[], {}])
def test_what_is_empty_is_missed_in_what_is_given(empty: Any) -> None:
    def putting(given: dict[str, Any], sub: list[Any]) -> Any:
        given["none"] = sub
        return given["x"] + 1

    x = torch.ones(2)
    found = verify(putting, lambda given, sub: given["x"] + 1, ({"x": x}, empty))
    assert "args[0]['none'] after the call is missing" in str(found)
    assert verify(putting, putting, ({"x": x}, empty)).ok


def test_the_class_of_the_output(model: Model, x: torch.Tensor) -> None:
    result = verify(model, lambda x: collections.OrderedDict(model(x)), (x,))
    assert "is a OrderedDict where the reference gives a dict" in str(result)
    assert not result.ok


def test_a_dropped_output_and_a_raising_candidate(model: Model, x: torch.Tensor) -> None:
    assert "missing" in str(verify(model, lambda x: {k: v for k, v in model(x).items() if k != "out"}, (x,)))
    result = verify(model, lambda x: x @ x.new_ones(3), (x,))
    assert not result.ok
    assert "the candidate raised RuntimeError" in str(result)


def test_integers_may_side_with_float64_only_where_rounding_decides() -> None:
    class Tie(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x + 1.0) - 1.0 > 0).long() + (x > 5)

    x = torch.tensor([1e-9, 1.0, -1.0, 2.0])  # 1e-9 is lost in float32, kept in float64
    assert verify(Tie(), lambda x: (x > 0).long(), (x,)).ok
    assert not verify(Tie(), lambda x: (x >= -1).long(), (x,)).ok


def test_a_scalar_is_not_failed_for_a_lucky_reference() -> None:
    torch.manual_seed(0)
    failed = 0
    for _ in range(20):
        model, x = nn.Linear(512, 1).eval(), torch.randn(1, 512)
        pieces = lambda x, m=model: (
            sum(F.linear(x[:, i : i + 64], m.weight[:, i : i + 64]) for i in range(0, 512, 64)) + m.bias
        )  # type: ignore[union-attr]
        failed += not verify(model, pieces, (x,)).ok
        assert not verify(model, lambda x, m=model: m(x) + 3e-5, (x,)).ok
    assert failed == 0


@pytest.mark.parametrize(("other", "calls"), [(0.0, 24), (1.0, 0)])
def test_luck_is_not_asked_about_where_another_output_is_wrong_anyway(other: float, calls: int) -> None:
    """To tell luck from a fault takes a dozen more calls, each in float64, too."""
    asked: list[torch.dtype] = []

    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(x.dtype)
        return x * 2, x + 1

    off = 1 + 16 * torch.finfo(torch.float32).eps  # more than the bound, less than no luck could explain
    x = torch.ones(3)
    assert not verify(reference, lambda x: (x * 2 * off, x + 1 + other), (x,), vary_values=False).ok
    assert len(asked) == 2 + calls


def test_a_hard_coded_dtype_still_gets_its_float64_run() -> None:
    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.constant = nn.Linear(8, 8), torch.randn(8, dtype=torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.softmax(self.linear(x.float()), -1, dtype=torch.float32).to(torch.float32)
            out = torch.zeros(x.shape[0], 8, dtype=torch.float32)
            out[:, :] = hidden @ torch.outer(self.constant, self.constant)
            return out

    torch.manual_seed(0)
    model, x = Hard(), torch.randn(3, 8)
    result = verify(model, lambda x: model(x), (x,))
    assert result.ok
    assert not result.notes
    assert result.cases[0].leaves[0].reference_error > 0
    assert not verify(model, lambda x: model(x) * (1 + 1e-4), (x,)).ok


@pytest.mark.parametrize("divisor", [3.0, 1e-40, 1e-200])
def test_the_error_of_a_float64_reference_is_known_beyond_the_range_of_float32(divisor: float) -> None:
    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8).double()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scaled = x / divisor
            return scaled.sum(-1) + 1e-3 * self.linear(scaled).sum(-1), torch.view_as_complex(
                self.linear(scaled).view(4, 2)
            )

    class ByInverse(nn.Module):
        def __init__(self, model: Cancelling) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.model(x * (1 / divisor) * divisor)

    for seed in range(10):
        torch.manual_seed(seed)
        model, x = Cancelling(), torch.randn(1, 64, dtype=torch.float64)
        x[0, 0] -= (
            x.sum() - 1e-3
        )  # nothing but a thousandth is left of the sum, and its error is a thousand times as large
        result = verify(model, ByInverse(model), (x,))
        assert result.ok, result
        assert all(leaf.reference_error > 0 for leaf in result.cases[0].leaves)
        assert not verify(model, lambda x, m=model: tuple(out * (1 + 1e-10) for out in m(x)), (x,)).ok


def test_experts_get_their_float64_run() -> None:
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    torch.manual_seed(0)
    x, weight, offs = torch.randn(16, 32), torch.randn(3, 32, 16), torch.tensor([4, 4, 16], dtype=torch.int32)

    def experts(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, weight, offs=offs)

    def by_hand(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:4] @ weight[0], x[4:] @ weight[2]])

    result = verify(experts, by_hand, (x, weight, offs))
    assert result.ok, result
    assert not result.notes
    assert result.cases[0].leaves[0].reference_error < 1e-5
    assert not verify(experts, lambda x, w, o: x @ w[0], (x, weight, offs)).ok


def test_a_model_that_cannot_run_in_float64_is_held_to_a_fixed_bound() -> None:
    class Only32(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return x.exp()

    x = torch.randn(8)
    assert verify(Only32(), torch.exp, (x,)).ok
    result = verify(Only32(), lambda x: x.exp() * (1 + 1e-6), (x,))
    assert result.ok
    assert "float32 only" in result.notes[0]
    assert not verify(Only32(), lambda x: x.exp() * (1 + 5e-5), (x,)).ok
    assert "float64=False" in verify(nn.Identity(), nn.Identity(), (x,), float64=False).notes[0]


def test_nothing_is_left_behind(model: Model, x: torch.Tensor) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.norm(x))

    noisy, x = Noisy().train(), x[0].clone()
    state, before, seed = copy.deepcopy(noisy.state_dict()), x.clone(), torch.random.get_rng_state()
    identities = {name: id(t) for name, t in (*noisy.named_parameters(), *noisy.named_buffers())}
    result = verify(noisy, copy.deepcopy(noisy), (x,))
    assert result.ok, result
    assert "random" in result.notes[0]
    assert not verify(noisy, lambda x: noisy(x) * 1.01, (x,)).ok
    assert noisy.training
    assert torch.equal(x, before)
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all(torch.equal(state[name], value) for name, value in noisy.state_dict().items())
    assert identities == {name: id(t) for name, t in (*noisy.named_parameters(), *noisy.named_buffers())}
    assert all(p.grad is None and p.dtype == torch.float32 for p in noisy.parameters())


def test_inputs_changed_in_place() -> None:
    def changes(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        cache["seen"] = cache["seen"] + x
        return x.mul_(2) + 0

    def keeps(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        cache["seen"] = cache["seen"] + x
        return x * 2

    def forgets(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        return x.mul_(2) + 0

    x, cache = torch.randn(5), {"seen": torch.zeros(5)}
    for reference, candidate, right in [
        (changes, changes, True),
        (changes, keeps, False),
        (keeps, changes, False),
        (changes, forgets, False),
        (keeps, keeps, True),
    ]:
        before = x.clone()
        result = verify(reference, lambda x, cache, f=candidate: f(x, cache), (x,), {"cache": cache})
        assert result.ok is right, result
        assert torch.equal(x, before)
        assert not cache["seen"].any()
    assert "args[0] after the call" in str(verify(changes, keeps, (x, cache)))


class Counting(nn.Module):
    """Writes to buffers as it runs, after it has computed with them."""

    def __init__(self, write: Callable[[Counting], object], name: str = "calls") -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4) + 1)
        self.register_buffer(name, torch.rand(4))
        self.write = (write,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        self.write[0](self)
        return y


WRITES: dict[str, Callable[[Any], object]] = {
    "once": lambda m: m.calls.mul_(m.scale),
    "replaced": lambda m: setattr(m, "calls", m.calls * m.scale),
    "twice": lambda m: m.calls.mul_(m.scale).mul_(m.scale),
    "never": lambda m: None,
    "slightly off": lambda m: m.calls.mul_(m.scale * 1.0001),
    "another": lambda m: m.scale.mul_(m.calls),
}


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ("once", "once", None),
        ("once", "replaced", None),
        ("never", "never", None),
        ("once", "twice", "buffer calls after the call"),
        ("once", "slightly off", "buffer calls after the call"),
        ("once", "never", "buffer calls is not written to; the reference does so"),
        ("never", "once", "buffer calls is written to; the reference does not do so"),
        ("once", "another", "buffer scale is written to; the reference does not do so"),
    ],
)
def test_buffers_that_are_written_to(mine: str, theirs: str, said: str | None) -> None:
    torch.manual_seed(0)
    reference, candidate = Counting(WRITES[mine]), Counting(WRITES[theirs])
    candidate.load_state_dict(reference.state_dict())
    before = copy.deepcopy(reference.state_dict())
    for double in (True, False):
        result = verify(reference, candidate, (torch.randn(3, 4),), float64=double)
        assert result.ok is (said is None), result
        assert said is None or said in str(result)
    for model in (reference, candidate):
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_buffer_of_a_part_is_compared_with_its_own() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(Counting(WRITES["once"]) for _ in range(2)))
    candidate = nn.Sequential(Counting(WRITES["once"]), Counting(WRITES["never"]))
    candidate.load_state_dict(reference.state_dict())
    found = verify(reference, candidate, (torch.randn(3, 4),))
    assert found.cases[0].problems == ("buffer 1.calls is not written to; the reference does so",)


def test_a_buffer_may_be_as_far_off_as_the_reference_is_itself() -> None:
    torch.manual_seed(0)
    reference = Counting(lambda m: m.calls.mul_(2).add_(1024.0).sub_(1024.0))
    candidate = Counting(lambda m: m.calls.mul_(2).add_(512.0).sub_(512.0))
    candidate.load_state_dict(reference.state_dict())
    for double in (True, False):
        assert verify(reference, candidate, (torch.randn(3, 4),), float64=double).ok is double


class Last(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 40))
        self.function = (function,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.function[0] is not None:
            self.last.copy_(self.function[0](x))
        return x + 1


def test_what_a_call_before_has_left_in_a_buffer_is_written_all_the_same() -> None:
    x = torch.randn(3, 40)
    one, other = Last(lambda x: x.exp() * 7), Last(lambda x: (x / 2).exp() ** 2 * 7)
    for before in (one, other):  # of either the one writes what is there, and the other what is rounded otherwise
        before(x)
        for double in (True, False):
            assert not torch.equal(one.function[0](x), other.function[0](x))
            one.last.copy_(before.last)
            other.last.copy_(before.last)
            assert verify(one, other, (x,), float64=double).ok
    one(x)
    never = Last(None)
    never.last.copy_(one.last)
    assert "buffer last is not written to" in str(verify(one, never, (x,)))  # with other values it shows
    assert "buffer last is written to" in str(verify(never, one, (x,)))


def test_a_write_that_makes_no_difference_may_be_left_out() -> None:
    assert verify(Last(lambda x: x * 0), Last(None), (torch.rand(3, 40),)).ok


def test_inputs_of_eight_bits() -> None:
    x = torch.randn(4, 16).to(torch.float8_e4m3fn)
    layer = torch.nn.Linear(16, 4).eval()

    def overwriting(x: torch.Tensor) -> torch.Tensor:
        y = layer(x.float())
        x.copy_(x.float() + 1)
        return y

    found = verify(lambda x: layer(x.float()), lambda x: layer(x.float()) + 0, (x,))
    assert found.ok
    assert any("other values" in case.label for case in found.cases)
    assert not verify(lambda x: layer(x.float()), lambda x: layer(x.float()) * 1.001, (x,)).ok
    assert not verify(lambda x: layer(x.float()), overwriting, (x,)).ok


def test_buffers_of_the_reference_that_a_function_writes_to() -> None:
    reference = Counting(WRITES["once"])

    def forgets(x: torch.Tensor) -> torch.Tensor:
        return x * reference.scale

    def changes(x: torch.Tensor) -> torch.Tensor:
        reference.scale.mul_(2)
        return reference(x) / 2

    x = torch.randn(3, 4)
    assert verify(reference, lambda x: reference(x), (x,)).ok
    assert verify(reference, forgets, (x,)).ok  # it may have a buffer of its own
    assert "buffer scale is written to" in str(verify(reference, changes, (x,)))


def test_buffers_that_the_reference_does_not_have_are_nobodys_business() -> None:
    reference, candidate = Counting(WRITES["once"]), Counting(lambda m: m.count.add_(1), "count")
    candidate.scale.copy_(reference.scale)
    assert verify(reference, candidate, (torch.randn(3, 4),)).ok


def test_complex_empty_and_scalar_outputs() -> None:
    def reference(x: torch.Tensor) -> Any:
        return torch.fft.fft(x), x[:0], x.sum(), float(x.sum()), x > 0

    x = torch.randn(16)
    assert verify(reference, lambda x: reference(x), (x,)).ok
    for i, change in enumerate([lambda t: t.conj() + 0, lambda t: t[:, None], lambda t: t + 1, lambda t: t + 1.0]):

        def candidate(x: torch.Tensor, i: int = i, change: Any = change) -> Any:
            parts = list(reference(x))
            parts[i] = change(parts[i])
            return tuple(parts)

        result = verify(reference, candidate, (x,))
        assert not result.ok
        assert f"output[{i}]" in str(result)


def test_sparse_nested_and_meta_are_refused_politely() -> None:
    x = torch.eye(3)
    with pytest.raises(TypeError, match="to_dense"):
        verify(lambda x: x, lambda x: x, (x.to_sparse(),))
    with pytest.raises(TypeError, match=r"output has the layout.*to_dense"):
        verify(lambda x: x.to_sparse(), lambda x: x.to_sparse(), (x,))
    with pytest.raises(TypeError, match="to_padded_tensor"):
        verify(lambda x: x, lambda x: x, (torch.nested.nested_tensor([x, x[:2]]),))
    with pytest.raises(TypeError, match="meta"):
        verify(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta"), (x.to("meta"),))


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (torch.ones(1), None, r"args is a Tensor.*args=\(x,\)"),
        ({"x": torch.ones(1)}, None, "args is a dict.*kwargs=inputs"),
        (3, None, "args is a int"),
        ((torch.ones(1),), [1], "kwargs is a list"),
        ((), None, r"missing a required argument: 'x'.*args=\(x,\)"),
        ((torch.ones(1),), {"maks": 1}, "unexpected keyword argument 'maks'"),
    ],
)
def test_wrong_calls(model: Model, args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        verify(model, model, args, kwargs)


@pytest.mark.parametrize("name", ["factor", "rtol", "atol"])
def test_wrong_tolerances(model: Model, x: torch.Tensor, name: str) -> None:
    for given, error in (("x", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)):
        with pytest.raises(error, match=rf"{name}=.*verify\(reference, candidate, args, {name}="):
            verify(model, model, (x,), **{name: given})


def test_wrong_models_and_extra_inputs(model: Model, x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="candidate is a int"):
        verify(model, 3, (x,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"extra_inputs\[1\]"):
        verify(model, model, (x,), extra_inputs=[(x,), x])
    with pytest.raises(TypeError, match="takes a list"):
        verify(model, model, (x,), extra_inputs=x)
    with pytest.raises(RuntimeError):
        verify(model, model, (x[..., :3],))


def test_extra_inputs_are_checked(model: Model, x: torch.Tensor) -> None:
    def only_six(x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        result = model(x, mask)
        return result if x.shape[1] == 6 and mask is None else spoilt(model, "out", lambda t: t * 2)(x, mask)

    assert verify(model, only_six, (x,)).ok
    for extra in [(x[:, :5],), {"x": x[:, :5]}, ((x,), {"mask": torch.ones(4, 6)})]:
        result = verify(model, only_six, (x,), extra_inputs=[extra])
        assert [case.ok for case in result.cases] == [True, True, False]
        assert verify(model, Reassociated(model), (x,), extra_inputs=[extra]).ok


def test_what_the_result_shows(model: Model, x: torch.Tensor) -> None:
    good = verify(model, Reassociated(model), (x,))
    assert good.raise_for_status() is good
    assert str(good) == repr(good)
    assert "output['hidden']" in str(good)
    bad = verify(model, spoilt(model, "out", lambda t: t * torch.nan), (x,))
    for result in (good, bad):
        data = json.loads(result.to_json())
        assert data["ok"] is result.ok
        assert data == json.loads(json.dumps(result.to_dict()))
        page = result._repr_html_()
        assert page.startswith("<table>")
        assert "output[&#x27;hidden&#x27;]" in page
    assert "WRONG" in str(bad)
    assert bool(good)
    assert not bad


def test_one_object_is_remarked_upon(model: Model, x: torch.Tensor) -> None:
    result = verify(model, model, (x,))
    assert result.ok
    assert "one object" in result.notes[0]


def test_an_oracle_makes_its_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    in_precision = oracle_module.in_precision
    monkeypatch.setattr(oracle_module, "in_precision", lambda *given: copies.append(given) or in_precision(*given))
    model, x = Model().eval(), torch.randn(3, 32)
    oracle = oracle_module.Oracle(model, float64=True, seed=0)
    assert verify(oracle, copy.deepcopy(model), (x,)).ok
    assert not verify(oracle, lambda x: {**model(x), "hidden": model(x)["hidden"] + 1e-3}, (x,)).ok
    assert len(copies) == 1


def test_an_oracle_is_asked_once_about_what_it_was_given_unless_that_was_written_to(monkeypatch) -> None:
    asked, model = [], Model().eval()
    monkeypatch.setattr(oracle_module, "run", lambda *given, **how: asked.append(given) or run(*given, **how))
    oracle = oracle_module.Oracle(model, float64=True, seed=0)

    def runs_of(x: torch.Tensor, candidate=model, **options) -> int:
        asked.clear()
        assert verify(oracle, candidate, (x,), **options).ok
        return len(asked)

    x = torch.randn(3, 32)
    assert [runs_of(x), runs_of(x), runs_of(x.clone())] == [4, 0, 4]
    assert not verify(oracle, lambda x: {**model(x), "hidden": model(x)["hidden"] + 1e-3}, (x,)).ok
    x.add_(1)
    assert [runs_of(x), runs_of(x), runs_of(x, extra_inputs=[(x[:2],)])] == [4, 0, 2]
    with torch.inference_mode():
        uncounted = torch.randn(3, 32)
    assert [runs_of(uncounted), runs_of(uncounted)] == [4, 4]


def test_an_oracle_keeps_no_answer_to_what_it_cannot_look_into() -> None:
    class Applied(nn.Module):
        def forward(self, x: torch.Tensor, function) -> torch.Tensor:
            return function(x)

    oracle, x = oracle_module.Oracle(Applied(), float64=True, seed=0), torch.randn(3)
    assert verify(oracle, Applied(), (x, torch.exp)).ok
    assert not verify(oracle, lambda x, function: x.exp(), (x, torch.sin)).ok


def test_the_float64_copy_has_weights_of_its_own_and_none_is_copied_twice(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].bias = model[1].bias  # tied
    model[0].weight.requires_grad_(False)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda *_: pytest.fail("copied as it is"))
    copied = in_precision(model, torch.float64)
    assert copied[0].bias is copied[1].bias
    assert type(copied[0].bias) is nn.Parameter
    assert [p.requires_grad for p in copied.parameters()] == [False, True, True]
    for name, tensor in copied.state_dict().items():
        own = model.state_dict()[name]
        assert tensor.dtype is (torch.float64 if own.is_floating_point() else own.dtype), name
        assert tensor.data_ptr() != own.data_ptr(), name
        assert torch.equal(tensor, own.to(tensor.dtype)), name


class OwnState(nn.Dropout):
    """Says itself what its state is, and is made anew from that, as the layers of einops are."""

    def __getstate__(self) -> dict[str, Any]:
        return {"p": self.p}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def test_the_float64_copy_has_every_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), OwnState(0.5), nn.Dropout(0.25)).eval()
    model[2].train()
    assert [module.training for module in in_precision(model, torch.float64).modules()] == [False, False, False, True]
    model.eval()
    assert verify(model, copy.deepcopy(model[0]), (torch.randn(3, 4),)).ok


class Doubled(rg.Transformation):
    def transform(self, graph_module):
        with torch.no_grad():
            graph_module.get_submodule("0").weight.mul_(2)
        return graph_module


def test_a_reference_whose_weights_were_written_with_the_candidates_is_none() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
    kept = copy.deepcopy(model)
    gm = rg.MergeLinears()(Doubled()(rg.trace(model, (x,))))
    for check in (verify, rg.bisect):
        with pytest.raises(ValueError, match=r"Doubled wrote to '0\.weight' in place, .* reference = copy\.deepcopy"):
            check(model, gm, (x,))
    assert not verify(kept, gm, (x,)).ok
    rg.undo(gm, "Doubled")
    assert verify(model, gm, (x,)).ok
