"""PadAttention: fused attention with values of another width than its keys, what it keeps, and what stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3Model

import regraft as rg
from helpers import check_applied, check_refused
from regraft.core.vocabulary import ATTENTION, read
from regraft.optimize.presets import FOR_TORCH

RULE = rg.PadAttention()
B, H, G, L, S = 2, 6, 2, 5, 7
WIDTHS = [(6, 4), (4, 6)]
MASK = torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(0)) > 0.4
MASK[0, 0, 1] = False  # of which every key is hidden

attention = F.scaled_dot_product_attention
Forward = Callable[..., Any]


class Attends(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.register_buffer("mask", MASK)
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.function(self, q, k, v)


def given(widths: tuple[int, int], heads: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(B, H, L, widths[0]), (B, heads, S, widths[0]), (B, heads, S, widths[1])]
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


def calls_of(gm: GraphModule) -> list[Any]:
    calls = [read(node, gm) for node in gm.graph.nodes]
    return [call for call in calls if call is not None and call.operation is ATTENTION]


PADDED: dict[str, Forward] = {
    "alone": lambda m, q, k, v: attention(q, k, v),
    "causal": lambda m, q, k, v: attention(q, k, v, is_causal=True),
    "scaled": lambda m, q, k, v: attention(q, k, v, scale=0.3),
    "masked": lambda m, q, k, v: attention(q, k, v, m.mask),
    "by a sum": lambda m, q, k, v: attention(q, k, v, torch.zeros(L, S).masked_fill(~m.mask, -math.inf).to(q.dtype)),
    "without dropout": lambda m, q, k, v: attention(q, k, v, dropout_p=0.0),
    "transposed": lambda m, q, k, v: attention(q, k, v).transpose(1, 2).reshape(B, L, -1),
    "viewed": lambda m, q, k, v: attention(q, k, v).view(B * H, L, -1),
    "viewed with a sum": lambda m, q, k, v: (attention(q, k, v) + 1).view(B * H, -1),
    "written to": lambda m, q, k, v: attention(q, k, v).mul_(2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", PADDED)
def test_what_is_padded_computes_the_same(name: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = given(widths, dtype=dtype)
    gm = check_applied(RULE, Attends(PADDED[name]), inputs, "trace")
    (call,) = calls_of(gm)
    shapes = {call[name].meta["val"].shape[-1] for name in ("input", "key", "value")}
    assert shapes == {6}
    assert call["scale"] == (0.3 if name == "scaled" else None if widths == (6, 4) else 0.5)
    assert gm(*inputs).is_contiguous()
    site = rg.history(gm)[0].applied[0]
    assert site.sentence == f"{'values' if widths == (6, 4) else 'queries and keys'} of width 4 padded to 6"


def test_one_query_is_padded_in_half_precision() -> None:
    check_applied(RULE, Attends(REFUSED["one query"][0]), given((6, 4), dtype=torch.bfloat16), "trace")


@pytest.mark.parametrize("widths", WIDTHS)
def test_groups_of_queries_stay_groups(widths: tuple[int, int]) -> None:
    gm = check_applied(RULE, Attends(lambda m, q, k, v: attention(q, k, v, enable_gqa=True)), given(widths, G), "trace")
    (call,) = calls_of(gm)
    assert call["enable_gqa"]


@pytest.mark.parametrize("widths", WIDTHS)
def test_gradients_are_those_of_the_original(widths: tuple[int, int]) -> None:
    model, inputs = Attends(PADDED["causal"]), given(widths, dtype=torch.float64)
    gm = RULE(rg.trace(model, inputs))
    assert calls_of(gm)[0]["value"].name.startswith("pad") or calls_of(gm)[0]["input"].name.startswith("pad")
    leaves = [tuple(each.clone().requires_grad_() for each in inputs) for _ in range(2)]
    for call, own in ((model, leaves[0]), (gm, leaves[1])):
        call(*own).square().sum().backward()
    for one, other in zip(*leaves, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


REFUSED: dict[str, tuple[Forward, str]] = {
    "one query": (lambda m, q, k, v: attention(q[:, :, :1], k, v), "has one query, for which a padded copy of all"),
    "three axes": (lambda m, q, k, v: attention(q[0], k[0], v[0]), "has 3 axes, and torch's fast kernel takes four"),
    "dropout": (lambda m, q, k, v: attention(q, k, v, dropout_p=0.5), "drops weights at random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    function, reason = REFUSED[name]
    check_refused(RULE, Attends(function), given((6, 4)), "trace", reason)


def test_another_device_is_refused() -> None:
    gm = rg.trace(Attends(PADDED["alone"]), given((6, 4)))
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            with value.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = torch.empty(value.shape, device="cuda")
    RULE(gm)
    (refusal,) = rg.history(gm)[-1].refused
    assert "is on cuda:0, which has other kernels" in refusal.reason


@pytest.mark.parametrize("sizes", [None, "auto"])
def test_one_width_and_widths_that_nobody_knows_are_no_sites(sizes: str | None) -> None:
    inputs = given((6, 6) if sizes is None else (6, 4))
    gm = rg.trace(Attends(PADDED["alone"]), inputs, dynamic_shapes=sizes)
    report = RULE.explain(gm)
    assert (report.applied, report.refused) == (0, 0)


def test_it_is_applied_to_the_latent_attention_of_deepseek_and_taken_back() -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    )
    model = DeepseekV3Model(config).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    call = {"input_ids": torch.randint(0, 50, (2, 9)), "use_cache": False}
    gm = rg.trace(model, kwargs=call, dynamic_shapes="auto")
    expected = gm(**call)[0]
    assert RULE.explain(gm).applied == 2
    RULE(gm)
    assert [call["value"].meta["val"].shape[-1] for call in calls_of(gm)] == [24, 24]
    for ids in (call["input_ids"], torch.randint(0, 50, (3, 6))):
        result = rg.verify(model, gm, kwargs={"input_ids": ids, "use_cache": False})
        assert result.ok, str(result)
    rg.undo(gm)
    assert torch.equal(gm(**call)[0], expected)


def test_optimize_pads_for_kernels_of_torch() -> None:
    result = rg.optimize(Attends(PADDED["masked"]), given((6, 4)), keep="all", engine="eager", seconds=0.01)
    assert "PadAttention" in [step.transformation for step in rg.history(result.graph_module)]
    assert "PadAttention" in FOR_TORCH
