"""The spellings of one operation: operator, torch, functional, Tensor method, module, ATen.

A rule asks for `LINEAR` or `DIVIDE`; which of the many ways a graph can say so is decided here and nowhere else.
`read(node, owner)` turns a node into a `Call`: the operation, and its arguments under their own names.

To teach regraft a new spelling, add it to the operation below; to add an operation, write one more `Operation(...)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation and every way to write it.

    Args:
        name: What a user calls it.
        parameters: The argument names in order, as the functional form has them, separated by blanks.
        functions: The callables that take those arguments in that order.
        methods: The `Tensor` methods whose `self` is the first argument.
        modules: The exact `torch.nn` types that compute it; their attributes are the other arguments.
        defaults: What an argument is where a call leaves it out.
        orders: The argument names of those functions that take them in another order.
    """

    name: str
    parameters: str
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    orders: Mapping[Callable[..., Any], str] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The argument names, in order."""
        return tuple(self.parameters.split())

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that belongs to the graph module: `name` is its qualified name, `node` the `get_attr` that reads it.

    `node` is None where a module call reads it itself.
    """

    name: str
    tensor: torch.Tensor
    node: Node | None


@dataclass(frozen=True, eq=False)
class Call:
    """A node, read as an operation with named arguments.

    `where` is the qualified name of the module that it calls, or the place of a function call, when it was read.
    """

    node: Node
    operation: Operation
    arguments: Mapping[str, Any]
    owner: GraphModule
    where: str
    module: nn.Module | None = None
    _weights: dict[str, Weight | None] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name, self.operation.defaults.get(name))

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


def attribute(owner: nn.Module, target: str) -> Any:
    """The object at a dotted path below `owner`, or None."""
    value: Any = owner
    for part in target.split("."):
        for table in ("_modules", "_parameters", "_buffers"):  # torch's own way there is several times slower
            if part in (entries := value.__dict__.get(table, ()) if isinstance(value, nn.Module) else ()):
                value = entries[part]
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


def _overloads(*names: str) -> tuple[Callable[..., Any], ...]:
    """The ATen overloads of these names, each `name.overload`."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        found.append(getattr(getattr(aten, packet), overload))
    return tuple(found)


_CONV = "input weight bias stride padding dilation groups"
_CONV_DEFAULTS: Mapping[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_ATEN_BATCH_NORM = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_TRANSPOSED_DEFAULTS: Mapping[str, Any] = {**_CONV_DEFAULTS, "output_padding": 0}

ADD = Operation(
    "add", "input other alpha", (operator.add, torch.add, *_overloads("add.Tensor", "add.Scalar")), ("add", "__add__")
)
SUBTRACT = Operation(
    "subtract",
    "input other alpha",
    (
        operator.sub,
        torch.sub,
        torch.subtract,
        *_overloads("sub.Tensor", "sub.Scalar", "subtract.Tensor", "subtract.Scalar"),
    ),
    ("sub", "subtract"),
)
MULTIPLY = Operation(
    "multiply",
    "input other",
    (
        operator.mul,
        torch.mul,
        torch.multiply,
        *_overloads("mul.Tensor", "mul.Scalar", "multiply.Tensor", "multiply.Scalar"),
    ),
    ("mul", "multiply"),
)
DIVIDE = Operation(
    "divide",
    "input other rounding_mode",
    (
        operator.truediv,
        operator.itruediv,
        torch.div,
        torch.divide,
        torch.true_divide,
        *_overloads("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor"),
        *_overloads("true_divide.Scalar", "divide.Tensor", "divide.Scalar", "divide.Tensor_mode", "divide.Scalar_mode"),
    ),
    ("div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_"),
)
LINEAR = Operation(
    "linear", "input weight bias", (F.linear, torch._C._nn.linear, *_overloads("linear.default")), (), (nn.Linear,)
)
CONV = Operation(
    "convolution",
    _CONV,
    (F.conv1d, F.conv2d, F.conv3d, *_overloads("conv1d.default", "conv2d.default", "conv3d.default")),
    (),
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    _CONV_DEFAULTS,
)
TRANSPOSED_CONV = Operation(
    "transposed convolution",
    _TRANSPOSED,
    (
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        *_overloads("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
    ),
    (),
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    _TRANSPOSED_DEFAULTS,
)
BATCH_NORM = Operation(
    "batch norm",
    "input running_mean running_var weight bias training momentum eps",
    (F.batch_norm, torch.batch_norm, *_overloads("batch_norm.default")),
    (),
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    {"training": False, "momentum": 0.1, "eps": 1e-5},
    dict.fromkeys((torch.batch_norm, *_overloads("batch_norm.default")), _ATEN_BATCH_NORM),
)
IDENTITY = Operation("identity", "input", (), (), (nn.Identity,))
DROPOUT = Operation(
    "dropout",
    "input p training inplace",
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
        *_overloads("dropout.default"),
    ),
    (),
    (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    {"training": True, "inplace": False},
)
FLATTEN = Operation(
    "flatten",
    "input start_dim end_dim",
    (torch.flatten, *_overloads("flatten.using_ints")),
    ("flatten",),
    (nn.Flatten,),
    {"start_dim": 0, "end_dim": -1},
)
RESHAPE = Operation(
    "reshape",
    "input shape",
    (torch.reshape, *_overloads("reshape.default", "view.default", "_unsafe_view.default")),
    ("reshape", "view", "reshape_as", "view_as"),
)

RELU = Operation(
    "relu",
    "input inplace",
    (F.relu, torch.relu, torch.relu_, *_overloads("relu.default")),
    ("relu", "relu_"),
    (nn.ReLU,),
)
RELU6 = Operation("relu6", "input inplace", (F.relu6, *_overloads("relu6.default")), (), (nn.ReLU6,))
HARDTANH = Operation(
    "hardtanh",
    "input min_val max_val inplace",
    (F.hardtanh, *_overloads("hardtanh.default")),
    (),
    (nn.Hardtanh,),
    {"min_val": -1.0, "max_val": 1.0},
)
GELU = Operation(
    "gelu", "input approximate", (F.gelu, *_overloads("gelu.default")), (), (nn.GELU,), {"approximate": "none"}
)
SILU = Operation("silu", "input inplace", (F.silu, *_overloads("silu.default")), (), (nn.SiLU,))
HARDSWISH = Operation(
    "hardswish", "input inplace", (F.hardswish, *_overloads("hardswish.default")), (), (nn.Hardswish,)
)
HARDSIGMOID = Operation(
    "hardsigmoid", "input inplace", (F.hardsigmoid, *_overloads("hardsigmoid.default")), (), (nn.Hardsigmoid,)
)
LEAKY_RELU = Operation(
    "leaky relu",
    "input negative_slope inplace",
    (F.leaky_relu, *_overloads("leaky_relu.default")),
    (),
    (nn.LeakyReLU,),
    {"negative_slope": 0.01},
)
SIGMOID = Operation(
    "sigmoid",
    "input",
    (torch.sigmoid, torch.special.expit, F.sigmoid, *_overloads("sigmoid.default")),
    ("sigmoid", "sigmoid_"),
    (nn.Sigmoid,),
)
TANH = Operation("tanh", "input", (torch.tanh, F.tanh, *_overloads("tanh.default")), ("tanh", "tanh_"), (nn.Tanh,))

_ALIASES = {"x": "input", "self": "input", "size": "shape", "train": "training"}

OPERATIONS: tuple[Operation, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Operation))
_FUNCTIONS: dict[Any, Operation] = {f: operation for operation in OPERATIONS for f in operation.functions}
_METHODS: dict[str, Operation] = {m: operation for operation in OPERATIONS for m in operation.methods}
_MODULES: dict[type[nn.Module], Operation] = {m: operation for operation in OPERATIONS for m in operation.modules}


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
    arguments = {name: getattr(module, name) for name in operation.names[1:] if hasattr(module, name)}
    return Call(node, operation, {"input": inputs[0], **arguments}, owner, str(node.target), module)
