"""The ATen calls that have a Python spelling with the same arguments in the same order.

Only what is the same operation on the same arguments is here; the suite exports captured graphs again and asks for the
ATen calls that they came from. In-place calls keep their ATen form on purpose: it is the one that `torch.fx` knows to
have a side effect, so that nothing removes it as dead code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

aten = torch.ops.aten

#: operators between two values, where there is no third argument
OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add,
    aten.add.Scalar: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.sub.Scalar: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.div.Scalar: operator.truediv,
    aten.true_divide.Tensor: operator.truediv,
    aten.true_divide.Scalar: operator.truediv,
    aten.divide.Tensor: operator.truediv,
    aten.divide.Scalar: operator.truediv,
    aten.multiply.Tensor: operator.mul,
    aten.multiply.Scalar: operator.mul,
    aten.subtract.Tensor: operator.sub,
    aten.subtract.Scalar: operator.sub,
    aten.floor_divide.default: operator.floordiv,
    aten.remainder.Tensor: operator.mod,
    aten.remainder.Scalar: operator.mod,
    aten.pow.Tensor_Scalar: operator.pow,
    aten.pow.Tensor_Tensor: operator.pow,
    aten.neg.default: operator.neg,
    aten.eq.Tensor: operator.eq,
    aten.eq.Scalar: operator.eq,
    aten.ne.Tensor: operator.ne,
    aten.ne.Scalar: operator.ne,
    aten.lt.Tensor: operator.lt,
    aten.lt.Scalar: operator.lt,
    aten.le.Tensor: operator.le,
    aten.le.Scalar: operator.le,
    aten.gt.Tensor: operator.gt,
    aten.gt.Scalar: operator.gt,
    aten.ge.Tensor: operator.ge,
    aten.ge.Scalar: operator.ge,
    aten.__and__.Tensor: operator.and_,
    aten.__or__.Tensor: operator.or_,
    aten.__xor__.Tensor: operator.xor,
}

#: overloads whose function in `torch` is the same operation with the same arguments
_TORCH = """
abs.default acos.default addmm.default all.default all.dim amax.default amin.default any.default any.dim
arange.default arange.start arange.start_step argmax.default argmin.default argsort.default atan2.default
baddbmm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bmm.default bucketize.Tensor cat.default
ceil.default chunk.default clamp.default clamp.Tensor clamp_max.default clamp_min.default clone.default
complex.default conj.default cos.default cosh.default cummax.default cumprod.default cumsum.default detach.default
diag_embed.default diagonal.default diff.default div.Tensor_mode div.Scalar_mode dot.default empty_like.default
erf.default exp.default expm1.default eye.default flatten.using_ints flip.default floor.default full.default
full_like.default gather.default hann_window.default hypot.default index_select.default isfinite.default
isinf.default isnan.default linspace.default log.default log10.default log1p.default log2.default
logical_and.default logical_not.default logical_or.default logical_xor.default logsumexp.default
masked_fill.Scalar masked_fill.Tensor masked_select.default matmul.default max.default max.dim maximum.default
mean.default mean.dim min.default min.dim minimum.default mm.default movedim.int multinomial.default mv.default
nan_to_num.default narrow.default nonzero.default ones.default ones_like.default outer.default
permute.default polar.default pow.Scalar prod.default prod.dim_int rand.default rand_like.default
randn.default randn_like.default real.default reciprocal.default relu.default repeat_interleave.self_int
repeat_interleave.self_Tensor reshape.default roll.default round.default rsqrt.default scatter.src scatter.value
scatter_add.default searchsorted.Tensor sigmoid.default sign.default sin.default sinh.default sort.default
sqrt.default square.default squeeze.default squeeze.dim squeeze.dims stack.default std.correction std.dim sum.default
sum.dim_IntList swapaxes.default swapdims.default t.default take_along_dim.default tan.default tanh.default
tile.default topk.default transpose.int tril.default triu.default trunc.default unbind.int unflatten.int
unsqueeze.default var.correction var.dim var_mean.correction view_as_complex.default view_as_real.default
where.self where.ScalarOther where.ScalarSelf where.Scalar zeros.default zeros_like.default
"""

#: overloads whose function in `torch.nn.functional` is the same operation with the same arguments
_FUNCTIONAL = """
adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default avg_pool1d.default
avg_pool2d.default avg_pool3d.default celu.default conv1d.default conv2d.default conv3d.default
conv_transpose1d.default cosine_similarity.default dropout.default gelu.default glu.default hardshrink.default
hardsigmoid.default hardswish.default hardtanh.default leaky_relu.default linear.default log_sigmoid.default
max_pool1d.default max_pool2d.default max_pool3d.default mish.default one_hot.default pad.default
pairwise_distance.default pixel_shuffle.default pixel_unshuffle.default prelu.default relu6.default rms_norm.default
scaled_dot_product_attention.default selu.default silu.default softplus.default softshrink.default threshold.default
"""

#: overloads that are methods of a tensor, with the same arguments
_METHODS = """
contiguous.default expand.default expand_as.default new_empty.default new_full.default new_ones.default
new_zeros.default repeat.default type_as.default unfold.default view.default view_as.default
"""


def _overload(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet, None), overload, None)


def _table(names: str, home: Any) -> dict[Any, Any]:
    """By overload; what a version of torch has not under this name is left out, and stays ATen."""
    found = {}
    for name in names.split():
        packet = name.split(".")[0]
        function = getattr(home, {"log_sigmoid": "logsigmoid"}.get(packet, packet), None)
        if _overload(name) is not None and function is not None:
            found[_overload(name)] = function
    return found


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **_table(_TORCH, torch),
    **_table(_FUNCTIONAL, F),
    aten.conv_transpose2d.input: F.conv_transpose2d,
    aten.conv_transpose3d.input: F.conv_transpose3d,
    aten.conv1d.padding: F.conv1d,
    aten.conv2d.padding: F.conv2d,
    aten.conv3d.padding: F.conv3d,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
    aten.split.sizes: torch.split,
}
METHODS: dict[Any, str] = {overload: name for name in _METHODS.split() for overload in [_overload(name)] if overload}
METHODS = {overload: name.split(".")[0] for overload, name in METHODS.items()}
