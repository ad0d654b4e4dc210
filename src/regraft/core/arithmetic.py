"""Arithmetic on the nodes of a graph, while a user's own transformation runs: `2 * node` is a new node.

This is what the documents of `optimum.fx` promise (`node.args = (2 * x, y)`) and `torch.fx.Node` does not do.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import Node

_BINARY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
_BINARY |= {"floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "matmul": operator.matmul}
_UNARY = {"neg": operator.neg, "pos": operator.pos, "abs": operator.abs}

_lock = threading.Lock()
_depth = 0


@contextmanager
def node_arithmetic() -> Iterator[None]:
    """Within it, `+ - * / // % ** @` and the signs work on nodes, and make nodes."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            for name, method in _METHODS.items():
                setattr(Node, name, method)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name in _METHODS:
                    delattr(Node, name)


def _new(function: Callable[..., Any], *operands: Any) -> Node:
    """The node is placed behind the last of its operands, where all of them are known."""
    nodes = [operand for operand in operands if isinstance(operand, Node)]
    last = max(nodes)
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with last.graph.inserting_after(last):
        node = last.graph.call_function(function, operands)
    if all("val" in operand.meta for operand in nodes):
        node.meta["val"] = function(*(o.meta["val"] if isinstance(o, Node) else o for o in operands))
    return node


def _methods() -> dict[str, Callable[..., Node]]:
    methods: dict[str, Callable[..., Node]] = {}
    for name, function in _BINARY.items():
        methods[f"__{name}__"] = lambda self, other, function=function: _new(function, self, other)
        methods[f"__r{name}__"] = lambda self, other, function=function: _new(function, other, self)
    for name, sign in _UNARY.items():
        methods[f"__{name}__"] = lambda self, sign=sign: _new(sign, self)
    return methods


_METHODS = _methods()
