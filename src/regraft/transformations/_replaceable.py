"""Which calls an entry of a mapping of activations stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from regraft.core.pattern import Match, Pattern
from regraft.core.plainness import unlike
from regraft.core.vocabulary import OPERATIONS, Call, Operation, attribute, read

Activation = type[nn.Module] | nn.Module | Callable[..., Any]
_NOT_COMPUTED = {"input", "inplace", "training"}


class Replaceable(Pattern):
    """Every call of one of some activations: as a module, as a function, as a method."""

    def __init__(self, activations: tuple[Activation, ...]) -> None:
        self.activations = activations

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        yield from ((node,) for node in owner.graph.nodes if self.match(owner, (node,)) is not None)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        if self.which(nodes[0], owner) is not None:
            return Match(owner, (), nodes)
        reason = self._unlike(nodes[0], owner)
        return Match(owner, (), nodes, reason) if reason is not None else None

    def _unlike(self, node: Node, owner: GraphModule) -> str | None:
        """Why a module whose class derives from a wanted one is not taken for it."""
        module = attribute(owner, str(node.target)) if node.op == "call_module" else None
        classes = [kind for kind in self.activations if isinstance(kind, type) and type(module) is not kind]
        wanted = next((kind for kind in classes if isinstance(module, kind)), None)
        return unlike(str(node.target), module, (wanted,)) if module is not None and wanted is not None else None

    def which(self, node: Node, owner: GraphModule) -> Activation | None:
        """The activation that `node` calls; None where it calls none of them."""
        if node.op not in ("call_module", "call_function", "call_method"):
            return None
        return next((wanted for wanted in self.activations if _calls(node, wanted, owner)), None)


def expect_activations(mapping: object) -> None:
    """Refuse what is no mapping of activations.

    Args:
        mapping: What was given.

    Raises:
        TypeError: It is something else, something else is in it, or a class that needs arguments is to be made.
    """
    call = "ReplaceActivation({torch.nn.GELU: torch.nn.ReLU})"
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping={mapping!r}, but takes a dictionary of what to replace, by what: {call}")
    for given in (*mapping, *mapping.values()):
        if not callable(given) or (isinstance(given, type) and not issubclass(given, nn.Module)):
            raise TypeError(f"mapping has {given!r}, but takes modules, their classes, and functions: {call}")
    for given in mapping.values():
        if isinstance(given, type) and not _has_defaults(given):
            call = f"ReplaceActivation({{...: {given.__name__}(...)}})"
            raise TypeError(f"mapping has the class {given.__name__}, which needs arguments: {call}")


def _has_defaults(kind: type) -> bool:
    try:
        inspect.signature(kind).bind()
    except TypeError:
        return False
    return True


def _calls(node: Node, wanted: Activation, owner: GraphModule) -> bool:
    call = read(node, owner)
    operation = _operation_of(wanted)
    if operation is not None:
        return call is not None and call.operation is operation and _same_settings(call, wanted)
    module = attribute(owner, str(node.target)) if node.op == "call_module" else None
    if isinstance(wanted, type):
        return type(module) is wanted
    if isinstance(wanted, nn.Module):
        return type(module) is type(wanted) and module.extra_repr() == wanted.extra_repr()
    return node.target is wanted


def _operation_of(activation: Activation) -> Operation | None:
    """The operation that is another spelling of the activation, where it has one."""
    kind = activation if isinstance(activation, type) or not isinstance(activation, nn.Module) else type(activation)
    return next((o for o in OPERATIONS if kind in o.modules or kind in o.functions), None)


def _same_settings(call: Call, wanted: Activation) -> bool:
    """A class or a function stands for its default settings, a module for its own."""
    for name in call.operation.names:
        if name in _NOT_COMPUTED:
            continue
        default = call.operation.defaults.get(name)
        if call[name] != (getattr(wanted, name, default) if isinstance(wanted, nn.Module) else default):
            return False
    return True


def input_of(node: Node) -> Any:
    """The value that an activation works on."""
    values = (*node.args, *node.kwargs.values())
    return values[0] if values else None
