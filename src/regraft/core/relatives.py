"""Modules that are nearly one of `torch.nn`'s: parametrized, lazy, of a class of the user's own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from regraft.core.operation import Operation
from regraft.core.vocabulary import OPERATIONS, Call, attribute

_EXACT: dict[type[nn.Module], Operation] = {m: operation for operation in OPERATIONS for m in operation.modules}
_RELATIVES = {**_EXACT, **{m: operation for operation in OPERATIONS for m in operation.relatives}}


def relative(node: Any, owner: GraphModule) -> Call | None:
    """A call of a module that is no known operation and derives from one that is: parametrized, lazy, with a `forward`
    of its own. Nothing is known of what it computes, so this is for refusals, and none of its attributes is asked for.
    """
    if not isinstance(node, Node) or node.op != "call_module" or not node.all_input_nodes:
        return None
    module = attribute(owner, str(node.target))
    if type(module) in _EXACT:
        return None
    operation = next((_RELATIVES[kind] for kind in type(module).__mro__ if kind in _RELATIVES), None)
    if operation is None:
        return None
    return Call(node, operation, {"input": node.all_input_nodes[0]}, owner, str(node.target), module)
