"""All that must not differ between two states of a module, as data that compares with `==`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from regraft.core.states import MARKS

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def picture(module: nn.Module, objects: bool = True) -> dict[str, Any]:
    """The state of a module: weights bit for bit, their names, order, ties, layouts and flags, hooks, graphs, code.

    Args:
        module: Any module; of graph modules in it the nodes, their order, arguments, users and marks count too.
        objects: Whether parameters and layers must be the same objects. False for a copy, or what was loaded from disk;
            strides with gaps then count as those that torch's own copy has.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1)
        >>> picture(layer) == picture(layer), picture(layer) == picture(torch.nn.Linear(1, 1))
        (True, False)
    """
    numbers: dict[int, int] = {}

    def identity(value: Any) -> int:
        """The object; or, for a copy, how many others have been met before it: enough to see ties."""
        return id(value) if objects else numbers.setdefault(id(value), len(numbers))

    shown: dict[str, Any] = {"state_dict": {name: bits(value, objects) for name, value in module.state_dict().items()}}
    shown["the order of the state_dict"] = list(shown["state_dict"])
    for kind in (module.named_parameters, module.named_buffers):
        tensors = kind(remove_duplicate=False)
        shown[kind.__name__] = [
            (name, identity(t), bits(t, objects), str(t.device), t.requires_grad) for name, t in tensors
        ]
    modules = list(module.named_modules(remove_duplicate=False))
    shown["modules"] = [(name, type(m).__name__, m.training) for name, m in modules]
    shown["layers"] = [(name, identity(m)) for name, m in modules if not _own(m)]
    shown["hooks"] = [(name, hook) for name, m in modules for kind in _HOOKS for hook in _functions(m, kind)]
    for path, owner in modules:
        if isinstance(owner, GraphModule):
            where = f"the graph of {path}" if path else "the graph"
            shown[where] = [_node(node) for node in owner.graph.nodes]
            if objects:  # what cannot be saved is missing from the meta of what was loaded
                meta = [(node.name, sorted(key for key in node.meta if key != MARKS)) for node in owner.graph.nodes]
                shown[f"the meta of {where}"] = meta
            shown[f"the code of {where}"] = owner.code
            shown[f"what runs of {where}"] = type(owner).forward.__code__.co_code
    return shown


def assert_same_picture(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    """Both pictures are alike.

    Args:
        before: A picture.
        after: A later one.
        what: What was done in between, for the message.

    Raises:
        AssertionError: naming the first part that differs, and how.
    """
    for part in [*before, *(part for part in after if part not in before)]:
        left, right = before.get(part), after.get(part)
        if left == right:
            continue
        if isinstance(left, list) and isinstance(right, list):
            gone = [item for item in left if item not in right]
            come = [item for item in right if item not in left]
            left, right = (gone, come) if gone or come else (left, right)
        raise AssertionError(f"{what}: {part} differs\n  before: {left}\n  after:  {right}")


def bits(tensor: Any, exact: bool = True) -> Any:
    """The shape, dtype, layout and bytes of a tensor; anything else as it is. Not `exact`: the strides of a copy."""
    if not isinstance(tensor, Tensor):
        return tensor
    strided = tensor.layout is torch.strided
    laid_out = tensor if exact or not strided else torch.empty_like(tensor, device="meta")
    head = (tuple(tensor.shape), str(tensor.dtype), laid_out.stride() if strided else str(tensor.layout))
    if tensor.is_meta or not strided or not tensor.numel():
        return head
    return *head, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _own(module: nn.Module) -> bool:
    """A graph module, or a bare container in one: every capture and every shallow copy makes its own."""
    return type(module) is nn.Module or isinstance(module, GraphModule)


def _functions(module: nn.Module, kind: str) -> list[str]:
    return [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in getattr(module, kind).values()]


def _node(node: torch.fx.Node) -> tuple[Any, ...]:
    marks = sorted(node.meta.get(MARKS, ()))
    users = sorted(user.name for user in node.users)
    return node.name, node.op, str(node.target), str(node.args), str(node.kwargs), str(node.type), users, marks
