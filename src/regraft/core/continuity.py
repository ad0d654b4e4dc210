"""Where a last bit can make a whole step: functions that are not continuous, and those of which nothing is known."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from regraft.core.values import called_name, reads_shape_only, tensors_in
from regraft.core.vocabulary import attribute

_NAMES = """
floor ceil round trunc fix frac floordiv floor_divide remainder mod fmod divmod
sign sgn signbit heaviside hardshrink threshold copysign angle atan2 arctan2 histc histogram histogramdd
eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isclose allclose isin contains
logical_not logical_and logical_or logical_xor any all not truth and or xor
bincount bucketize searchsorted digitize argmax argmin argsort argwhere nonzero count_nonzero is_nonzero
unique unique2 unique_consecutive unique_dim mode gumbel_softmax bernoulli multinomial poisson binomial
matrix_rank linalg_matrix_rank arange range int long short byte char bool sym_int
fake_quantize_per_tensor_affine fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant
quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel
acos arccos asin arcsin acosh arccosh atanh arctanh erfinv logit ndtri
"""
_STEPS = frozenset(_NAMES.split())
"""Torch's functions that make steps: those of floating-point results; for graphs without fake values those of whole
numbers, too; and those that have an edge beyond which is no number, for a quotient may lie there: x / c is 1 where x is
c. Every other function of torch is continuous."""
_RANKING = {"sort", "msort", "topk", "kthvalue", "median", "nanmedian", "cummax", "cummin", "max", "min"}
_RANKING |= {"max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"}
_RANKING |= {"adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d"}
_SAMPLING = {"grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"}
_STEPPING_MODULES = (nn.Hardshrink, nn.Threshold)
_HOMES = ("torch", "_operator", "builtins", "math", "regraft")


def rounds(node: Node, owner: GraphModule) -> bool:
    """Whether a last bit of an argument of `node` can make a step in its result, as far as is known of what it calls.

    Args:
        node: Any node.
        owner: The graph module that it is in.
    """
    if node.op == "call_module":
        return _module_rounds(attribute(owner, str(node.target)))
    if node.op not in ("call_function", "call_method") or reads_shape_only(node):
        return False
    name = called_name(node).removeprefix("special_").strip("_")
    return (
        name in _STEPS
        or _gives_whole_numbers(node)
        or (name in _RANKING and _takes_places(node))
        or (name in _SAMPLING and (*node.args[2:3], node.kwargs.get("mode", 0))[0] not in ("bilinear", 0))
        or node.kwargs.get("rounding_mode") is not None
        or not is_torchs(node)
    )


def is_torchs(node: Node) -> bool:
    """Whether what `node` calls is a function of torch or of Python, of which it is known whether it makes steps."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return True
    if node.op == "call_method":
        return hasattr(Tensor, str(target))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    home = getattr(target, "__module__", None)
    return home is None or home.partition(".")[0] in _HOMES


def _module_rounds(module: Any) -> bool:
    if isinstance(module, GraphModule):
        return any(rounds(node, module) for node in module.graph.nodes)
    pure = getattr(module, "regraft_pure", False) is True  # one of regraft's own, which says so itself
    known = pure or type(module).__module__.startswith("torch.nn.modules")
    return not known or isinstance(module, _STEPPING_MODULES) or bool(getattr(module, "return_indices", False))


def _gives_whole_numbers(node: Node) -> bool:
    """Whether the result has another kind of numbers than the arguments, by what capture knows or the call says."""
    made = [_whole(tensor.dtype) for tensor in tensors_in(node.meta.get("val"))]
    given = [tensor for value in node.all_input_nodes for tensor in tensors_in(value.meta.get("val"))]
    if any(made) and any(not _whole(tensor.dtype) for tensor in given):
        return all(made) or _takes_places(node)
    named = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.dtype)]
    return any(_whole(dtype) for dtype in named) or (node.target == "type" and isinstance(node.args[-1], str))


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _takes_places(node: Node) -> bool:
    """Whether of a pair of values and their places the places are taken; what is no pair has no such readers."""
    return any(
        (user.target is operator.getitem and user.args[1] == 1)
        or (user.target is getattr and user.args[1] == "indices")
        or (user.op == "output" and isinstance(node.meta.get("val"), (tuple, list)))
        for user in node.users
    )
