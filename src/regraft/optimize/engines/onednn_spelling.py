"""Calls that oneDNN Graph cannot compile, or takes for others, in a spelling that it computes rightly."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from regraft.core.values import JOINING, called_name
from regraft.core.vocabulary import ATTENTION, CONV, GELU, MATMUL, RELU, Call
from regraft.optimize.engines.onednn_convolutions import convolution
from regraft.optimize.engines.onednn_layouts import anew, dense, lies_oddly, order
from regraft.optimize.engines.onednn_norms import NORMS, rectified
from regraft.optimize.engines.onednn_products import product
from regraft.optimize.engines.onednn_single import TYPES, Env, Spelling, from_env, of_single_pixels

_POOLING = {"max_pool2d", "avg_pool2d"}
_CLAMPING = {"clamp", "clip"}
_EXTREMES: dict[str, Any] = {"max": torch.amax, "min": torch.amin}
_KEEPING = {"eq", "ne", *(name + end for name in ("masked_fill", "scatter", "index_fill") for end in ("", "_"))}
_COMBINING = {"and_", "or_", "xor", "where"}


def respelled(node: Node, name: str, call: Call | None, result: Tensor, env: Env, steady: Env) -> Spelling | None:
    """Another spelling of a call, from the values of the nodes; None where it can stay as it is.

    Args:
        node: The call.
        name: The name of the function, method or layer.
        call: What is known of it.
        result: Its result in the sample.
        env: The values of the nodes there.
        steady: Those that are the same in each call.
    """
    if call is not None and call.operation is GELU and call["approximate"] == "tanh":
        return partial(_gelu_by_tanh, call.input)
    if call is not None and call.operation in NORMS:
        return NORMS[call.operation](call, env)
    if call is not None and call.operation is RELU:
        return rectified(call, env)
    if call is not None and call.operation is ATTENTION:
        return _masked_by_numbers(call, env)
    if call is not None and call.operation is MATMUL:
        return product(call, env)
    single = of_single_pixels(node, name, call, result, env)
    if single is not None:
        return single
    if call is not None and call.operation is CONV:
        return convolution(call, env)
    if name == "addmm":
        return _as_linear(node, steady)
    if name == "linalg_vector_norm":
        return _length(node, env)
    if name in JOINING:
        return _joined(node, env, result.dtype)
    if name in _POOLING:
        return _with_its_step(node)
    if name in _CLAMPING:
        return _clamped(node, env)
    nowhere = _filled_nowhere(node, result, env, steady) if name == "masked_fill" else None
    return nowhere or _without_booleans(node, name)


def _gelu_by_tanh(given: Node, env: Env) -> Tensor:
    """`x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    It is taken for the exact one, which is off by up to 5e-4. In float32, as torch computes it. `1 + tanh(z)` is
    `2 sigmoid(2 z)`, and in this order one kernel computes all of it; of a single element it would end the process, for
    then the number that is added is of the square's size. A part of a merged layer's result becomes dense, as for any
    other arithmetic.
    """
    x: Tensor = env[given]
    x = dense(x, x.shape, order(x)) if lies_oddly(x) else x
    y, factor = x.float(), 2 * math.sqrt(2 / math.pi)
    square = y * y if x.numel() > 1 else anew(y * y)
    return (y * torch.sigmoid(y * (square * (0.044715 * factor) + factor))).to(x.dtype)


def _masked_by_numbers(call: Call, env: Env) -> Spelling | None:
    """Attention whose mask is made numbers here, once for all layers that share it, as torch does for each of them."""
    node, mask = call.node, call["attn_mask"]
    if not isinstance(mask, Node) or getattr(env[mask], "dtype", None) != torch.bool:
        return None
    function: Any = node.target

    def compute(env: Env) -> Tensor:
        added = torch.where(env[mask], 0.0, -math.inf)
        if env[call.input].dtype == torch.float64:  # torch's fused call reads a mask in float32 wrongly beside it
            added = added.double()
        args, kwargs = map_arg((node.args, node.kwargs), lambda other: added if other is mask else env[other])
        result: Tensor = function(*args, **kwargs)
        return result

    return compute


def _as_linear(node: Node, steady: Env) -> Spelling | None:
    """A product and a sum as a linear layer: a constant that is added to a product cannot be compiled."""
    if node.kwargs or len(node.args) != 3:
        return None
    bias, given, weight = (value for value in node.args if isinstance(value, Node))
    if bias not in steady or weight not in steady or steady[bias].ndim != 1:
        return None
    return lambda env: F.linear(env[given], steady[weight].t().contiguous(), steady[bias])


def _length(node: Node, env: Env) -> Spelling | None:
    """The root of a sum of squares: where an element and the next are not side by side torch's call is slow.

    And its sum is less exact there.
    """
    call: dict[str, Any] = {**dict(zip(("x", "ord", "dim", "keepdim"), node.args)), **node.kwargs}
    given, axes, keeps = node.all_input_nodes[0], call.get("dim"), bool(call.get("keepdim"))
    axes = (axes,) if isinstance(axes, int) else tuple(axes or ())
    dtype, ndim = env[given].dtype, env[given].ndim
    if call.get("ord", 2) != 2 or call.get("dtype") is not None or dtype not in TYPES:
        return None
    if not axes or not ndim or any(isinstance(axis, Node) or axis % ndim == order(env[given])[-1] for axis in axes):
        return None

    def compute(env: Env) -> Tensor:
        value: Tensor = env[given]
        return value.float().square().sum(axes, keeps).sqrt().to(dtype)

    return compute


def _joined(node: Node, env: Env, dtype: torch.dtype) -> Spelling | None:
    """Tensors joined without those that have no elements, and some by a function that it does not know.

    Those of other types it would try to compile, and cannot. To join the rows of heads, as of a cache and a new token,
    its kernel takes several times as long as torch.
    """
    nodes: Any = node.args[0] if node.args else None
    axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    if not isinstance(nodes, (list, tuple)) or not isinstance(axis, int):
        return None
    full = [each for each in nodes if env[each].numel()]
    if dtype not in TYPES and full:
        second = min(1, env[full[0]].ndim - 1)  # `hstack` joins along the second axis, or the only one

        def compute(env: Env) -> Tensor:
            parts = [env[each].to(dtype).movedim(axis, second) for each in full]
            return torch.hstack(parts).movedim(second, axis).contiguous()

        return compute
    ndim = env[full[0]].ndim if full else 0
    if ndim == 4 and axis % ndim == 2:
        return lambda env: torch.dstack([env[each].to(dtype) for each in full])
    if not full or len(full) == len(nodes):
        return None
    return lambda env: torch.cat([env[each].to(dtype) for each in full], axis)


def _with_its_step(node: Node) -> Spelling | None:
    """A pooling with its stride, which is the size of its window where none is given."""
    args, kwargs = list(node.args), dict(node.kwargs)
    given = args[2] if len(args) > 2 else kwargs.get("stride")
    if isinstance(given, Node) or given:
        return None
    window = args[1] if len(args) > 1 else kwargs["kernel_size"]
    if len(args) > 2:
        args[2] = window
    else:
        kwargs["stride"] = window
    function: Any = node.target

    def compute(env: Env) -> Tensor:
        values: Any = map_arg((args, kwargs), env.__getitem__)
        result: Tensor = function(*values[0], **values[1])
        return result

    return compute


def _clamped(node: Node, env: Env) -> Spelling | None:
    """What is clamped between tensors, of which it takes each for a number."""
    given, *bounds = (*node.args, *[None] * 3)[:3]
    bounds = [node.kwargs.get(name, bound) for name, bound in zip(("min", "max"), bounds)]
    if not isinstance(given, Node) or not any(isinstance(from_env(bound, env), Tensor) for bound in bounds):
        return None

    def compute(env: Env) -> Tensor:
        result: Tensor = env[given]
        for bound, limit in zip(bounds, (torch.maximum, torch.minimum)):
            result = result if bound is None else limit(result, from_env(bound, env))
        return result

    return compute


def _filled_nowhere(node: Node, result: Tensor, env: Env, steady: Env) -> Spelling | None:
    """What is filled in no place, whatever the inputs are: as attention is, of whose constant mask no row hides all."""
    given, mask = (*node.args, None)[:2]
    if not isinstance(given, Node) or not isinstance(mask, Node) or mask not in steady or bool(steady[mask].any()):
        return None
    size: Any = env[given].shape
    return (lambda env: env[given]) if size == result.shape else None


def _without_booleans(node: Node, name: str) -> Spelling | None:
    """A call that is given True or False as a number: among numbers TorchScript has no form for them.

    Where the type of the result does not depend on it, a whole number has; elsewhere a tensor.
    """
    if name not in _KEEPING | _COMBINING:
        return None
    instead: Any = int if name in _KEEPING else torch.tensor
    args = [instead(value) if type(value) is bool else value for value in node.args]
    kwargs = {name: instead(value) if type(value) is bool else value for name, value in node.kwargs.items()}
    if all(map(operator.is_, (*args, *kwargs.values()), (*node.args, *node.kwargs.values()))):
        return None
    target: Any = node.target

    def compute(env: Env) -> Tensor:
        (first, *others), named = map_arg((args, kwargs), env.__getitem__)
        function = getattr(first, target) if node.op == "call_method" else partial(target, first)
        result: Tensor = function(*others, **named)
        return result

    return compute


def without_places(node: Node) -> Callable[[Env], tuple[Tensor, None]] | None:
    """The largest or smallest elements along an axis, where nobody reads their places: torch finds those one by one.

    Args:
        node: A call.
    """
    extreme = _EXTREMES.get(called_name(node))
    call: dict[str, Any] = {**dict(zip(("input", "dim", "keepdim"), node.args)), **node.kwargs}
    axis, keeps, given = call.get("dim"), call.get("keepdim", False), call.get("input")
    if extreme is None or not isinstance(given, Node) or not isinstance(axis, int) or not isinstance(keeps, bool):
        return None
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return None
    return lambda env: (extreme(env[given], axis, keeps), None)
