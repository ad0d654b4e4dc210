"""`FuseNorm`: layer norm and RMS norm written out become one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.tree import Either, Form, Number, Op, Through, Tree, TreeMatch, Value
from regraft.core.values import value_of
from regraft.core.vocabulary import ADD, CAST, DIVIDE, MEAN, MULTIPLY, POWER, RSQRT, SQRT, SQUARE, SUBTRACT, VARIANCE
from regraft.transformations._norm import ends, fits, lies_alike, normalized, place_norm, precise

_X = Through((CAST,), Value("x"))


def _vector(value: Any) -> bool:
    tensor = value_of(value)
    return tensor is not None and tensor.ndim == 1


def _of_channels(value: Any) -> bool:
    """A weight of one axis with axes of size one after it, as it is multiplied with the channels of an image."""
    tensor = value_of(value)
    sizes = tuple(tensor.shape) if tensor is not None and all(isinstance(n, int) for n in tensor.shape) else ()
    return len(sizes) > 1 and sizes[-1] == 1 and sum(n != 1 for n in sizes) == 1


def _inner_axis(dim: Any) -> bool:
    axes = dim if isinstance(dim, (list, tuple)) else [dim]
    return len(axes) == 1 and axes[0] is not None and (axes[0] == 1 or axes[0] < -1)


def _square_of(form: Form) -> Form:
    return Either(Op(POWER, form, Number(2)), Op(SQUARE, form), Op(MULTIPLY, form, form))


def _normed(form: Form, variance: Form) -> Form:
    """`form / √(variance + eps)`."""
    shifted = Op(ADD, variance, Number("eps"))
    return Either(Op(MULTIPLY, form, Op(RSQRT, shifted)), Op(DIVIDE, form, Op(SQRT, shifted)))


def _scaled(form: Form, fits: Callable[[Any], bool]) -> Form:
    """With the weight, and with the bias, where there are any; cast in between, and at the end."""
    weight, bias = Through((CAST,), Value("weight", fits)), Through((CAST,), Value("bias", fits))
    weighted = Op(MULTIPLY, Through((CAST,), form), weight)
    return Through((CAST,), Either(Op(ADD, Through((CAST,), weighted), bias), weighted, form))


def _norms(dim: Form, weight: Callable[[Any], bool]) -> Form:
    """A layer norm or an RMS norm over such axes, with such weights."""

    def mean(form: Form) -> Form:
        return Op(MEAN, form, dim=dim, keepdim=True)

    centred = Op(SUBTRACT, _X, mean(_X))
    variance = Either(
        mean(_square_of(centred)),
        Op(VARIANCE, _X, dim=dim, unbiased=False, keepdim=True),
        Op(VARIANCE, _X, dim=dim, correction=0, keepdim=True),
    )
    layer, rms = _normed(centred, variance), _normed(_X, mean(_square_of(_X)))
    return Either(_scaled(layer, weight), _scaled(rms, weight))


class FuseNorm(Rewrite):
    """Fuse layer norm and RMS norm that are written out into `F.layer_norm` and `F.rms_norm`.

    `(x - mean(x)) / √(mean((x - mean(x))²) + eps) w + b = layer_norm(x, w, b, eps)` (Ba et al. 2016, arXiv:1607.06450)
    and `x / √(mean(x²) + eps) w = rms_norm(x, w, eps)` (Zhang and Sennrich 2019, arXiv:1910.07467). The fused calls
    compute half precision in float32 and round once, so they keep the upcasts of the model; a weight in float32 beside
    values in half precision leaves the casts where they are. What computes more precisely than that is refused. A norm
    over the channels of an image is fused with the channels moved to the end, where the calls expect them, and back.
    A written norm lies in memory as its input does, the fused call's result as it always does: where they may differ
    and a reader may tell, the norm stays.

    Example:
        >>> import torch, regraft as rg
        >>> class Norm(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        >>> gm = rg.FuseNorm()(rg.trace(Norm(), (torch.randn(2, 8),)))
        >>> [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]
        ['rms_norm']
    """

    preserves_computation = True
    pattern = Tree(Either(_norms(Value("dim"), _vector), _norms(Value("dim", _inner_axis), _of_channels)), RSQRT, SQRT)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        assert isinstance(match, TreeMatch)
        x, weight, bias = (match.values.get(name) for name in ("x", "weight", "bias"))
        require(that(value_of(x) is not None, f"the shape of {x!r} is not known"))
        assert isinstance(x, Node)
        weights = [node for node in (weight, bias) if node is not None]
        x, result, inner = ends(x, weights, match)
        centred = any(match.is_a(node, SUBTRACT) for node in inner)
        require(facts.closed(inner, result), facts.unchanged(x, min(inner), result), facts.floating(x))
        axes, shape = normalized(x, match.values["dim"])
        require(*(fits(node, axes, x) for node in weights), precise([*inner, result], x, match.where))
        require(facts.order_free(result) if not lies_alike(result, axes) else None)
        require(
            that(centred or bias is None, f"{match.where} adds a bias to an RMS norm, which the fused call has not")
        )

        norm: Any = F.layer_norm if centred else F.rms_norm
        place_norm(edit, result, norm, x, axes, [weight, bias] if centred else [weight], match.values["eps"])
        edit.erase_unread(inner)
        return f"fused {'layer' if centred else 'RMS'} norm over {shape}"
