"""Attention that is written out for oneDNN Graph gives what the fused call gives, wherever it is taken."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from regraft.core.errors import NotCovered
from regraft.optimize.engines import onednn_graph, onednn_values, written_attention
from regraft.optimize.engines.flat import Engine, Flat
from regraft.optimize.engines.onednn_forms import Forms


@pytest.fixture(autouse=True, params=[0, 64 * 64], ids=["one kernel", "all heads at once"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of scores of a head up to which all heads are computed at once."""
    monkeypatch.setattr(written_attention, "_SMALL", request.param)
    monkeypatch.setattr(onednn_graph, "_SHARE", 0)  # however little time it takes in a model so small
    return request.param


BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 4, 5, 7, 6


def fastest(forms: Forms, sample: Any) -> Any:
    return onednn_graph._fastest(forms, onednn_graph._program(forms, sample), sample)


class Attention(nn.Module):
    """Attention between layers, with the settings of the fused call."""

    def __init__(self, dtype: torch.dtype = torch.float32, heads: int = HEADS, twice: bool = False, **settings: Any):
        super().__init__()
        torch.manual_seed(0)
        sizes = ((HEADS, 9), (heads, 9), (heads, 9))
        self.layers = nn.ModuleList(nn.Linear(width, number * WIDTH, dtype=dtype) for number, width in sizes)
        self.out = nn.Linear(HEADS * WIDTH, 9, dtype=dtype)
        self.settings, self.twice = settings, twice
        self.kept = torch.randn(ROWS, KEYS).to(dtype)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        for _ in range(1 + self.twice):
            x = self.attend(x, y, mask)
        return x

    def attend(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            layer(t).reshape(BATCH, -1, layer.out_features // WIDTH, WIDTH).transpose(1, 2)
            for layer, t in zip(self.layers, (x, y, y), strict=True)
        )
        given = dict(self.settings)
        given["attn_mask"] = self.kept.to(q.dtype) if given.pop("kept", False) else mask
        result = F.scaled_dot_product_attention(q, k, v, **given)
        return self.out(result.transpose(1, 2).reshape(BATCH, -1, HEADS * WIDTH)) + x


def mask_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor | None:
    random = torch.Generator().manual_seed(seed)
    sizes = (BATCH, 1, ROWS, KEYS)
    seen = torch.rand(sizes, generator=random) > 0.4
    seen[..., seed] = True
    number = torch.randn(sizes, generator=random)
    masks = {
        "none": None,
        "float": number.to(dtype),
        "of each head": torch.randn(BATCH, HEADS, ROWS, KEYS, generator=random).to(dtype),
        "of rows and keys": torch.randn(ROWS, KEYS, generator=random).to(dtype),
        "bool": seen,
        "of keys": seen[:, :, :1],
        "infinite": number.masked_fill(~seen, -math.inf).to(dtype),
        "lowest": number.masked_fill(~seen, torch.finfo(dtype).min).to(dtype),
        "blind rows": seen & (torch.arange(ROWS) != 3)[:, None],
        "blind rows of numbers": number.masked_fill((torch.arange(ROWS) == 3)[:, None], -math.inf).to(dtype),
        "nothing seen": torch.zeros(sizes, dtype=torch.bool),
        "nothing or little seen": torch.tensor([-math.inf, torch.finfo(dtype).min] * 4).to(dtype)[:KEYS].expand(sizes),
    }
    return masks[kind]


MASKS = (
    *("none", "float", "of each head", "of rows and keys", "bool", "of keys", "infinite", "lowest", "blind rows"),
    *("blind rows of numbers", "nothing seen", "nothing or little seen"),
)


def inputs(dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(BATCH, rows, 9, generator=random).to(dtype) for rows in (ROWS, KEYS)]


def written(module: nn.Module, sample: list[Tensor], how: Any = "in float32") -> tuple[Any, Forms]:
    """The program with attention written out, and what it was made of."""
    with torch.no_grad():
        forms = Forms(graph(module, len(sample)), sample)
        forms.attention = how
        program = onednn_graph._program(forms, tuple(sample))
    assert forms.known.attentions
    assert not fused(program)
    return lambda given: forms.complete(program(*given, *forms.beside))[0], forms


def graph(module: nn.Module, arguments: int = 2) -> torch.fx.GraphModule:
    return symbolic_trace(module, None if arguments == 3 else {"mask": None})


def fused(program: Any) -> bool:
    return "scaled_dot_product_attention" in str(program.graph)


def off(value: Tensor, exact: Tensor) -> float:
    assert value.isfinite().all()
    return float((value.double() - exact).abs().max() / exact.abs().max())


def expect_right(run: Any, module: Attention, given: list[Tensor], roundings: int = 4) -> None:
    """No further off a float64 run than the fused call is, by more than rounding."""
    doubles = [t.double() if t.is_floating_point() else t for t in given]
    plain, found = module(*given), run(given)
    twin = Attention(torch.float64, module.layers[1].out_features // WIDTH, module.twice, **module.settings)
    twin.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    twin.kept = module.kept.double()
    exact = twin(*doubles)
    assert found.dtype is plain.dtype
    assert found.stride() == plain.stride()
    assert off(found, exact) <= 2 * off(plain, exact) + roundings * torch.finfo(plain.dtype).eps


@torch.no_grad()
def test_small_heads_are_computed_at_once(small: int) -> None:
    run, _ = written(Attention(), inputs())
    run(inputs())
    groups = str(torch.jit.last_executed_optimized_graph()).split("with prim::oneDNNFusionGroup")[1:]
    products = [group.count("aten::matmul") for group in groups]
    assert max(products) == (1 if small else 2)


class Softmaxes(TorchDispatchMode):
    """Notes of which type the scores are that torch gives to its softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", [2, 15, 16, 31, 32, 47, 48, 49, 63])
@pytest.mark.parametrize("many", [0, 4 * 5 * 15, 1 << 16])
@torch.no_grad()
def test_of_halves_the_end_of_a_row_is_not_left_to_the_softmax(
    keys: int, many: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes twice as long for rows of 49 in bfloat16 as for all of them in float32."""
    monkeypatch.setattr(written_attention, "_MANY", many)
    module, given = Attention(torch.bfloat16), [torch.randn(BATCH, rows, 9).bfloat16() for rows in (ROWS, keys)]
    forms = Forms(graph(module), given)
    forms.attention = "in its own type"
    with Softmaxes() as softmaxes:
        (found,) = forms.complete(forms(*given, *forms.beside))
    raised = small and keys % 32 >= 16 and BATCH * HEADS * ROWS * keys >= many
    assert softmaxes.dtypes == [torch.float32 if raised else torch.bfloat16]
    monkeypatch.setattr(written_attention, "_MANY", 1 << 30)
    (expected,) = forms.complete(forms(*given, *forms.beside))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_with_any_mask(kind: str, dtype: torch.dtype) -> None:
    module = Attention(dtype)
    run, forms = written(module, [*inputs(dtype), *([] if kind == "none" else [mask_of(kind, dtype)])])
    assert not forms.known.masks  # another call may have another
    for seed in (1, 2):
        mask = mask_of(kind, dtype, seed)
        expect_right(run, module, [*inputs(dtype, seed), *([] if mask is None else [mask])])


@pytest.mark.parametrize("kind", MASKS)
@torch.no_grad()
def test_in_bfloat16_with_any_mask(kind: str) -> None:
    module, dtype = Attention(torch.bfloat16), torch.bfloat16
    run, _ = written(module, [*inputs(dtype), *([] if kind == "none" else [mask_of(kind, dtype)])], "in its own type")
    for seed in (1, 2):
        mask = mask_of(kind, dtype, seed)
        expect_right(run, module, [*inputs(dtype, seed), *([] if mask is None else [mask])], roundings=8)


@pytest.mark.parametrize("how", ["in float32", "in its own type"])
@torch.no_grad()
def test_a_finite_mask_hides_no_row_in_another_type(how: str) -> None:
    module, low = Attention(torch.bfloat16), torch.finfo(torch.float32).min  # beyond what bfloat16 has
    mask = torch.where(torch.arange(ROWS)[:, None] == 3, low, mask_of("of rows and keys")).expand(BATCH, 1, -1, -1)
    run, _ = written(module, [*inputs(torch.bfloat16), mask], how)
    expect_right(run, module, [*inputs(torch.bfloat16), mask], roundings=8)


@torch.no_grad()
def test_a_call_with_a_row_that_sees_nothing_is_run_by_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_graph, "_is_faster", lambda *_: True)
    module = Attention()
    gm = graph(module, 3)
    flat = Flat(gm, {"x": inputs()[0], "y": inputs()[1], "mask": mask_of("bool")})
    engine = Engine(flat, onednn_graph.build(flat), gm)
    for kind, same in (("bool", False), ("blind rows", True), ("nothing seen", True)):
        given = [*inputs(seed=2), mask_of(kind, seed=2)]
        found = engine(dict(zip(("x", "y", "mask"), given, strict=True)))
        assert torch.equal(found, module(*given)) is same
        torch.testing.assert_close(found, module(*given))


@torch.no_grad()
def test_rows_that_see_a_key_cost_nothing_in_a_layer() -> None:
    run, forms = written(Attention(), [*inputs(), mask_of("bool")])
    run([*inputs(), mask_of("bool")])
    assert "masked_fill" not in str(torch.jit.last_executed_optimized_graph()).split("softmax")[-1]
    assert len(forms(*inputs(), mask_of("bool"), *forms.beside)) == 2


@torch.no_grad()
def test_a_mask_may_hide_other_keys_than_in_the_sample() -> None:
    module = Attention()
    run, _ = written(module, [*inputs(), mask_of("bool")])
    for kind in ("nothing seen", "blind rows"):
        with pytest.raises(NotCovered, match="each row see a key"):
            run([*inputs(), mask_of(kind)])
    expect_right(run, module, [*inputs(), mask_of("bool", seed=2)])
    numbers, _ = written(module, [*inputs(), mask_of("infinite")])
    with pytest.raises(NotCovered):
        numbers([*inputs(), mask_of("blind rows of numbers")])
    blind = written(module, [*inputs(), mask_of("nothing seen")])[0]
    expect_right(blind, module, [*inputs(), mask_of("bool")])


SETTINGS: dict[str, dict[str, Any]] = {
    "a scale": {"scale": 0.7},
    "a negative scale": {"scale": -0.2},
    "no scale": {"scale": 1.0},
    "no scale, a mask": {"scale": 1.0, "kept": True},
    "causal": {"is_causal": True},
    "heads in groups": {"heads": 2, "enable_gqa": True},
    "one key for all heads": {"heads": 1, "enable_gqa": True, "is_causal": True},
    "a mask of its own": {"kept": True},
    "twice": {"twice": True, "is_causal": True, "scale": 0.5},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("number", [1, 2, 4])
@torch.no_grad()
def test_with_any_setting(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part, in one for each of the batch, and in several of each."""
    monkeypatch.setattr(written_attention, "_AT_ONCE", BATCH * HEADS * ROWS * KEYS // number)
    module = Attention(**SETTINGS[name])
    run, forms = written(module, inputs())
    assert all(len(attention.parts) == number for attention in forms.known.attentions.values())
    for seed in (1, 2):
        expect_right(run, module, inputs(seed=seed))


@torch.no_grad()
def test_masks_that_are_always_the_same_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    prepared = written_attention.WrittenAttention.prepared
    monkeypatch.setattr(written_attention.WrittenAttention, "prepared", lambda *a: made.append(a) or prepared(*a))
    _, forms = written(Attention(**SETTINGS["twice"]), inputs())
    assert len(made) == 1
    assert len(forms.known.attentions) == 2
    assert [mask.blind for mask in forms.known.masks.values()] == [None]
    kept = Attention(kept=True)
    kept.kept = mask_of("blind rows of numbers")
    run, forms = written(kept, inputs())
    assert [mask.blind is None for mask in forms.known.masks.values()] == [False]
    torch.testing.assert_close(run(inputs()), kept(*inputs()))


class Plain(nn.Module):
    """Attention alone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.settings)


def heads(rows: int, width: int = 4, **settings: Any) -> Tensor:
    return torch.randn(2, 3, rows, width, **settings)


HALF, DOUBLE = {"dtype": torch.float16}, {"dtype": torch.float64}
LEFT: dict[str, tuple[dict[str, Any], list[Tensor]]] = {
    "nothing is drawn": ({"dropout_p": 0.5}, [heads(5)] * 3),
    "a single row": ({}, [heads(1), heads(5), heads(5)]),
    "a single key": ({}, [heads(5), heads(1), heads(1)]),
    "a width of one": ({}, [heads(5), heads(5), heads(5, 1)]),
    "another device": ({}, [heads(5, device="meta")] * 3),
    "three axes": ({}, [heads(5)[0]] * 3),
    "float16": ({}, [heads(5, **HALF)] * 3),
    "float64": ({}, [heads(5, **DOUBLE)] * 3),
    "one batch for all": ({}, [heads(5), heads(5)[:1], heads(5)[:1]]),
    "one head for all": ({}, [heads(5), heads(5)[:, :1], heads(5)[:, :1]]),
}


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_what_stays_the_fused_call(name: str) -> None:
    settings, sample = LEFT[name]
    assert not Forms(symbolic_trace(Plain(**settings)), sample).known.attentions


@torch.no_grad()
def test_large_calls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(rows: int, times: float, **settings: Any) -> int:
        """How many there are of so many times what is computed at once."""
        monkeypatch.setattr(written_attention, "_AT_ONCE", math.ceil(2 * 3 * rows * 40 / times))
        graph = symbolic_trace(Plain(**settings))
        found = Forms(graph, [heads(rows), heads(40), heads(40)]).known.attentions.values()
        return sum(len(attention.parts) for attention in found)

    assert parts(64, 32) == 32
    assert parts(64, 128) == 32  # larger ones
    assert parts(64, 160) == 0
    assert parts(40, 4, is_causal=True) == 4  # a mask takes the memory of the scores
    assert parts(40, 4.1, is_causal=True) == 0
    assert parts(4, 4) == 4
    assert parts(3, 4) == 0  # parts of single rows
    assert parts(3, 2) == 2


@torch.no_grad()
def test_parts_are_put_together_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_attention, "_AT_ONCE", math.ceil(2 * 3 * 8 * 40 / 4))
    given = [heads(8), heads(40), heads(40)]
    forms = Forms(symbolic_trace(Plain()), given)
    forms.attention = "in float32"
    (found,) = onednn_graph._program(forms, tuple(given))(*given)
    assert [len(attention.parts) for attention in forms.known.attentions.values()] == [4]
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*given))


@pytest.mark.parametrize(
    ("batch", "rows", "times", "of_batch", "of_rows"),
    [
        (1, 8, 1, [1], [8]),
        (1, 9, 3, [1], [3, 3, 3]),
        (8, 9, 3, [2, 3, 3], [9]),
        (3, 8, 4, [1, 1, 1], [4, 4]),
        (64, 8, 64, [2] * 32, [8]),
    ],
)
def test_parts_are_of_the_batch_first(
    batch: int, rows: int, times: int, of_batch: list[int], of_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_attention, "_AT_ONCE", math.ceil(batch * 2 * rows * 5 / times))
    call: Any = None
    found = written_attention.WrittenAttention(call, (batch, 2, rows, 5), 4, 1.0, torch.float32).parts
    sizes = [(first.stop - first.start, second.stop - second.start) for first, second in found]
    assert sizes == [(first, second) for first in of_batch for second in of_rows]
    cells = [(b, r) for first, second in found for b in range(batch)[first] for r in range(rows)[second]]
    assert sorted(cells) == [(b, r) for b in range(batch) for r in range(rows)]


@pytest.mark.parametrize("ratio", [0.9, 1.1])
@torch.no_grad()
def test_the_faster_is_taken(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []

    def compare(baseline: Any, candidate: Any, **_: Any) -> Any:
        timed.extend((baseline(), candidate()))
        return SimpleNamespace(ratio=ratio)

    monkeypatch.setattr(onednn_graph, "compare_speed", compare)
    sample = tuple(inputs())
    program = fastest(Forms(graph(Attention()), sample), sample)
    assert fused(program) == (ratio > 1)
    torch.testing.assert_close(*timed)


@pytest.mark.parametrize(("part", "tried"), [(0.09, False), (0.11, True)])
@torch.no_grad()
def test_attention_that_takes_little_of_the_time_stays_the_fused_call(
    part: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_graph, "_SHARE", 0.1)
    monkeypatch.setattr(onednn_graph, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(onednn_graph, "compare_speed", lambda *_, **__: SimpleNamespace(ratio=0.9))
    sample = tuple(inputs())
    forms = Forms(graph(Attention()), sample)
    forms.known.attending = part
    assert fused(fastest(forms, sample)) != tried


@torch.no_grad()
def test_the_time_of_attention_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, now = tuple(inputs()), iter(range(10_000))
    monkeypatch.setattr(onednn_values.time, "perf_counter", lambda: next(now))  # so a node takes a second
    assert Forms(graph(Attention()), sample).known.attending == 1
    assert Forms(graph(Attention(twice=True)), sample).known.attending == 2
    assert Forms(symbolic_trace(nn.Linear(9, 4)), [torch.randn(3, 9)]).known.attending == 0


class Deep(nn.Module):
    """Attention between many layers, each of which rounds; or by itself."""

    def __init__(self, layers: int, width: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.width).reshape(2, 20, 4, 16).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads.roll(1, 2), heads).transpose(1, 2).reshape(2, 20, 64)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    ("layers", "width", "taken"), [(12, 1.0, "in its own type"), (0, 1.0, "in float32"), (12, 8.0, "in float32")]
)
@torch.no_grad()
def test_scores_are_rounded_where_the_result_is_no_further_off(
    layers: int, width: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_graph, "compare_speed", lambda *_, **__: SimpleNamespace(ratio=0.9))
    model = Deep(layers, width)
    sample = (torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1)).bfloat16(),)
    found = fastest(Forms(symbolic_trace(model), sample), sample)(*sample)[0]
    results = {how: written(model, list(sample), how)[0](sample) for how in ("in float32", "in its own type")}
    assert not torch.equal(*results.values())
    assert torch.equal(found, results[taken])


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ([2.0], True),
        ([4.0], True),  # of a single number chance may make much
        ([4.5], False),
        ([1.2] * 10_000, True),
        ([1.3] * 10_000, False),
        ([math.nan], False),
        ([], True),
    ],
)
def test_further_off_than_chance_makes(found: list[float], right: bool) -> None:
    error = torch.tensor(found)
    exact, numbers = torch.zeros_like(error), torch.arange(3)
    assert onednn_graph._no_further([numbers, error], [numbers, exact + 1], [numbers, exact]) == right
    assert onednn_graph._no_further([numbers + 1, error], [numbers, exact + 1], [numbers, exact]) == right
    assert onednn_graph._no_further([exact, error], [exact, exact + 1], [exact, exact]) == right


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (0.28, True), (0.3, False), (1.0, False), (math.nan, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_less_than_a_rounding_of_the_result_is_nothing(dtype: torch.dtype, off: float, right: bool) -> None:
    exact, places = torch.full((10_000,), 1.0, dtype=dtype), torch.arange(10_000)
    wrong = places < 10_000 * off**2  # each of these by one rounding: in all, by that part of one
    found = torch.where(wrong, exact * (1 - torch.finfo(dtype).eps), exact) + (math.nan if math.isnan(off) else 0)
    assert onednn_graph._no_further([found], [exact], [exact]) == right


@torch.no_grad()
def test_in_float32_there_is_nothing_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    program = onednn_graph._program
    monkeypatch.setattr(onednn_graph, "_program", lambda f, s: made.append(f.attention) or program(f, s))
    for dtype in (torch.float32, torch.bfloat16):
        sample = tuple(inputs(dtype))
        fastest(Forms(graph(Attention(dtype)), sample), sample)
    assert made == ["fused", "in float32", "fused", "in float32", "in its own type"]


@torch.no_grad()
def test_where_it_cannot_be_written_out_the_fused_call_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise RuntimeError("partition compile failed")

    monkeypatch.setattr(written_attention.WrittenAttention, "compute", refuse)
    sample = tuple(inputs())
    program = fastest(Forms(graph(Attention()), sample), sample)
    assert fused(program)
    torch.testing.assert_close(program(*sample)[0], Attention()(*sample))


@torch.no_grad()
def test_without_attention_there_is_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_graph, "compare_speed", None)
    sample = (torch.randn(3, 9),)
    assert fastest(Forms(symbolic_trace(nn.Linear(9, 4)), sample), sample) is not None


class TwoMasks(nn.Module):
    """Attention with one mask, and with another, and with the first again."""

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        for mask in (one, other, one):
            x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x


@torch.no_grad()
def test_each_mask_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Tensor, ...]] = []
    prepared = written_attention.WrittenAttention.prepared

    def noting(self: written_attention.WrittenAttention, env: Any) -> written_attention.Mask:
        mask = prepared(self, env)
        made.append(mask.added)
        return mask

    monkeypatch.setattr(written_attention.WrittenAttention, "prepared", noting)
    sample = [heads(5), torch.rand(5, 5) > 0.5, torch.randn(5, 1)]
    run, _ = written(TwoMasks(), sample)
    assert len(made) == 2
    assert all(part.shape == (2, 3, 5, 5) and part.is_contiguous() for added in made for part in added)
    torch.testing.assert_close(run(sample), TwoMasks()(*sample))


@torch.no_grad()
def test_the_result_lies_as_that_of_the_fused_call() -> None:
    sample = [torch.randn(2, rows, 3, 4).transpose(1, 2) for rows in (5, 6, 6)]
    found, expected = written(Plain(), sample)[0](sample), Plain()(*sample)
    assert found.stride() == expected.stride() != expected.contiguous().stride()


@torch.no_grad()
def test_no_batch_at_all() -> None:
    sample = [heads(5)[:0]] * 3
    forms = Forms(symbolic_trace(Plain()), sample)
    assert [len(attention.parts) for attention in forms.known.attentions.values()] == [1]


@torch.no_grad()
def test_a_mask_that_may_be_none() -> None:
    assert not Forms(symbolic_trace(Attention()), inputs()).known.attentions


class OfSecondAxis(nn.Module):
    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (x, x * 2, x.tanh()))
        return F.scaled_dot_product_attention(q, k, v)


def test_a_batch_of_one_may_be_the_second_axis() -> None:
    x = torch.randn(7, 1, 5, 6)
    run, _ = written(OfSecondAxis(), [x])
    torch.testing.assert_close(run([x]), OfSecondAxis()(x))
