"""Where values go: the questions of the safety oracle about who may see a value and whether a call can be repeated."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from regraft.core.continuity import is_torchs, rounds
from regraft.core.mutation import Mutations, may_alias, writes
from regraft.core.plainness import plain_module
from regraft.core.values import reads_shape_only, target_name
from regraft.core.vocabulary import BATCH_NORM, attribute, read

_PURE_METHODS = {"size", "dim", "ndimension", "numel", "__len__", "float", "double", "half", "bfloat16", "long", "int"}
_PURE_METHODS |= {"bool", "item", "type", "cpu", "cuda", "is_floating_point", "stride", "view_as", "reshape_as"}
_PURE_FUNCTIONS: set[Any] = {F.interpolate, F.normalize, F.one_hot, F.softmin, F.tanhshrink, F.softsign}
_PURE_FUNCTIONS |= {getattr, len, int, float}
_PURE_HOMES = {"torch", "torch.functional", "torch.nn.functional", "torch.special", "torch._C", "torch._C._nn"}
_PURE_HOMES |= {"torch._C._VariableFunctions"}


class Flow:
    """The part of `Facts` that follows values through a graph."""

    graphs: dict[str, GraphModule]

    def __init__(self) -> None:
        self._returned: dict[int, set[Node]] = {}
        self._roundings: dict[int, dict[Node, Node]] = {}
        self._sizes: dict[Graph, set[Node]] = {}

    def owner(self, node: Node) -> GraphModule:
        """The graph module in whose graph `node` is."""
        raise NotImplementedError

    def mutations(self, node: Node) -> Mutations:
        """The writes in the graph of `node`."""
        raise NotImplementedError

    def repeatable(self, node: Node) -> str | None:
        """`node` does nothing but compute its result, and would compute the same one again."""
        owner = self.owner(node)
        if node.op == "get_attr":
            return None
        if node.op == "call_module":
            return _repeatable_module(str(node.target), attribute(owner, str(node.target)))
        if node.op not in ("call_function", "call_method"):
            return f"node {node.name!r} is not a computation"
        if writes(node, owner):
            return f"node {node.name!r} writes into its arguments"
        if draws(node, owner):
            return f"node {node.name!r} ({target_name(node)}) draws random numbers"
        if not known(node):
            return f"nothing is known of what {target_name(node)} does beside computing its result"
        return None

    def returned(self, node: Node) -> str | None:
        """The caller gets neither `node` nor a view of it, into which it might write."""
        if node in self._handed_out(node):
            return f"{node.name!r}, or a view of it, is returned to the caller, who may write into it"
        return None

    def private(self, node: Node) -> str | None:
        """The memory of `node` was made in the graph, and the caller does not get it."""
        stack, seen, owner = [node], {node}, self.owner(node)
        while stack:
            current = stack.pop()
            if current.op in ("placeholder", "get_attr"):
                return f"{node.name!r} may be the memory of {current.name!r}, which others see"
            if current in self._handed_out(node):
                return self.returned(current)
            if may_alias(current, owner):
                stack.extend(value for value in current.all_input_nodes if value not in seen)
                seen.update(current.all_input_nodes)
        return None

    def redirected(self, old: Node, new: Node) -> None:
        """Whoever read `old` reads `new` from now on."""
        found = self._returned.get(id(old.graph))
        if found is not None and old in found:
            _hand_out(new, found, self.owner(new))

    def closed(self, inner: list[Node], result: Node) -> str | None:
        """Nobody but `result` and each other reads the `inner` values (their shapes excepted), or writes into them."""
        inside = {*inner, result}
        for node in inner:
            outside = [user for user in node.users if user not in inside and not reads_shape_only(user, node)]
            if outside:
                return f"the result of {node.name!r} is also used by node {outside[0].name!r}"
            written = self.mutations(node).of(node) if self.mutations(node) else []
            if written:
                return f"node {written[0].name!r} changes {node.name!r} in place"
        return None

    def only_user(self, value: Node, user: Node) -> str | None:
        """`value` is read by `user` alone; those who ask only for its shape don't count."""
        others = [n for n in value.users if n is not user and not reads_shape_only(n, value)]
        if others:
            return f"the result of {_label(value)} is also used by node {others[0].name!r}"
        return None

    def unchanged(self, value: Node, first: Node, last: Node) -> str | None:
        """Nothing writes into `value` between `first` and `last`."""
        start, end = (first, last) if first < last else (last, first)
        writer = self.mutations(value).between(value, start, end)
        if writer is not None:
            return f"node {writer.name!r} changes {value.name!r} in place between {start.name!r} and {end.name!r}"
        return None

    def untouched(self, value: Node) -> str | None:
        """Nothing ever writes into `value`."""
        written = self.mutations(value).of(value)
        return f"node {written[0].name!r} changes {value.name!r} in place" if written else None

    def in_place(self, node: Node) -> str | None:
        """`node` itself writes into none of its arguments."""
        writing = writes(node, self.owner(node))
        return f"node {node.name!r} works in place; use the out-of-place form" if writing else None

    def smooth(self, node: Node) -> str | None:
        """No result of `node` is rounded or compared, where a last bit can make a whole number's difference."""
        rounding = self._rounded(node)
        if rounding is None:
            return None
        known = "is" if is_torchs(rounding) else "may, for all that is known, be"
        return f"the result of {node.name!r} {known} rounded or compared by node {rounding.name!r}"

    def readers_of(self, held: Any) -> set[Node]:
        """See `Index.readers_of`."""
        raise NotImplementedError

    def _rounded(self, node: Node) -> Node | None:
        """What rounds something that depends on `node`: every function passes a last bit on, whatever it computes."""
        graph = id(node.graph)
        if graph not in self._roundings:
            owner, mutations = self.owner(node), self.mutations(node)
            found, memory = dict[Node, Node](), dict[Node, Node]()
            for reader in reversed(node.graph.nodes):
                rounding = reader if rounds(reader, owner) else found.get(reader)
                for written in writes(reader, owner) if rounding is None else ():
                    rounding = rounding or memory.get(mutations.root(written))
                for caller in self.readers_of(owner) if reader.op == "output" else ():
                    rounding = rounding or (reader if self._rounded(caller) is not None else None)
                if rounding is None:
                    continue
                for value in (value for value in reader.all_input_nodes if not reads_shape_only(reader, value)):
                    found[value] = memory[mutations.root(value)] = rounding
            self._roundings[graph] = found
        return self._roundings[graph].get(node)

    def _handed_out(self, node: Node) -> set[Node]:
        graph = node.graph
        if id(graph) not in self._returned:
            found: set[Node] = set()
            for result in graph.find_nodes(op="output"):
                for value in result.all_input_nodes:
                    _hand_out(value, found, self.owner(node))
            self._returned[id(graph)] = found
        return self._returned[id(graph)]


def _hand_out(value: Node, found: set[Node], owner: GraphModule) -> None:
    stack = [value]
    while stack:
        current = stack.pop()
        if current in found:
            continue
        found.add(current)
        if may_alias(current, owner):
            stack.extend(current.all_input_nodes)


def draws(node: Node, owner: GraphModule) -> bool:
    """Whether a call of a function or method draws random numbers."""
    call = read(node, owner)
    if call is not None and "training" in call.operation.names:
        # dropout; and batch norm, which then writes its statistics, if it has any: weights are standardized without
        return bool(call["training"]) and not (call.operation is BATCH_NORM and call["running_mean"] is None)
    name = target_name(node).partition(".")[0]
    if name == "scaled_dot_product_attention":
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(given != 0.0)
    return _random(name)


def known(node: Node) -> bool:
    """Whether it is known what the target of a call does: an ATen operation, or one of Python's operators."""
    target = node.target
    if node.op == "call_method":
        return target in _PURE_METHODS or _packet(str(target)) is not None
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims") and not target._schema.is_mutable
    if target in _PURE_FUNCTIONS or getattr(operator, getattr(target, "__name__", ""), None) is target:
        return True
    home = getattr(target, "__module__", None)
    if home is not None and home not in _PURE_HOMES:
        return False
    return _packet(getattr(target, "__name__", "")) is not None and node.kwargs.get("max_norm") is None


@cache
def _packet(name: str) -> Any:
    return getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("_") else None


@cache
def _random(name: str) -> bool:
    packet = _packet(name)
    if packet is None:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())


def _repeatable_module(where: str, module: Any) -> str | None:
    if not type(module).__module__.startswith("torch.nn.modules"):
        return f"nothing is known of what {where} ({type(module).__name__}) does beside computing its result"
    if module.training:
        return f"{where} is in training mode; call .eval() on the model first"
    if getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None:
        return f"{where} writes into what it reads"
    return next((answer for part in module.modules() if (answer := plain_module(where, part))), None)


def _label(node: Node) -> str:
    return str(node.target) if node.op == "call_module" else repr(node.name)
