"""FuseAttention where the heads were merged with the batch first, as Bloom does, with a bias for each head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BloomConfig, BloomModel

import regraft as rg
import regraft.testing
from helpers import Wrap, assert_matches_float64, check_applied, check_refused

B, H, L, S, D = 2, 3, 5, 7, 4
Q, K, V = torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
LOWEST = torch.finfo(torch.bfloat16).min


class Three(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        hidden = torch.rand(B, 1, L, S) < 0.4
        hidden[0, 0, 1], hidden[1, 0, 2] = True, False  # a row that sees nothing
        parts = {"bias": torch.rand(B * H, 1, S), "hidden": hidden, "mask": torch.zeros(B, 1, L, S)}
        parts["mask"] = parts["mask"].masked_fill(hidden, LOWEST)
        self.inner = Wrap(function, **parts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.inner.function(self.inner, q, k, v)


def merged(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2], x.shape[3])


def products(m: Any, q: Tensor, k: Tensor) -> Tensor:
    found = torch.baddbmm(m.bias, merged(q), merged(k).transpose(1, 2), beta=1.0, alpha=0.3)
    return found.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def attend(scores: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    weights = weights.view(weights.shape[0] * weights.shape[1], weights.shape[2], weights.shape[3])
    return torch.bmm(weights, merged(v)).view(v.shape[0], v.shape[1], -1, v.shape[3])


def plain(q: Tensor, k: Tensor) -> Tensor:
    return (torch.bmm(merged(q), merged(k).transpose(1, 2)) * 0.3).view(q.shape[0], q.shape[1], -1, k.shape[2])


FORMS: dict[str, Callable[..., Any]] = {
    "bias": lambda m, q, k, v: attend(products(m, q, k), v),
    "bias and mask": lambda m, q, k, v: attend(products(m, q, k) + m.mask, v),
    "mask first": lambda m, q, k, v: attend(m.mask + products(m, q, k), v),
    "no bias": lambda m, q, k, v: attend(plain(q, k), v),
    "left merged": lambda m, q, k, v: torch.bmm(torch.softmax(plain(q, k), -1).view(B * H, L, S), merged(v)),
    "mask reshaped": lambda m, q, k, v: attend(m.mask[0, 0, 0].view(1, 1, 1, S) + plain(q, k), v),
    "no bias, mask": lambda m, q, k, v: attend(plain(q, k) + m.mask, v),
    "infinite mask": lambda m, q, k, v: attend(plain(q, k) + torch.where(m.hidden, -math.inf, 0.0).to(q.dtype), v),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_applied(name: str, dtype: torch.dtype) -> None:
    inputs = tuple(x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V))
    gm = check_applied(rg.FuseAttention(), Three(FORMS[name]).to(dtype), inputs, "trace")
    (call,) = (n for n in gm.graph.nodes if "scaled_dot" in str(n.target))
    assert call.kwargs["scale"] == 0.3
    assert "softmax" not in gm.code
    assert "baddbmm" not in gm.code
    rg.testing.assert_round_trip(rg.FuseAttention(), Three(FORMS[name]).to(dtype), inputs)


def _read_elsewhere(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = products(m, q, k)
    return attend(scores, v), scores.sum()


def _written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    q = q * 1
    flat = merged(q)
    scores = torch.baddbmm(m.bias, flat, merged(k).transpose(1, 2)).view(B, H, L, S)
    q.add_(1)
    return attend(scores, v) + q.sum()


def _mask_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    mask = m.mask * 2
    scores = products(m, q, k) + mask
    mask.add_(1)
    return attend(scores, v) + mask.sum()


def _other_heads(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    found = torch.bmm(merged(q), merged(k).transpose(1, 2)).view(H, B, L, S)
    weights = torch.softmax(found + 0 * m.mask[:1], -1).view(B * H, L, S)
    return torch.bmm(weights, merged(v))


def _masked_often(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    found = plain(q, k)
    for _ in range(13):
        found = found + m.mask
    return attend(found, v)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "one bias for all heads": (
        lambda m, q, k, v: attend(torch.baddbmm(m.mask[0], merged(q), merged(k).transpose(1, 2)).view(B, H, L, S), v),
        "no bias of each head",
    ),
    "a bias of two axes": (
        lambda m, q, k, v: attend(
            torch.baddbmm(m.mask[0, 0], merged(q), merged(k).transpose(1, 2)).view(B, H, L, S), v
        ),
        "no bias of each head",
    ),
    "masked too often": (_masked_often, "is no scores of merged heads"),
    "multiple of a mask": (
        lambda m, q, k, v: attend(torch.add(plain(q, k), m.mask, alpha=2), v),
        "adds a multiple of a mask, or a number",
    ),
    "number added": (lambda m, q, k, v: attend(plain(q, k) + 2, v), "adds a multiple of a mask, or a number"),
    "read elsewhere": (_read_elsewhere, "also used by"),
    "written": (_written, "in place"),
    "mask written": (_mask_written, "in place"),
    "a multiple of the bias": (
        lambda m, q, k, v: attend(
            torch.baddbmm(m.bias, merged(q), merged(k).transpose(1, 2), beta=0.5).view(B, H, L, S), v
        ),
        "a multiple of its bias",
    ),
    "the key as it is": (
        lambda m, q, k, v: attend(torch.baddbmm(m.bias, merged(q), merged(k.mT)).view(B, H, L, S), v),
        "not transposed",
    ),
    "scaled by a tensor, then parted": (
        lambda m, q, k, v: attend((torch.bmm(merged(q), merged(k).mT) * m.bias[:, :, :1]).view(B, H, L, S), v),
        "masked already, or scaled by a tensor",
    ),
    "masked, then parted": (
        lambda m, q, k, v: attend((torch.bmm(merged(q), merged(k).transpose(1, 2)) + m.bias).view(B, H, L, S), v),
        "masked already",
    ),
    "another axis": (
        lambda m, q, k, v: torch.bmm(torch.softmax(plain(q, k), 2).view(B * H, L, S), merged(v)),
        "another axis than the last",
    ),
    "other heads": (_other_heads, "merging the heads"),
    "other rows": (
        lambda m, q, k, v: torch.bmm(
            torch.softmax(torch.bmm(merged(q), merged(k).transpose(1, 2)).view(B, H, S, L), -1).view(B * H, S, L),
            merged(q),
        ),
        "parts more",
    ),
    "not reshaped values": (
        lambda m, q, k, v: torch.bmm(torch.softmax(plain(q, k), -1).view(B * H, L, S), merged(v) * 2),
        "merging the heads",
    ),
    "joined again": (
        lambda m, q, k, v: torch.matmul(
            torch.softmax(plain(q, k), -1).view(B * H, L, S).view(1, B * H * L, S), merged(v)
        ),
        "reshapes the weights",
    ),
    "joined into one": (
        lambda m, q, k, v: torch.matmul(torch.softmax(plain(q, k), -1).view(1, B * H * L, S), merged(v)),
        "and not by merging",
    ),
    "mask of more batches": (lambda m, q, k, v: attend(plain(q[:1], k[:1]) + m.mask, v), "parts other heads"),
    "lowered": (
        lambda m, q, k, v: torch.bmm(F.softmax(plain(q, k), -1, dtype=torch.float64).float().view(-1, L, S), merged(v)),
        "float64",
    ),
    "unknown between": (lambda m, q, k, v: attend(plain(q, k).tanh(), v), "'tanh' is no scores"),
    "one value for all heads": (
        lambda m, q, k, v: torch.matmul(torch.softmax(plain(q[:1], k[:1]), -1).view(H, L, S), v[:1].mean(1)),
        "merging the heads",
    ),
    "two reshapes": (
        lambda m, q, k, v: torch.bmm(torch.softmax(plain(q, k), -1).view(B, H * L, S).view(B * H, L, S), merged(v)),
        "reshapes the weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    check_refused(rg.FuseAttention(), Three(function), (Q, K, V), "trace", word)


def test_a_bias_in_float16_is_refused() -> None:
    inputs = (Q.half(), K.half(), V.half())
    check_refused(rg.FuseAttention(), Three(FORMS["bias"]).half(), inputs, "trace", "float16")


def test_a_mask_that_hides_in_float16_is_refused() -> None:
    inputs = (Q.half(), K.half(), V.half())
    model = Three(FORMS["no bias, mask"]).half()
    check_refused(rg.FuseAttention(), model, inputs, "trace", "float16 rounds away the scores")


def test_bloom_at_any_size_and_with_padding() -> None:
    config = BloomConfig(hidden_size=24, n_layer=2, n_head=3, vocab_size=60)
    model = BloomModel(config).eval()
    gm = rg.symbolic_trace(model, input_names=["input_ids", "attention_mask"])
    gm = rg.FuseAttention()(gm)
    assert len(rg.history(gm)[-1].applied) == 2
    for batch, length in ((2, 7), (3, 11), (1, 4)):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, :2] = 0
        call = {"input_ids": torch.randint(0, 60, (batch, length)), "attention_mask": mask}
        with torch.no_grad():
            torch.testing.assert_close(gm(**call)[0], model(**call)[0], atol=1e-5, rtol=1e-4)


def test_other_sizes() -> None:
    axes = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    model = Three(FORMS["no bias"])
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V), dynamic_shapes=(axes, axes, axes)))
    assert rg.history(gm)[-1].applied, rg.history(gm)[-1].refused
    assert_matches_float64(model, gm, (torch.randn(4, H, 9, D), torch.randn(4, H, 6, D), torch.randn(4, H, 6, D)))
