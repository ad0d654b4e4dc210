"""FuseAttention: keys and values repeated for groups of queries, masks that are causal, calls fused already."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

import regraft as rg
import regraft.testing
from helpers import Wrap, assert_matches_float64, check_applied, check_refused
from regraft.testing.parts import traced_with_shapes

B, H, G, L, D = 2, 6, 2, 5, 4
Q, K, V = torch.randn(B, H, L, D), torch.randn(B, G, L, D), torch.randn(B, G, L, D)
LOWEST = torch.finfo(torch.float32).min


class Three(nn.Module):
    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.inner = Wrap(function, **parts)
        self.inner.register_buffer("known", torch.ones(L, L, dtype=torch.bool).tril(), persistent=False)
        self.inner.register_buffer("uneven", torch.tensor([2, 4]))
        self.inner.register_buffer("turns", torch.randn(H // G, 1, 1))
        self.inner.register_buffer("saved", torch.ones(L, L, dtype=torch.bool).tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.inner.function(self.inner, q, k, v)


def expanded(k: Tensor, times: int = H // G) -> Tensor:
    batch, heads, length, width = k.shape
    return k[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def unsqueezed(k: Tensor) -> Tensor:
    wide = k.unsqueeze(2).expand(-1, -1, H // G, -1, -1)
    return wide.reshape(wide.shape[0], H, wide.shape[3], wide.shape[4])


def interleaved(k: Tensor) -> Tensor:
    return torch.repeat_interleave(k, H // G, dim=1)


def written(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.3
    return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -math.inf), -1) @ v


fused = F.scaled_dot_product_attention
REPEATED: dict[str, Callable[..., Any]] = {
    "expanded": lambda m, q, k, v: written(q, expanded(k), expanded(v)),
    "unsqueezed": lambda m, q, k, v: written(q, unsqueezed(k), unsqueezed(v)),
    "interleaved": lambda m, q, k, v: written(q, interleaved(k), v.repeat_interleave(H // G, 1)),
    "masked": lambda m, q, k, v: written(q, expanded(k), expanded(v), m.saved.logical_not()),
    "fused": lambda m, q, k, v: fused(q, expanded(k), expanded(v), scale=0.3),
    "fused, masked": lambda m, q, k, v: fused(q, interleaved(k), interleaved(v), attn_mask=m.saved),
    "fused, causal": lambda m, q, k, v: fused(q, interleaved(k), interleaved(v), is_causal=True),
    "read elsewhere": lambda m, q, k, v: (lambda e: fused(q, e, e) + e)(expanded(k)),
}


def call_of(gm: torch.fx.GraphModule) -> torch.fx.Node:
    (call,) = (node for node in gm.graph.nodes if "scaled_dot" in str(node.target))
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", REPEATED)
def test_keys_and_values_are_not_repeated(name: str, dtype: torch.dtype) -> None:
    model, inputs = Three(REPEATED[name]).to(dtype), tuple(x.to(dtype) for x in (Q, K, V))
    gm = check_applied(rg.FuseAttention(), model, inputs, "trace")
    call = call_of(gm)
    assert call.kwargs["enable_gqa"] is True
    assert call.args[1].meta["val"].shape[1] == G
    assert ("expand" in gm.code or "repeat" in gm.code) == (name == "read elsewhere")


@pytest.mark.parametrize("name", ["expanded", "unsqueezed", "interleaved", "fused"])
def test_at_other_sizes(name: str) -> None:
    model = Three(REPEATED[name])
    axes = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V), dynamic_shapes=(axes, axes, axes)))
    assert call_of(gm).kwargs["enable_gqa"] is True
    assert_matches_float64(model, gm, (torch.randn(3, H, 9, D), torch.randn(3, G, 7, D), torch.randn(3, G, 7, D)))


def test_gradients() -> None:
    model = Three(REPEATED["expanded"])
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V)))
    found = []
    for module in (model, gm):
        inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
        module(*inputs).square().sum().backward()
        found.append([x.grad for x in inputs])
    torch.testing.assert_close(*found)


def _tiled(k: Tensor) -> Tensor:
    return k.repeat(1, H // G, 1, 1)  # the heads in turns: another order than that of the groups


def _unevenly(m: Any, k: Tensor) -> Tensor:
    return torch.repeat_interleave(k, m.uneven, 1, output_size=H)


def _scaled_turns(m: Any, k: Tensor) -> Tensor:
    return (k[:, :, None] * m.turns).reshape(B, H, L, D)


def _wrong_axis(k: Tensor) -> Tensor:
    return k[:, None].expand(B, H // G, G, L, D).reshape(B, H, L, D)


def _turned(k: Tensor) -> Tensor:
    return k[:, None].expand(B, G, G, L, D).reshape(B, G * G, L, D)


def _written_after(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k * 1, v * 1
    wide = expanded(k)
    k.add_(1)
    return fused(q, wide, expanded(v)) + k.sum()


WHOLE: dict[str, Callable[..., Any]] = {
    "tiled": lambda m, q, k, v: written(q, _tiled(k), _tiled(v)),
    "as many turns as heads": lambda m, q, k, v: written(q[:, :4], _turned(k), _turned(v)),
    "another order": lambda m, q, k, v: written(q, _wrong_axis(k), _wrong_axis(v)),
    "the keys alone": lambda m, q, k, v: written(q, expanded(k), torch.cat([v, v, v], 1)),
    "unevenly": lambda m, q, k, v: written(q, _unevenly(m, k), _unevenly(m, v)),
    "each turn times its own number": lambda m, q, k, v: written(q, _scaled_turns(m, k), _scaled_turns(m, v)),
    "once": lambda m, q, k, v: written(q[:, :G], expanded(k, 1), expanded(v, 1)),
    "along the length": lambda m, q, k, v: written(q[:, :G], k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_repetitions_stay(name: str) -> None:
    gm = check_applied(rg.FuseAttention(), Three(WHOLE[name]), (Q, K, V), "trace")
    assert "enable_gqa" not in call_of(gm).kwargs


def test_an_index_that_adds_another_axis() -> None:
    gm = traced_with_shapes(Three(WHOLE["as many turns as heads"]), (Q, K, V), {})
    assert "enable_gqa" not in call_of(rg.FuseAttention()(gm)).kwargs


def test_a_key_that_is_written_after_it_was_repeated_is_refused() -> None:
    check_refused(rg.FuseAttention(), Three(_written_after), (Q, K, V), "trace", "in place")


def future() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).triu(1)


FULL = torch.randn(B, H, L, D)
CAUSAL: dict[str, Callable[..., Any]] = {
    "tril": lambda m, q, k, v: fused(q, k, v, attn_mask=torch.ones(L, L, dtype=torch.bool).tril()),
    "positions": lambda m, q, k, v: fused(q, k, v, torch.arange(L)[None] <= torch.arange(L)[:, None]),
    "added": lambda m, q, k, v: fused(q, k, v, torch.full((L, L), LOWEST).triu(1)[None, None]),
    "infinite": lambda m, q, k, v: fused(q, k, v, torch.zeros(L, L).masked_fill(future(), -math.inf)),
    "a buffer": lambda m, q, k, v: fused(q, k, v, m.known),
    "filled": lambda m, q, k, v: written(q, k, v, future()),
    "filled twice": lambda m, q, k, v: (
        torch.softmax((q @ k.mT).masked_fill(future(), -math.inf).masked_fill(future(), -math.inf), -1) @ v
    ),
    "where": lambda m, q, k, v: torch.softmax(torch.where(m.known, q @ k.mT, -math.inf), -1) @ v,
    "written, added": lambda m, q, k, v: torch.softmax(q @ k.mT + torch.full((L, L), LOWEST).triu(1), -1) @ v,
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_not_made(name: str) -> None:
    model = Three(CAUSAL[name])
    gm = rg.FuseAttention()(rg.trace(model, (FULL, FULL, FULL)))
    call = call_of(gm)
    assert call.kwargs["is_causal"] is True
    assert call.kwargs.get("attn_mask") is None
    assert len(call.args) == 3
    assert not [n for n in gm.graph.nodes if n.op == "get_attr" or "ones" in n.name or "full" in n.name]
    assert_matches_float64(model, gm, (FULL * 3, FULL + 1, FULL))
    regraft.testing.assert_round_trip(rg.FuseAttention(), model, (FULL, FULL, FULL))


def test_a_mask_that_nobody_reads_any_more_is_gone() -> None:
    gm = rg.trace(Three(CAUSAL["a buffer"]), (FULL, FULL, FULL))
    assert "inner.known" in dict(gm.named_buffers())
    assert "inner.known" not in dict(rg.FuseAttention()(gm).named_buffers())


HIDDEN = torch.rand(H, L, L) > 0.5
HIDDEN[:, 1] = False  # a row that sees no key
AXES: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "three": ((H, L, D), lambda m, q, k, v: fused(q, k, v)),
    "three, scaled": ((H, L, D), lambda m, q, k, v: fused(q, k, v, scale=0.3)),
    "three, a mask": ((H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN)),
    "three, written before": ((H, L, D), lambda m, q, k, v: fused(q * 2, k + 1, v).add_(1)),
    "three, in groups": ((H, L, D), lambda m, q, k, v: fused(q, k[:G], v[:G], enable_gqa=True)),
    "four, a mask for each head": ((B, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN)),
    "four, a bias for each head": ((B, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN * 0.7)),
    "four, a bias for all heads": ((B, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN[:1] * 0.7)),
    "four, in groups, a mask": (
        (B, H, L, D),
        lambda m, q, k, v: fused(q, k[:, :G], v[:, :G], HIDDEN, enable_gqa=True),
    ),
    "five": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, dropout_p=0.0)),
    "five, hiding what is later": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, is_causal=True)),
    "five, a mask that is causal": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, m.known)),
    "five, a mask of five that is causal": (
        (B, 3, H, L, D),
        lambda m, q, k, v: fused(q, k, v, m.known[None, None, None]),
    ),
    "five, a mask for all": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN[0].float())),
    "five, a mask for each head": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN)),
    "five, a mask of four": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN[None])),
    "five, in groups": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k[:, :, :G], v[:, :, :G], enable_gqa=True)),
    "five, other lengths": ((B, 3, H, L, D), lambda m, q, k, v: fused(q[..., :3, :], k, v[..., :2])),
    "five, seen as another": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v).view(B, 3, H, -1)),
    "five, turned": ((B, L, 3, H, D), lambda m, q, k, v: fused(*(x.permute(0, 2, 3, 1, 4) for x in (q, k, v)))),
    "six, a mask of four": ((B, 3, 2, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN[None].float(), scale=0.2)),
    "six": ((B, 3, 2, H, L, D), lambda m, q, k, v: fused(q, k, v)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", AXES)
def test_a_fused_call_gets_the_four_axes_that_have_a_fast_kernel(name: str, dtype: torch.dtype) -> None:
    sizes, function = AXES[name]
    inputs = tuple(torch.randn(sizes, dtype=dtype) for _ in range(3))
    added = ("four, a bias for each head", "four, a bias for all heads", "five, a mask for all", "six, a mask of four")
    if name in added and dtype is not torch.float32:
        return  # a mask that is added has the type of the query
    gm = check_applied(rg.FuseAttention(), Three(function).to(dtype), inputs, "trace")
    call = call_of(gm)
    assert [operand.meta["val"].ndim for operand in call.args[:3]] == [4, 4, 4]
    assert "attn_mask" not in call.kwargs or call.kwargs["attn_mask"].meta["val"].ndim in (2, 4)
    assert ("contiguous" in gm.code) == ("seen" in name)
    assert ("causal" in rg.history(gm)[-1].applied[0].sentence) == ("causal" in name)


@pytest.mark.parametrize("free", [0, 1])
def test_four_axes_at_other_sizes(free: int) -> None:
    model, inputs = Three(AXES["five"][1]), tuple(torch.randn(2, 3, H, L, D) for _ in range(3))
    gm = rg.FuseAttention()(rg.trace(model, inputs, dynamic_shapes=({free: torch.export.Dim.AUTO},) * 3))
    assert call_of(gm).args[0].meta["val"].ndim == 4
    for size in (1, 4):
        sizes = [2, 3, H, L, D]
        sizes[free] = size
        assert_matches_float64(model, gm, tuple(torch.randn(sizes) for _ in range(3)))


OTHER_AXES: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "two": ((L, D), lambda m, q, k, v: fused(q, k, v)),
    "four": ((B, H, L, D), lambda m, q, k, v: fused(q, k, v)),
    "a mask of five": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN.expand(B, 1, H, L, L))),
    "a mask of four": ((H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN[None])),
    "a mask of four of its own": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v, HIDDEN.expand(3, H, L, L))),
    "one key for all": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k[:1], v[:1])),
    "one value for all": ((B, 3, H, L, D), lambda m, q, k, v: fused(q, k, v[:, :, :1])),
    "one head for all": ((H, L, D), lambda m, q, k, v: fused(q, k[:1], v)),
    "drawn": ((H, L, D), lambda m, q, k, v: fused(q, k, v, dropout_p=0.5)),
}


@pytest.mark.parametrize("name", OTHER_AXES)
def test_other_axes_stay(name: str) -> None:
    sizes, function = OTHER_AXES[name]
    gm = rg.FuseAttention()(rg.trace(Three(function), tuple(torch.randn(sizes) for _ in range(3))))
    assert not rg.history(gm)[-1].applied


def test_five_axes_of_which_two_may_vary_stay() -> None:
    axes = dict.fromkeys(range(2), torch.export.Dim.AUTO)
    inputs = tuple(torch.randn(2, 3, H, L, D) for _ in range(3))
    gm = rg.FuseAttention()(rg.trace(Three(AXES["five"][1]), inputs, dynamic_shapes=(axes,) * 3))
    assert not rg.history(gm)[-1].applied


LATER = torch.ones(L, L, dtype=torch.bool).tril(1)
NOT_CAUSAL: dict[str, Callable[..., Any]] = {
    "one later position": lambda m, q, k, v: fused(q, k, v, torch.ones(L, L, dtype=torch.bool).tril(1)),
    "a window": lambda m, q, k, v: fused(q, k, v, torch.ones(L, L, dtype=torch.bool).tril().triu(-2)),
    "mild": lambda m, q, k, v: fused(q, k, v, torch.full((L, L), -1e4).triu(1)),
    "a bias": lambda m, q, k, v: fused(q, k, v, torch.full((L, L), LOWEST).triu(1) + 0.5),
    "one head": lambda m, q, k, v: fused(
        q, k, v, torch.cat([torch.ones(H - 1, L, L).tril(), torch.ones(1, L, L)]).bool()[None]
    ),
    "a checkpoint's": lambda m, q, k, v: fused(q, k, v, m.saved),
    "inverted": lambda m, q, k, v: fused(q, k, v, torch.ones(L, L, dtype=torch.bool).triu()),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_another_mask_stays(name: str) -> None:
    check_refused(rg.FuseAttention(), Three(NOT_CAUSAL[name]), (FULL, FULL, FULL), "trace", "not known to be causal")


def test_a_mask_of_the_caller_and_other_lengths_are_no_candidates() -> None:
    for function in (
        lambda m, q, k, v: fused(q, k, v, attn_mask=v[..., :L] > 0),
        lambda m, q, k, v: fused(q, k, v),
    ):
        gm = rg.FuseAttention()(rg.trace(Three(function), (FULL[..., :L], FULL[..., :L], torch.randn(B, H, L, L))))
        assert not rg.history(gm)[-1].applied
        assert not rg.history(gm)[-1].refused
    model = Three(lambda m, q, k, v: fused(q, k, v, torch.ones(L, L + 2, dtype=torch.bool).tril()))
    longer = torch.randn(B, H, L + 2, D)
    check_refused(rg.FuseAttention(), model, (FULL, longer, longer), "trace", "not known to be causal")


def test_a_mask_of_the_caller_stays_where_attention_is_written_out() -> None:
    model = Three(lambda m, q, k, v: written(q, k, v, future() & (v[..., :1] > 0)))
    gm = check_applied(rg.FuseAttention(), model, (FULL, FULL, FULL), "trace")
    assert "attn_mask" in call_of(gm).kwargs


def test_a_scale_and_dropout_stay() -> None:
    model = Three(lambda m, q, k, v: fused(q, k, v, m.known, 0.0, False, scale=0.7))
    gm = check_applied(rg.FuseAttention(), model, (FULL, FULL, FULL), "trace")
    assert call_of(gm).kwargs == {"is_causal": True, "scale": 0.7}
    model = Three(lambda m, q, k, v: fused(q, k, v, m.known, 0.5))
    gm = rg.FuseAttention()(rg.trace(model, (FULL, FULL, FULL)))
    assert call_of(gm).kwargs == {"is_causal": True, "dropout_p": 0.5}


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_under_a_scale_that_is_not_positive_a_mask_stays(scale: float) -> None:
    model = Three(lambda m, q, k, v: fused(q, k, v, m.known, scale=scale))
    check_refused(rg.FuseAttention(), model, (FULL, FULL, FULL), "trace", "not known to be causal")
    model = Three(lambda m, q, k, v: torch.softmax((q @ k.mT * -0.5).masked_fill(future(), -math.inf), -1) @ v)
    gm = check_applied(rg.FuseAttention(), model, (FULL, FULL, FULL), "trace")
    assert "is_causal" not in call_of(gm).kwargs


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_llama(implementation: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50, attn_implementation=implementation)
    model = LlamaModel(config).eval()
    ids = torch.randint(0, 50, (2, 6))
    gm = rg.trace(model, (), {"input_ids": ids, "use_cache": False})
    gm = rg.compose(rg.RemoveDeadWork(), rg.FuseAttention())(gm)
    calls = [node for node in gm.graph.nodes if "scaled_dot" in str(node.target)]
    assert [(c.kwargs["enable_gqa"], c.kwargs["is_causal"], c.kwargs.get("attn_mask")) for c in calls] == [
        (True, True, None)
    ] * 2
    rg.verify(model, gm, (), {"input_ids": ids, "use_cache": False}).raise_for_status()
