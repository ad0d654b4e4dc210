"""Which nodes write into a value that others read: in-place functions, methods and modules, `out=`, views and aliases.

Where nothing is known of an operation it is taken to return an alias of its arguments; an unknown module may also write
into them. That errs towards refusing, and costs nothing in graphs that never write in place.
"""

from __future__ import annotations

import inspect
import operator
from bisect import bisect_right, insort
from collections.abc import Callable, Container, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from regraft.core.values import made_of_sizes
from regraft.core.vocabulary import attribute

_WRITING_OPERATORS = {operator.setitem, operator.delitem} | {
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
} - {operator.inv, operator.invert, operator.index, operator.indexOf, operator.is_, operator.is_not}
_FRESH_OPERATORS = {
    getattr(operator, name)
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "neg",
        "pos",
        "abs",
        "matmul",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
        "xor",
        "invert",
        "inv",
        "not_",
    ]
}
# What may return an argument, or a view of one, without its schema saying so; found by running each operator of torch's
# own test samples and comparing memory.
_QUIET = {"atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "cartesian_prod", "conj_physical", "einsum"}
_QUIET |= {"meshgrid", "sum_to_size", "to_dense", "type_as", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}
# What computes with the statistics of its input writes them, too, and no schema says so: where they are among the
# arguments, and what the function asks by.
_NORMS: dict[Any, tuple[int, str]] = {
    **dict.fromkeys((torch.batch_norm, torch.ops.aten.batch_norm.default), (3, "training")),
    **dict.fromkeys((torch.instance_norm, torch.ops.aten.instance_norm.default), (3, "use_input_stats")),
    nn.functional.batch_norm: (1, "training"),
    nn.functional.instance_norm: (1, "use_input_stats"),
}
_ALIASING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)


def writes(node: Node, owner: GraphModule) -> list[Node]:
    """The arguments of `node` whose memory it writes."""
    if node.op == "call_method":
        name = str(node.target)
        in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
        return _nodes(node.args[:1]) if in_place else []
    if node.op == "call_module":
        return node.all_input_nodes if _module_writes(attribute(owner, str(node.target))) else []
    if node.op != "call_function" or not callable(node.target):
        return []
    if node.target in _NORMS:
        return _statistics(node)
    if isinstance(node.target, torch._ops.OpOverload):
        return _written_by_schema(node, node.target)
    written = _nodes((node.kwargs.get("out"),)) if node.kwargs else []
    if _named_in_place(node.target):
        written += _nodes(node.args[:1])
    elif _argument(node, "inplace"):
        written += _nodes((*node.args[:1], node.kwargs.get("input")))
    return written


def _statistics(node: Node) -> list[Node]:
    place, flag = _NORMS[node.target]
    decided = node.kwargs.get(flag, node.args[5] if len(node.args) > 5 else flag == "use_input_stats")
    given = dict(zip(("running_mean", "running_var"), node.args[place : place + 2])) | dict(node.kwargs)
    return _nodes((given.get("running_mean"), given.get("running_var"))) if decided is not False else []


@cache
def _named_in_place(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    named = name.endswith("_") and not name.endswith("__") and function not in _FRESH_OPERATORS
    return function in _WRITING_OPERATORS or named


def _written_by_schema(node: Node, overload: torch._ops.OpOverload) -> list[Node]:
    values: list[Any] = []
    for position, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None))
    return _nodes(tuple(values))


def _module_writes(module: Any) -> bool:
    if isinstance(module, GraphModule):
        return any(writes(node, module) for node in module.graph.nodes)
    if type(module).__module__.startswith(("torch.nn.modules", "torch.ao.nn", "torch.nn.utils")):
        return module.__dict__.get("inplace") is True  # looking for what is not there is slow in a module
    pure = getattr(module, "regraft_pure", False) is True  # one of regraft's own, which says so itself
    return not pure or getattr(module, "inplace", False) is True


def may_alias(node: Node, owner: GraphModule) -> bool:
    """Whether the result of `node` may share memory with one of its arguments."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_module":
        module = attribute(owner, str(node.target))
        return isinstance(module, _ALIASING_MODULES) or "Dropout" in type(module).__name__ or _module_writes(module)
    product = node.target is torch.einsum and len(node.all_input_nodes) > 1  # in memory of its own
    if product or node.target in _FRESH_OPERATORS or node.target in _NORMS:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return _returns_alias(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(writes(node, owner)) or _named_op_aliases(name.removeprefix("__").removesuffix("__"))


def is_own(value: Node, owner: GraphModule, heirs: Container[Node] = ()) -> bool:
    """Whether the memory of `value` is what its node made, or one of the `heirs` that a value was left to."""
    return value.op not in ("placeholder", "get_attr") and (value in heirs or not may_alias(value, owner))


def read_later(value: Node, last: Node, owner: GraphModule, gone: Container[Node] = ()) -> Node | None:
    """A node, none of those that are `gone`, that may read the memory of `value` after `last`, and not through that."""
    users = (user for user in value.users if user is not last and user not in gone)
    return next((user for user in users if last < user or may_alias(user, owner)), None)


def _aliased(node: Node) -> list[Node]:
    """The arguments that the result of an aliasing node may share memory with: those its schema names, or all."""
    if isinstance(node.target, torch._ops.OpOverload) and not _quiet(node.target._schema.name):
        arguments = node.target._schema.arguments
        named = [node.kwargs.get(a.name, node.args[i] if i < len(node.args) else None) for i, a in enumerate(arguments)]
        return _nodes(tuple(value for value, a in zip(named, arguments, strict=True) if a.alias_info is not None))
    of_the_first = node.target in _WRITING_OPERATORS or node.target is operator.getitem or _returns_itself(node)
    return _nodes(node.args[:1]) if of_the_first else node.all_input_nodes


def _returns_itself(node: Node) -> bool:
    """Whether a node is a method in place, whose result is what it is called on; `set_` gives that other memory."""
    return node.op == "call_method" and node.target != "set_" and str(node.target).rstrip("_") + "_" == node.target


@cache
def _named_op_aliases(name: str) -> bool:
    """By the ATen schemas of that name, but for those that are given their output; an operation without one does."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None or _quiet(name):
        return True
    overloads = (getattr(packet, name) for name in packet.overloads())
    return any(_returns_alias(each) for each in overloads if not any(a.is_out for a in each._schema.arguments))


@cache
def _returns_alias(overload: torch._ops.OpOverload) -> bool:
    return any(result.alias_info is not None for result in overload._schema.returns) or _quiet(overload._schema.name)


def _quiet(name: str) -> bool:
    """Whether an operation may return its argument without saying so: a cast to its own type, dropout in evaluation."""
    name = name.removeprefix("aten::")
    return name in _QUIET or "dropout" in name or name.startswith("_cast_")


@cache
def _position(function: Callable[..., Any], name: str) -> int | None:
    """Where a Python function takes the argument `name`; None where it takes none, or does not say."""
    try:
        return list(inspect.signature(function).parameters).index(name)
    except (TypeError, ValueError):
        return None


def _argument(node: Node, name: str) -> Any:
    """The argument `name` of a call of a Python function, however it was given."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = _position(node.target, name) if callable(node.target) else None
    return node.args[position] if position is not None and position < len(node.args) else None


def _nodes(values: tuple[Any, ...] | Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(tuple(v for v in values if v is not None), found.append)
    return found


class Mutations:
    """Every write in one graph, by the memory it may reach.

    Built in one pass over the graph; a graph without a write costs that pass and nothing else.
    """

    def __init__(self, owner: GraphModule) -> None:
        self.owner = owner
        self._parent: dict[Node, Node] = {}
        self._writes: dict[Node, list[Node]] = {}
        self.heirs: set[Node] = set()
        written = [(node, targets) for node in owner.graph.nodes if (targets := writes(node, owner))]
        if not written:
            return
        self._unite_aliases()
        for node, targets in written:
            for root in {self.root(target) for target in targets}:
                self._writes.setdefault(root, []).append(node)

    def __bool__(self) -> bool:
        return bool(self._writes)

    def of(self, value: Node) -> list[Node]:
        """The nodes that may write into the memory of `value`, in order."""
        return self._writes.get(self.root(value), []) if self._writes else []

    def between(self, value: Node, first: Node, last: Node) -> Node | None:
        """A node after `first` and before `last` that may write into `value`."""
        found = self.of(value)
        position = bisect_right(found, first)
        return found[position] if position < len(found) and found[position] < last else None

    def follow(self, node: Node, value: Node) -> None:
        """A rewrite has made `node`, whose result lies in the memory of `value`, or is `value` computed anew."""
        if self._writes:
            self._parent[self.root(node)] = self.root(value)

    def write(self, node: Node, value: Node) -> None:
        """A rewrite has made `node` write into the memory of `value`, which nobody reads after it: it is its heir."""
        self.heirs.add(node)
        if not self._writes:
            self._unite_aliases()
        self._parent[self.root(node)] = self.root(value)
        insort(self._writes.setdefault(self.root(value), []), node)

    def _unite_aliases(self) -> None:
        inputs: Node | None = None
        readers: dict[int, Node] = {}
        sizes = made_of_sizes(self.owner.graph)
        for node in self.owner.graph.nodes:
            if node.op == "placeholder":  # a caller may pass one tensor twice
                inputs = inputs or node
                self._parent[node] = self.root(inputs)
            elif node.op == "get_attr":  # each read of a weight may have a node of its own
                memory = memory_of(attribute(self.owner, str(node.target)))
                self._parent[node] = self.root(readers.setdefault(memory, node))
            elif may_alias(node, self.owner):
                for argument in (each for each in _aliased(node) if each not in sizes):
                    self._parent[self.root(argument)] = self.root(node)

    def root(self, node: Node) -> Node:
        """The node that stands for the memory of `node`."""
        path = []
        while (parent := self._parent.get(node, node)) is not node:
            path.append(node)
            node = parent
        for seen in path:
            self._parent[seen] = node
        return node


def memory_of(value: Any) -> int:
    """Equal for tensors in the same memory, as long as they live."""
    if isinstance(value, (torch.Tensor, nn.Parameter)) and value.layout is torch.strided:
        try:
            return int(value.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor subclass without memory of its own
            return id(value)
    return id(value)


def weights_written(owner: GraphModule) -> list[torch.Tensor]:
    """The weights and constants of a graph module, into which its own code may write."""
    mutations = Mutations(owner)
    nodes = owner.graph.find_nodes(op="get_attr") if mutations else ()
    values = (attribute(owner, str(node.target)) for node in nodes if mutations.of(node))
    return [value for value in values if isinstance(value, torch.Tensor)]


def mutating_nodes(owner: GraphModule) -> Iterator[Node]:
    """The nodes of a graph that write into a value."""
    return (node for node in owner.graph.nodes if writes(node, owner))
