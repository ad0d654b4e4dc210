"""The spellings of one operation: operator, torch, functional, Tensor method, module, ATen.

A rule asks for `LINEAR` or `DIVIDE`; which of the many ways a graph can say so is decided here and nowhere else.
`read(node, owner)` turns a node into a `Call`: the operation, and its arguments under their own names.

To teach regraft a new spelling, add it to the operation in `operations.py` or `functions.py`; to add an operation,
write one more `Operation(...)` there and name it in the imports here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from regraft.core.functions import (
    ADDMM,
    ADJOINT,
    ATTENTION,
    CAST,
    EMBEDDING,
    ERF,
    EXPAND,
    GELU,
    HARDSIGMOID,
    HARDSWISH,
    HARDTANH,
    INSTANCE_NORM,
    LAYER_NORM,
    LEAKY_RELU,
    MASKED_FILL,
    MATMUL,
    MATRIX_TRANSPOSE,
    MEAN,
    NEGATE,
    PERMUTE,
    POWER,
    PRODUCT_AND_SUM,
    RELU,
    RELU6,
    REPEAT,
    RMS_NORM,
    RSQRT,
    SIGMOID,
    SILU,
    SOFTMAX,
    SQRT,
    SQUARE,
    TANH,
    TRANSPOSE,
    UNSQUEEZE,
    VARIANCE,
    WHERE,
)
from regraft.core.operation import Operation
from regraft.core.operations import (
    ADD,
    ADD_IN_PLACE,
    BATCH_NORM,
    CONV,
    DIVIDE,
    DROPOUT,
    FLATTEN,
    IDENTITY,
    INDEX,
    LINEAR,
    MULTIPLY,
    PAD,
    RESHAPE,
    SUBTRACT,
    TRANSPOSED_CONV,
)

__all__ = [
    "ADD",
    "ADDMM",
    "ADD_IN_PLACE",
    "ADJOINT",
    "ATTENTION",
    "BATCH_NORM",
    "CAST",
    "CONV",
    "DIVIDE",
    "DROPOUT",
    "EMBEDDING",
    "ERF",
    "EXPAND",
    "FLATTEN",
    "GELU",
    "HARDSIGMOID",
    "HARDSWISH",
    "HARDTANH",
    "IDENTITY",
    "INSTANCE_NORM",
    "INDEX",
    "LAYER_NORM",
    "LEAKY_RELU",
    "LINEAR",
    "MASKED_FILL",
    "MATMUL",
    "MATRIX_TRANSPOSE",
    "MEAN",
    "MULTIPLY",
    "NEGATE",
    "PAD",
    "PERMUTE",
    "POWER",
    "PRODUCT_AND_SUM",
    "RELU",
    "RELU6",
    "REPEAT",
    "RESHAPE",
    "RMS_NORM",
    "RSQRT",
    "SIGMOID",
    "SILU",
    "SOFTMAX",
    "SQRT",
    "SQUARE",
    "SUBTRACT",
    "TANH",
    "TRANSPOSE",
    "TRANSPOSED_CONV",
    "UNSQUEEZE",
    "VARIANCE",
    "WHERE",
    "OPERATIONS",
    "Call",
    "Operation",
    "Weight",
    "attribute",
    "location",
    "operation_of",
    "read",
]


@dataclass(eq=False, slots=True)  # not frozen, which would triple the time that one takes to make
class Weight:
    """A tensor that belongs to the graph module: `name` is its qualified name, `node` the `get_attr` that reads it.

    `node` is None where a module call reads it itself. Never changed.
    """

    name: str
    tensor: torch.Tensor
    node: Node | None


@dataclass(eq=False, slots=True)  # not frozen, as `Weight`
class Call:
    """A node, read as an operation with named arguments.

    `where` is the qualified name of the module that it calls, or the place of a function call, when it was read.
    Never changed.
    """

    node: Node
    operation: Operation
    arguments: Mapping[str, Any]
    owner: GraphModule
    where: str
    module: nn.Module | None = None
    _weights: dict[str, Weight | None] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name] if name in self.arguments else self.operation.default(name)

    @property
    def input(self) -> Node:
        """The first argument: the value the operation works on."""
        value = self.arguments["input"]
        assert isinstance(value, Node)
        return value

    def weight(self, name: str) -> Weight | None:
        """The parameter or buffer given as argument `name`, or None where it is absent or computed by the graph."""
        if name not in self._weights:
            self._weights[name] = self._find_weight(name)
        return self._weights[name]

    def _find_weight(self, name: str) -> Weight | None:
        value = self[name]
        if isinstance(value, torch.Tensor) and self.module is not None:
            return Weight(f"{self.where}.{name}", value, None)
        if isinstance(value, Node) and value.op == "get_attr":
            tensor = attribute(self.owner, str(value.target))
            return Weight(str(value.target), tensor, value) if isinstance(tensor, torch.Tensor) else None
        return None

    def computed(self, name: str) -> bool:
        """Whether argument `name` is a value that the graph computes, rather than a weight or a constant."""
        return isinstance(self[name], Node) and self.weight(name) is None


_TABLES = ("_modules", "_parameters", "_buffers")
_NO_TABLES: dict[str, Any] = {}


def attribute(owner: nn.Module, target: str) -> Any:
    """The object at a dotted path below `owner`, or None."""
    value: Any = owner
    for part in target.split("."):
        tables: dict[str, Any] = value.__dict__ if isinstance(value, nn.Module) else _NO_TABLES
        for table in _TABLES:  # torch's own way there is several times slower
            if part in tables.get(table, ()):
                value = tables[table][part]
                break
        else:
            value = getattr(value, part, None)
    return value


def location(node: Node) -> str:
    """Where in the model's source tree a node comes from: its innermost module's name, else its own."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        path = str(next(reversed(stack.values()))[0])
        if path:
            return f"{path.removeprefix('L__self__.')}.{node.name}"
    return node.name


_ALIASES = {"x": "input", "self": "input", "size": "shape", "train": "training"}

OPERATIONS: tuple[Operation, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Operation))
_FUNCTIONS: dict[Any, Operation] = {f: operation for operation in OPERATIONS for f in operation.functions}
_METHODS: dict[str, Operation] = {m: operation for operation in OPERATIONS for m in operation.methods}
_MODULES: dict[type[nn.Module], Operation] = {m: operation for operation in OPERATIONS for m in operation.modules}


def operation_of(node: Node, owner: GraphModule) -> Operation | None:
    """The operation as which `read` would read `node`, if it is not miswritten."""
    if node.op == "call_module":
        return _MODULES.get(type(attribute(owner, str(node.target))))
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def read(node: Any, owner: GraphModule) -> Call | None:
    """Read `node` as a known operation, arguments under their own names; None where it is none, or is miswritten.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
        >>> call = read(list(gm.graph.nodes)[1], gm)
        >>> call.operation, call.where, tuple(call["weight"].shape)
        (linear, '0', (3, 2))
    """
    if not isinstance(node, Node):
        return None
    if node.op == "call_module":
        return _read_module(node, owner)
    table: Mapping[Any, Operation] = _METHODS if node.op == "call_method" else _FUNCTIONS
    operation = table.get(node.target) if node.op in ("call_function", "call_method") else None
    if operation is None:
        return None
    order = operation.orders.get(node.target) if operation.orders and callable(node.target) else None
    arguments = _bind(tuple(order.split()) if order else operation.names, node.args, node.kwargs)
    return Call(node, operation, arguments, owner, location(node)) if arguments is not None else None


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Positional and keyword arguments under one set of names; None where they are not this operation's."""
    if len(args) > len(names):
        if names[1:] != ("shape",):
            return None
        args = (args[0], args[1:])  # a Tensor method may take its sizes unpacked
    bound = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        bound[name if name in names else _ALIASES.get(name, name)] = value
    return bound if "input" in bound and ("other" in names or isinstance(bound["input"], Node)) else None


def _read_module(node: Node, owner: GraphModule) -> Call | None:
    """A module call: its one input, and the module's own attributes as the other arguments."""
    module = attribute(owner, str(node.target))
    operation = _MODULES.get(type(module))
    inputs = (*node.args, *node.kwargs.values())
    if operation is None or len(inputs) != 1 or not isinstance(inputs[0], Node):
        return None
    arguments = {"input": inputs[0]}
    settings = module.__dict__
    for name in operation.names[1:]:
        its = operation.attributes.get(name, name)
        for table in (settings, settings["_parameters"], settings["_buffers"]):  # a module of torch's own has all there
            if its in table:
                arguments[name] = table[its]
                break
        else:
            if hasattr(module, its):
                arguments[name] = getattr(module, its)
    return Call(node, operation, arguments, owner, str(node.target), module)
