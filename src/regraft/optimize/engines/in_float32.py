"""A graph in half precision as one in float32, for a processor that has no instructions for halves."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from regraft.core.fx_private import rewrite_node
from regraft.core.vocabulary import attribute
from regraft.transformations import _mkldnn as mkldnn

_HALVES = (torch.bfloat16, torch.float16)
_METHODS = {"bfloat16": "float", "half": "float"}


def pays_in_float32(module: nn.Module, sample: Iterable[Tensor]) -> bool:
    """Whether some of the weights or inputs are in a half precision that this processor has no instructions for.

    Args:
        module: The graph.
        sample: Its inputs.
    """
    tensors = chain(sample, module.parameters(), module.buffers())
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_cpu}  # other devices have instructions of their own
    return any(mkldnn.computed_in(mkldnn.LINEAR, dtype) == torch.float32 for dtype in dtypes.intersection(_HALVES))


def in_float32(module: GraphModule) -> GraphModule:
    """A copy of a graph that computes in float32 what the graph computes in half precision, without its roundings.

    Args:
        module: The graph, which is not changed; what is not in half precision is shared with it.
    """
    read = (attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr"))
    constants = (value for value in read if isinstance(value, Tensor))
    # a copy of a module copies what it holds, but for what is known already
    weights = {id(one): one for one in chain(module.parameters(), module.buffers(), constants)}
    copied = copy.deepcopy(module, {key: _wide_weight(one) for key, one in weights.items()})
    for node in copied.graph.nodes:
        args, kwargs = pytree.tree_map(_wide_type, (node.args, node.kwargs))
        target = _METHODS.get(node.target, node.target) if node.op == "call_method" else node.target
        rewrite_node(node, node.op, target, args, kwargs)
    copied.recompile()
    return copied


def wide(tensor: Tensor) -> Tensor:
    """A tensor, in float32 if it is in half precision.

    Args:
        tensor: The tensor.
    """
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _wide_weight(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _HALVES:
        return tensor
    value = tensor.detach().float()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _wide_type(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value
