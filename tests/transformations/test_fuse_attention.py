"""FuseAttention: every way to write attention, hidden rows, and what must be refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap, assert_matches_float64, check_applied, check_refused, randomise
from regraft.core.vocabulary import read
from regraft.testing.parts import nested, traced_with_shapes
from regraft.transformations._attention import untransposed

B, H, L, S, D = 2, 3, 5, 7, 4
Q, K, V = torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
LOWEST = torch.finfo(torch.float32).min
HIDDEN = torch.rand(B, 1, L, S) < 0.4
HIDDEN[0, 0, 1] = True  # a row that sees nothing
HIDDEN[1, 0, 2] = False


class Three(nn.Module):
    """Attention as a function of a query, a key, a value and more."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.inner = Wrap(function, **parts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.inner.function(self.inner, q, k, v)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


def attend(weights: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(weights, -1) @ v


def again(x: Tensor) -> Tensor:
    """As many windows of a second image."""
    return torch.cat((x, x.flip(2)))


def later() -> Tensor:
    """Hides what comes later."""
    return torch.full((L, L), LOWEST).triu(1)


FORMS: dict[str, Callable[..., Any]] = {
    "plain": lambda m, q, k, v: attend(scores(q, k), v),
    "times a scale": lambda m, q, k, v: attend(scores(q, k) * 0.3, v),
    "scale first": lambda m, q, k, v: attend(0.3 * scores(q, k), v),
    "times a number in a buffer": lambda m, q, k, v: attend(scores(q, k) * m.scale, v),
    "divided": lambda m, q, k, v: attend(scores(q, k) / math.sqrt(D), v),
    "scaled query": lambda m, q, k, v: attend(scores(q * 0.3, k), v),
    "scaled query and scores": lambda m, q, k, v: attend(scores(q / 2, k) * 3, v),
    "scaled key": lambda m, q, k, v: attend(scores(q, k * 0.3), v),
    "permuted key": lambda m, q, k, v: attend(torch.matmul(q, k.permute(0, 1, 3, 2)), v),
    "key transposed otherwise": lambda m, q, k, v: attend(q @ (k * 2).mT, v),
    "matrices of the key transposed": lambda m, q, k, v: attend(q @ k.mT, v),
    "adjoint of the key": lambda m, q, k, v: attend(q @ torch.adjoint(k), v),
    "functional": lambda m, q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)), dim=-1), v),
    "module": lambda m, q, k, v: m.softmax(scores(q, k)) @ v,
    "last axis by number": lambda m, q, k, v: torch.softmax(scores(q, k), 3) @ v,
    "upcast": lambda m, q, k, v: F.softmax(scores(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v,
    "upcast before": lambda m, q, k, v: F.softmax(scores(q, k).float(), dim=-1).type_as(q) @ v,
    "dropout": lambda m, q, k, v: F.dropout(torch.softmax(scores(q, k), -1), 0.5, False) @ v,
    "added mask": lambda m, q, k, v: attend(scores(q, k) * 0.3 + m.mask, v),
    "mask added first": lambda m, q, k, v: attend(m.mask + scores(q, k) * 0.3, v),
    "two masks": lambda m, q, k, v: attend(scores(q, k) * 0.3 + m.mask + m.bias, v),
    "filled": lambda m, q, k, v: attend((scores(q, k) * 0.3).masked_fill(m.hidden, -math.inf), v),
    "filled, finite": lambda m, q, k, v: attend((scores(q, k) / 2).masked_fill(m.hidden, -1e9), v),
    "filled with the lowest": lambda m, q, k, v: attend((scores(q, k) / 2).masked_fill(m.hidden, LOWEST), v),
    "where": lambda m, q, k, v: attend(torch.where(m.hidden, -math.inf, scores(q, k)), v),
    "where not": lambda m, q, k, v: attend(torch.where(~m.hidden, scores(q, k) * 0.3, LOWEST), v),
    "filled twice": lambda m, q, k, v: attend(
        scores(q, k).masked_fill(m.hidden, -math.inf).masked_fill(m.causal, -math.inf), v
    ),
    "infinite mask": lambda m, q, k, v: attend(scores(q, k) + torch.where(m.hidden, -math.inf, 0.0), v),
    "finite mask": lambda m, q, k, v: attend(scores(q, k) + torch.where(m.hidden, LOWEST, 0.0), v),
    "inverted mask": lambda m, q, k, v: attend(scores(q, k) + (1.0 - (~m.hidden).float()) * LOWEST, v),
    "grouped": lambda m, q, k, v: attend(
        scores(q, k[:, :1, None].expand(B, 1, H, S, D).reshape(B, H, S, D)),
        v[:, :1, None].expand(B, 1, H, S, D).reshape(B, H, S, D),
    ),
    "key and value viewed": lambda m, q, k, v: attend(
        scores(q, k.flatten(2).view(B, H, S, D)), (v + 1).flatten(2).view(B, H, S, D)
    ),
    "key and value viewed as they were added": lambda m, q, k, v: attend(
        scores(q, (k + 1).view(B, H, S, D)), (v + 1).view(B, H, S, D)
    ),
    "times a factor of each head": lambda m, q, k, v: attend(scores(q, k) * m.factors, v),
    "a factor times": lambda m, q, k, v: attend(m.factors * scores(q, k) * 0.3 + m.mask, v),
    "divided by a factor": lambda m, q, k, v: attend(scores(q, k) / m.factors, v),
    "by two factors": lambda m, q, k, v: attend(m.temperature * scores(q, k) / m.factors, v),
    "factors of each element of the batch": lambda m, q, k, v: attend(scores(q, k) * q[:, :1, :1, :1], v),
    "a mask for each window": lambda m, q, k, v: attend(
        ((scores(q, k) * m.factors + m.bias).view(1, B, H, L, S) + m.mask[None]).view(-1, H, L, S), v
    ),
    "two masks for each window, of many": lambda m, q, k, v: attend(
        (scores(again(q), again(k)).view(q.shape[0], B, H, L, S) + m.mask + m.mask[None]).view(-1, H, L, S), again(v)
    ).view(2, -1, H, L, D),
    "filled in a view": lambda m, q, k, v: attend(
        scores(again(q), again(k))
        .reshape([B, B, H, L, S])
        .masked_fill(m.hidden[:, None], -math.inf)
        .reshape([B * B, H, L, S]),
        again(v),
    ),
    "masks in a view of three axes more": lambda m, q, k, v: attend(
        (scores(again(q), again(k)).view(B, 1, B, H, L, S) + m.mask[None, None]).view(-1, H, L, S), again(v)
    ),
    "causal in a view and by itself": lambda m, q, k, v: attend(
        (scores(again(q), again(q)).view(B, B, H, L, L) + later().expand(B, B, 1, L, L)).view(-1, H, L, L)
        + later().expand(2 * B, 1, L, L),
        again(q),
    ),
    "a bias in a view": lambda m, q, k, v: attend(
        (scores(q, k).view(1, B, H, L, S) + m.bias).view(B, H, L, S) + m.mask, v
    ),
    "five axes": lambda m, q, k, v: attend(scores(q[None] * 0.3, k[None]), v[None]),
    "five axes that are views of nothing": lambda m, q, k, v: attend(
        *(lambda q, k, v: (scores(q, k) + m.causal[:L, :S] * 0.5, v))(
            *(again(x).view(B, B, H, -1, D) for x in (q, k, v))
        )
    ),
    "five axes and a mask": lambda m, q, k, v: attend(
        scores(q[:, None], k[:, None]).masked_fill(m.hidden[:, None], -math.inf), v[:, None]
    ),
    "three axes": lambda m, q, k, v: attend(
        torch.bmm(q.reshape(B * H, L, D), k.reshape(B * H, S, D).transpose(1, 2)) * 0.3, v.reshape(B * H, S, D)
    ),
    "three axes and a mask": lambda m, q, k, v: attend(
        torch.bmm(q[:, 0], k[:, 0].transpose(1, 2)).masked_fill(m.hidden[:, 0], -math.inf), v[:, 0]
    ),
}


def model_of(function: Callable[..., Any]) -> nn.Module:
    mask = torch.randn(B, 1, L, S)
    mask[HIDDEN] = LOWEST
    causal = torch.ones(L, S, dtype=torch.bool).triu(1)
    parts = {"mask": mask, "bias": torch.randn(H, L, S), "hidden": HIDDEN, "causal": causal}
    parts |= {"factors": torch.rand(H, 1, 1) + 0.5, "temperature": nn.Parameter(torch.tensor(1.5))}
    model = Three(function, softmax=nn.Softmax(-1), **parts).eval()
    model.inner.register_buffer("scale", torch.tensor(0.3), persistent=False)
    return model


@pytest.mark.parametrize("name", FORMS)
def test_applied(name: str) -> None:
    gm = check_applied(rg.FuseAttention(), model_of(FORMS[name]), (Q, K, V), "trace")
    assert not [n for n in gm.graph.nodes if "softmax" in n.name]


SCALED_KEYS: dict[str, tuple[float, Callable[..., Any]]] = {
    "before it is transposed": (0.3, lambda m, q, k, v: attend(scores(q, k * 0.3), v)),
    "after": (0.3, lambda m, q, k, v: attend(q @ (0.3 * k.mT), v)),
    "both": (1.5, lambda m, q, k, v: attend(q @ (k / 2).mT.mul(3), v)),
    "and the query": (0.1, lambda m, q, k, v: attend((q / 5) @ (k / 2).mT, v)),
    "and the scores": (6.0, lambda m, q, k, v: attend(scores(q, k * 3) * 2 + m.mask, v)),
    "by a number in a buffer": (0.3, lambda m, q, k, v: attend(scores(q, k * m.scale), v)),
    "as it came": (0.3, lambda m, q, k, v: attend(q @ (k.mT.contiguous() * 0.3), v)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED_KEYS)
def test_a_scale_of_the_key_joins_that_of_the_scores(name: str, dtype: torch.dtype) -> None:
    scale, function = SCALED_KEYS[name]
    gm = check_applied(
        rg.FuseAttention(), model_of(function).to(dtype), (Q.to(dtype), K.to(dtype), V.to(dtype)), "trace"
    )
    attention = next(node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention)
    assert attention.kwargs["scale"] == pytest.approx(
        scale, rel=1e-6 if dtype is torch.float32 else 4e-3
    )  # a buffer is rounded
    names = {node.name.partition("_")[0] for node in gm.graph.nodes}
    assert names.isdisjoint({"mul", "truediv", "div"})


KEYS_THAT_STAY: dict[str, Callable[..., Any]] = {
    "by a tensor": lambda m, q, k, v: attend(scores(q, k * m.factors), v),
    "read elsewhere": lambda m, q, k, v: (lambda scaled: attend(scores(q, scaled), scaled))(k * 0.3),
    "transposed elsewhere": lambda m, q, k, v: (lambda key: attend(q @ key, v).sum() + key)((k * 0.3).mT),
}


@pytest.mark.parametrize("name", KEYS_THAT_STAY)
def test_other_scales_of_the_key_stay(name: str) -> None:
    gm = check_applied(rg.FuseAttention(), model_of(KEYS_THAT_STAY[name]), (Q, K, V), "trace")
    assert [node for node in gm.graph.nodes if node.name.startswith("mul")]


def test_a_key_that_is_changed_after_it_was_scaled_is_refused() -> None:
    """The fused call would read it as it is then."""

    def function(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = k + 1
        scaled = key * 0.3
        key.add_(1)
        return attend(scores(q, scaled), v)

    check_refused(rg.FuseAttention(), model_of(function), (Q, K, V), "trace", "changes")


@pytest.mark.parametrize("name", ["plain", "upcast", "added mask", "filled", "grouped", "finite mask"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.float64 and name == "upcast":
        pytest.skip("refused: float64 is lowered to float32")
    model = model_of(FORMS[name])
    if name == "finite mask":
        low = torch.finfo(dtype).min
        model = model_of(
            lambda m, q, k, v: attend(
                scores(q, k) + torch.zeros_like(m.hidden, dtype=dtype).masked_fill(m.hidden, low), v
            )
        )
    elif name == "added mask":
        model.inner.mask.clamp_(min=torch.finfo(torch.bfloat16).min)
    check_applied(rg.FuseAttention(), model.to(dtype), (Q.to(dtype), K.to(dtype), V.to(dtype)), "trace")


def test_a_row_that_sees_nothing_stays_nan_or_uniform() -> None:
    nan, uniform = (model_of(FORMS[name]) for name in ("filled", "filled, finite"))
    for model, expected in ((nan, torch.full((H, D), math.nan)), (uniform, V[0].mean(-2))):
        gm = rg.FuseAttention()(rg.trace(model, (Q, K, V)))
        assert rg.history(gm)[-1].applied
        torch.testing.assert_close(gm(Q, K, V)[0, :, 1], expected, equal_nan=True)


@pytest.mark.parametrize("when", ["before, through a view", "after"])
def test_of_a_mask_that_is_written_it_is_not_taken_that_it_hides_no_row(when: str) -> None:
    def function(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = m.bias if when == "after" else m.bias + 0
        if when != "after":
            mask[0].fill_(-math.inf)
        result = attend(scores(q, k) + mask, v)
        m.bias.fill_(-math.inf)
        return result

    model = model_of(function)
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V)))
    assert rg.history(gm)[-1].applied
    twin = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(gm(Q, K, V), twin(Q, K, V), equal_nan=True)
    assert twin(Q, K, V).isnan().all()


def of_few_axes(shape: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    """Masks that are broadcast to the scores from one axis, or from none."""
    bias, hidden = torch.randn(shape), torch.rand(shape) < 0.4
    return {
        "added": lambda m, q, k, v: attend(scores(q, k) / 2 + bias, v),
        "added, -inf": lambda m, q, k, v: attend(scores(q, k) / 2 + bias.masked_fill(hidden, -math.inf), v),
        "two": lambda m, q, k, v: attend(scores(q, k) / 2 + bias + m.mask, v),
        "filled": lambda m, q, k, v: attend((scores(q, k) / 2).masked_fill(hidden, -math.inf), v),
        "filled, finite": lambda m, q, k, v: attend((scores(q, k) / 2).masked_fill(hidden, -1e9), v),
        "chosen": lambda m, q, k, v: attend(torch.where(hidden, -math.inf, scores(q, k) / 2), v),
    }


@pytest.mark.parametrize("axes", [3, 4, 5])
@pytest.mark.parametrize("shape", [(), (1,), (S,)])
@pytest.mark.parametrize("name", of_few_axes(()))
def test_masks_of_one_axis_and_of_none(name: str, shape: tuple[int, ...], axes: int) -> None:
    model = Three(of_few_axes(shape)[name], mask=torch.randn(L, S))
    inputs = tuple(x[0] if axes == 3 else torch.stack((x, -x)) if axes == 5 else x for x in (Q, K, V))
    check_applied(rg.FuseAttention(), model, inputs, "trace")


def test_other_sizes() -> None:
    function = lambda m, q, k, v: attend(scores(q, k) * 0.3 + m.bias[:, :1, :1], v)
    model = model_of(function)
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V), dynamic_shapes="auto"))
    assert rg.history(gm)[-1].applied, rg.history(gm)[-1].refused
    assert_matches_float64(model, gm, (torch.randn(4, H, 9, D), torch.randn(4, H, 11, D), torch.randn(4, H, 11, D)))


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_any_number_of_images(causal: bool) -> None:
    def function(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = later().expand(B, 1, L, L) if causal else m.mask[..., :L]
        parted = (scores(q, k) * m.factors).view(q.shape[0] // B, B, H, L, L) + mask.unsqueeze(0)
        return attend(parted.view(-1, H, L, L), v)

    model = model_of(function)
    inputs = tuple(torch.randn(2 * B, H, L, D) for _ in range(3))
    axes: Any = {0: B * torch.export.Dim("images", min=2, max=64)}
    gm = rg.FuseAttention()(rg.trace(model, inputs, dynamic_shapes=dict.fromkeys("qkv", axes)))
    assert rg.history(gm)[-1].applied, rg.history(gm)[-1].refused
    for images in (2, 3):
        assert_matches_float64(model, gm, tuple(torch.randn(images * B, H, L, D) for _ in range(3)))


def test_a_trained_bias_that_was_folded_hides_no_row() -> None:
    biases = nn.Parameter(torch.randn(H, 9))
    model = Three(
        lambda m, q, k, v: attend(scores(q, k) + m.w[:, m.index], v), w=biases, index=torch.zeros(L, S).long()
    )
    gm = rg.RemoveDeadWork()(rg.trace(model, (Q, K, V)))
    assert gm.graph.find_nodes(op="call_function", target=torch.clone)  # of the constant, which may be trained
    rg.FuseAttention()(gm)
    assert gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert not gm.graph.find_nodes(op="call_function", target=torch.masked_fill)
    assert_matches_float64(model, gm, (Q, K, V))


def test_gradients_flow_to_a_trained_bias() -> None:
    model = randomise(
        Three(
            lambda m, q, k, v: attend(scores(q, k) + m.table(m.index).permute(2, 0, 1), v),
            table=nn.Embedding(9, H),
            index=torch.randint(0, 9, (L, S)),
        )
    )
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V)))
    assert rg.history(gm)[-1].applied
    found = []
    for module in (model, gm):
        model.zero_grad()
        module(Q, K, V).square().sum().backward()
        found.append(model.inner.table.weight.grad.clone())
    torch.testing.assert_close(*found)


def _weights_returned(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = torch.softmax(scores(q, k), -1)
    return weights @ v, weights


def _written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    product = scores(q, k)
    q.add_(1)
    return attend(product, v) + q.sum()


def _key_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    k = k + 0
    product = scores(q, k)
    k.add_(1)
    return attend(product, v) + k.sum()


def _mask_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    mask = m.bias + 0
    masked = scores(q, k) + mask
    mask.add_(1)
    return attend(masked, v) + mask.sum()


def _written_before_its_scaled_form_is_read(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    q = q + 0
    small = q * 0.3
    q.add_(1)
    return attend(scores(small, k), v)


def _masked_often(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    found = scores(q, k)
    for _ in range(13):
        found = found + m.bias
    return attend(found, v)


def _scale_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    result = attend(scores(q, k) * m.scale, v)
    m.scale.add_(1)
    return result


def _factor_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    factor = m.factors + 0
    scaled = scores(q, k) * factor
    factor.add_(1)
    return attend(scaled, v) + factor.sum()


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "key written": (_key_written, "changes 'transpose' in place"),
    "mask written": (_mask_written, "in place between"),
    "query written after it was scaled": (_written_before_its_scaled_form_is_read, "in place between 'mul' and"),
    "masked too often": (_masked_often, "neither of them scores"),
    "weights returned": (_weights_returned, "also used by"),
    "query written": (_written, "in place"),
    "another axis": (lambda m, q, k, v: torch.softmax(scores(q, k), -2) @ v, "another axis"),
    "unknown between": (lambda m, q, k, v: attend(scores(q, k).tanh() * 5, v), "no scale and no mask"),
    "unknown between, named": (lambda m, q, k, v: attend(scores(q, k).tanh(), v), "'tanh' lies between"),
    "no scores": (lambda m, q, k, v: attend(torch.where(m.hidden, -math.inf, 0.0), v), "0.0 lies between"),
    "factor of each key": (lambda m, q, k, v: attend(scores(q, k) * m.bias[:, :1], v), "something else"),
    "factor of each query": (lambda m, q, k, v: attend(scores(q, k) / m.bias[:, :, :1], v), "something else"),
    "factor of another type": (
        lambda m, q, k, v: attend((scores(q, k) * m.factors.double()).float(), v),
        "a tensor in another type",
    ),
    "masked, then scaled by a factor": (
        lambda m, q, k, v: attend((scores(q, k) + m.mask) * m.factors, v),
        "before they are scaled by 'inner_factors'",
    ),
    "factor divided by the scores": (lambda m, q, k, v: attend(m.factors / scores(q, k), v), "something else"),
    "divided and rounded": (
        lambda m, q, k, v: attend(torch.div(scores(q, k), m.factors, rounding_mode="floor"), v),
        "something else",
    ),
    "windows that are not counted": (
        lambda m, q, k, v: attend((scores(q, k).view(-1, B, H, L, S) + m.mask[None]).view(B, H, L, S), v),
        "only part their first axis",
    ),
    "factor of a view": (
        lambda m, q, k, v: attend((scores(q, k).view(1, B, H, L, S) * m.factors[None]).view(B, H, L, S), v),
        "a view of the scores",
    ),
    "factor of heads that were merged": (
        lambda m, q, k, v: attend((scores(q, k).view(H, B, L, S) * m.factors[:, None]).view(B, H, L, S), v),
        "a view of the scores",
    ),
    "mask of a view of the heads": (
        lambda m, q, k, v: attend((scores(q, k).view(1, B * H, L, S) + m.bias.repeat(B, 1, 1)).view(B, H, L, S), v),
        "only part their first axis",
    ),
    "mask of a view of the keys": (
        lambda m, q, k, v: attend((scores(q, k).view(B, H, S, L) + m.bias.view(H, S, L)).view(B, H, L, S), v),
        "only part their first axis",
    ),
    "written factor": (_factor_written, "in place between"),
    "masked, then scaled": (lambda m, q, k, v: attend((scores(q, k) + m.mask) * 0.3, v), "before they are scaled"),
    "fill with a value": (
        lambda m, q, k, v: attend(torch.where(m.hidden, m.mask, scores(q, k)), v),
        "fills the scores with something else than a number",
    ),
    "mild fill": (lambda m, q, k, v: attend(scores(q, k).masked_fill(m.hidden, -50.0), v), "still has weight"),
    "fill and mask": (
        lambda m, q, k, v: attend(scores(q, k).masked_fill(m.hidden, -1e9) + m.mask, v),
        "beside another",
    ),
    "two finite fills": (
        lambda m, q, k, v: attend(scores(q, k).masked_fill(m.hidden, -1e9).masked_fill(m.causal, -1e9), v),
        "beside another",
    ),
    "infinite fill and mask": (
        lambda m, q, k, v: attend(scores(q, k).masked_fill(m.hidden, -math.inf) + m.mask, v),
        "in two ways",
    ),
    "reshaped weights": (
        lambda m, q, k, v: torch.softmax(scores(q, k), -1).reshape(B * H, L, S) @ v.reshape(B * H, S, D),
        "is no scores of merged heads",
    ),
    "broadcast mask": (lambda m, q, k, v: attend(scores(q[:1], k[:1]) + m.mask, v), "another shape"),
    "shared key": (lambda m, q, k, v: attend(scores(q, k[:, :1]), v), "not of the same batches"),
    "number added": (lambda m, q, k, v: attend(scores(q, k) + 2, v), "no mask"),
    "multiple of a mask": (lambda m, q, k, v: attend(torch.add(scores(q, k), m.bias, alpha=2), v), "adds a multiple"),
    "mask of another dtype": (
        lambda m, q, k, v: attend((scores(q, k) + m.bias.double()).float(), v),
        "is not of torch.float32",
    ),
    "lowered": (lambda m, q, k, v: F.softmax(scores(q, k), -1, dtype=torch.float64).float() @ v, "float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    check_refused(rg.FuseAttention(), model_of(function), (Q, K, V), "trace", word)


def test_dropout_in_training_is_refused() -> None:
    model = model_of(lambda m, q, k, v: m.drop(torch.softmax(scores(q, k), -1)) @ v)
    model.inner.drop = nn.Dropout(0.5)
    gm = rg.symbolic_trace(model)
    rg.FuseAttention()(gm)
    assert "training mode" in rg.history(gm)[-1].refused[0].reason


def test_without_shapes_it_is_refused() -> None:
    check_refused(rg.FuseAttention(), model_of(FORMS["plain"]), (Q, K, V), "fx", "capture with rg.trace")


def test_a_finite_mask_in_float16_is_refused() -> None:
    model = model_of(FORMS["filled with the lowest"])
    model.inner.function = lambda m, q, k, v: attend(scores(q, k).masked_fill(m.hidden, -65504.0), v)
    check_refused(rg.FuseAttention(), model.half(), (Q.half(), K.half(), V.half()), "trace", "float16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_factor_in_half_precision_is_refused(dtype: torch.dtype) -> None:
    model = model_of(FORMS["times a factor of each head"]).to(dtype)
    inputs = (Q.to(dtype), K.to(dtype), V.to(dtype))
    check_refused(rg.FuseAttention(), model, inputs, "trace", "the query would be rounded more")


def test_a_constant_number_is_the_scale_of_the_call() -> None:
    gm = rg.FuseAttention()(rg.trace(model_of(FORMS["times a number in a buffer"]), (Q, K, V)))
    (call,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert call.kwargs["scale"] == pytest.approx(0.3)


def test_a_scale_that_is_written_later_is_read_before() -> None:
    model = model_of(_scale_written)
    gm = rg.FuseAttention()(rg.trace(model, (Q, K, V)))
    assert rg.history(gm)[-1].applied
    twin = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(gm(Q, K, V), twin(Q, K, V))


@pytest.mark.parametrize("free", [0, 1, 2])
def test_five_axes_are_given_to_the_fast_kernel(free: int) -> None:
    model = model_of(FORMS["plain"])
    inputs = tuple(torch.randn(2, 3, H, L, D) for _ in range(3))
    axes = dict.fromkeys(range(free), torch.export.Dim.AUTO)
    gm = rg.FuseAttention()(rg.trace(model, inputs, dynamic_shapes=dict.fromkeys("qkv", axes) if free else None))
    with torch.profiler.profile() as profile, torch.no_grad():
        gm(*inputs)
    assert any("flash_attention" in event.key for event in profile.key_averages()) == (free < 2)  # one size may be free
    assert_matches_float64(model, gm, inputs)
    if free:
        assert_matches_float64(model, gm, tuple(torch.randn(5, 2 + free, H, L, D) for _ in range(3)))


@pytest.mark.parametrize("axes", [3, 4])
def test_a_bias_of_each_head_is_given_four_axes(axes: int) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(2, 5, 6))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.transpose(-2, -1) * 0.3 + self.bias).softmax(-1) @ v

    inputs = tuple(torch.randn(*(3, 2, length, 4)[4 - axes :]) for length in (5, 6, 6))
    gm = check_applied(rg.FuseAttention(), Biased(), inputs, "trace")
    (call,) = (node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention)
    assert call.kwargs["attn_mask"].meta["val"].shape == (1, 2, 5, 6)


def test_float64_lowered_on_the_way_is_refused() -> None:
    inputs = (Q.double(), K.double(), V.double())
    check_refused(rg.FuseAttention(), model_of(FORMS["upcast"]).double(), inputs, "trace", "lowered")


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "seen",
    [
        lambda a: a.view(a.shape[0], -1),
        lambda a: a.view(-1, *a.shape[-1:]),
        lambda a: (a + 1).view(a.shape[0], -1),
        lambda a: (a.mT.exp().mT * 2)[:2].view(-1, *a.shape[-1:]),
    ],
)
def test_a_view_of_the_result_still_finds_it_contiguous(
    axes: int, masked: bool, seen: Callable[[Tensor], Tensor]
) -> None:
    def function(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) if axes == 4 else x[:, :, 0].transpose(0, 1) for x in (q, k, v))
        length = q.shape[-2]
        weights = scores(q, k)
        if masked:
            weights = weights.masked_fill(m.hidden[:1, 0, :length, :length], -math.inf)
        return seen(attend(weights, v))

    inputs = tuple(torch.randn(3, L, H, D) for _ in range(3))
    gm = check_applied(rg.FuseAttention(), model_of(function), inputs, "trace")
    assert "contiguous" in gm.code


def test_a_view_outside_of_the_graph_that_attention_is_in_still_finds_it_contiguous() -> None:
    inputs = tuple(torch.randn(2, L, H, D).transpose(1, 2) for _ in range(3))
    model = Three(lambda m, q, k, v: attend(q @ k.transpose(-2, -1), v).view(-1, D))
    gm = nested(traced_with_shapes(model, inputs, {}), 0, 4)
    assert [node.op for node in gm.graph.nodes][-3:] == ["call_module", "call_method", "output"]
    expected = gm(*inputs)
    assert len(rg.history(rg.FuseAttention()(gm))[-1].applied) == 1
    torch.testing.assert_close(gm(*inputs), expected)


@pytest.mark.parametrize("turned", [lambda k: k.mT, lambda k: k.mH, torch.adjoint, lambda k: k.swapaxes(-1, -2)])
def test_a_key_is_taken_as_it_was_before_any_transposition_of_its_matrices(turned) -> None:
    gm = rg.FuseAttention()(rg.trace(Three(lambda m, q, k, v: attend(q @ turned(k), v)), (Q, K, V)))
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [F.scaled_dot_product_attention]


@pytest.mark.parametrize(("key", "turned"), [(K, True), (K.cfloat(), False)])
def test_an_adjoint_that_conjugates_is_no_transposition(key: Tensor, turned: bool) -> None:
    gm = rg.trace(Wrap(lambda m, k: k.mH), (key,))
    holder, node = [node for node in gm.graph.nodes if node.op != "output"]
    call = read(node, gm)
    assert call is not None
    assert untransposed(call) is (holder if turned else None)
