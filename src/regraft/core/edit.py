"""The only code that changes a graph module; every change is journalled, so nobody writes a reverse.

An `Edit` is the transaction of one site: it either happens wholly or leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from regraft.core.clone import clone_module, consumed
from regraft.core.fx_private import rewrite_node
from regraft.core.journal import SiteRecord, WeightRecord
from regraft.core.modules import is_layer, module_at
from regraft.core.ordinary import outside_inference_mode
from regraft.core.query import Facts
from regraft.core.reversal import Reversal
from regraft.core.states import MARKS, Key, Recorder, Slot, write_slot
from regraft.core.values import value_of
from regraft.core.vocabulary import Call, Weight, attribute
from regraft.core.weights import Derivation, Same

Derived = tuple[Derivation, Sequence[Weight]]
"""A weight to be made: how, and from which weights."""


class Edit:
    """The edits of one site.

    Args:
        facts: What is known of the graph module; kept up to date.
        path: The path of the graph module that is edited, below the root.
        orders: The journal's orders, to which the tables that are touched are added.
        mark: The signature with which new and changed nodes are marked.
        dry: Make the new weights on the meta device: the graph as it would become, without the memory.
    """

    def __init__(self, facts: Facts, path: str, orders: dict[Key, list[str]], mark: str, dry: bool = False) -> None:
        self.owner = facts.graphs[path]
        self._facts = facts
        self._path = path
        self._mark = frozenset({mark})
        self._dry = dry
        self._recorder = Recorder(facts.root, orders)
        self._erased: set[Node] = set()
        self._weights: list[WeightRecord] = []

    # Nodes.

    def replace(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
        """`node` computes `target(*args, **kwargs)` from now on. Its name and its users stay."""
        self._rewrite(node, "call_function", target, args, kwargs)

    def replace_with_module(self, node: Node, name: str, *args: Any) -> None:
        """`node` calls the module `name` from now on. Its name and its users stay."""
        self._rewrite(node, "call_module", name, args, {})

    def insert(self, before: Node, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Node:
        """A new node that computes `target(*args, **kwargs)`, placed before `before`."""
        node = self._create(before, "call_function", target, args, kwargs, name)
        self._infer(node)
        return node

    def insert_module(self, before: Node, module: str, *args: Any, value: Tensor | None = None) -> Node:
        """A new node that calls the module `module`; `value` is the fake tensor of its result, where known."""
        node = self._create(before, "call_module", module, args, {}, module.replace(".", "_"))
        if value is not None:
            node.meta["val"] = value
        return node

    def copy(self, node: Node, instead: dict[Node, Node], before: Node | None = None) -> Node:
        """A new node before `before`, or `node` itself, that does the same with the arguments that `instead` has."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: instead.get(n, n))
        made = self._create(before or node, node.op, node.target, args, kwargs, None)
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            dtypes = (given.dtype for n in instead.values() if (given := value_of(n)) is not None)
            made.meta["val"] = value.to(next(dtypes, None))
        return made

    def insert_weight(self, before: Node, name: str) -> Node:
        """A new node that reads the parameter or buffer `name`."""
        return self._create(before, "get_attr", name, (), {}, name.replace(".", "_"))

    def redirect(self, old: Node, new: Node) -> None:
        """Whoever reads `old` reads `new` from now on."""
        for user in list(old.users):
            self._recorder.node(self._path, user)
        old.replace_all_uses_with(new, propagate_meta=False)
        self._facts.redirected(old, new)

    def rewire(self, user: Node, old: Node, new: Node) -> None:
        """`user` reads `new` in the place of `old` from now on; other readers do not."""
        self._recorder.node(self._path, user)
        user.replace_input_with(old, new)
        _mark(user, self._mark)

    def erase(self, node: Node) -> None:
        """Remove `node`, which nobody reads any more."""
        self._recorder.erased_node(self._path, node)
        self._facts.forget(node)
        self.owner.graph.erase_node(node)
        self._erased.add(node)

    def erase_unread(self, nodes: Iterable[Node]) -> None:
        """Remove those of `nodes` that nobody reads any more, the last first, until all that are left are read."""
        for node in sorted(nodes, reverse=True):
            if not node.users:
                self.erase(node)

    def follow(self, node: Node, value: Node) -> None:
        """Tell the oracle that `node` stands for `value`, whose memory it may share."""
        self._facts.follow(node, value)

    # Modules and weights.

    def put_module(
        self,
        name: str,
        like: nn.Module,
        weights: dict[str, Derived | None],
        compute: Callable[[], dict[str, Tensor]] | None = None,
        /,
        **attributes: Any,
    ) -> None:
        """Put a module of the type of `like` under `name`: its settings, and newly made weights.

        Args:
            name: The qualified name, in the graph module that is edited. What stood there is kept for undo.
            like: A module whose class and settings the new one takes over. It is not changed.
            weights: For each parameter, how it is made and from what; None for no such parameter.
            compute: Computes the parameters all at once, where that takes less than one by one, to the same bits.
            attributes: Settings of the new module that differ from those of `like`.
        """
        module = clone_module(like)
        values = outside_inference_mode(compute) if compute is not None and not self._dry else {}
        for key, derived in weights.items():
            target, value = f"{name}.{key}", values.get(key)
            module._parameters[key] = self._derive(target, derived, value) if derived is not None else None
        module.__dict__.update(attributes)
        self._write(name, Slot("_modules", module))

    def put_sharing(self, name: str, module: nn.Module) -> None:
        """Put `module` under `name`, where it shares the weights of the module that stood there."""
        for key, tensor in module._parameters.items():
            if tensor is not None:
                target = _join(self._path, f"{name}.{key}")
                self._weights.append(WeightRecord(target, (target,), Same(), tensor.requires_grad))
        self._write(name, Slot("_modules", module))

    def writes(self, node: Node, value: Node) -> None:
        """Tell the oracle that `node` writes into the memory of `value` from now on."""
        self._facts.mutations(node).write(node, value)

    def put_buffer(self, name: str, derived: Derived) -> None:
        """Put a newly made buffer under `name`; it is not saved in the state dict unless its source was."""
        self._write(name, Slot("_buffers", self._derive(name, derived).detach(), persistent=False))

    def put_weight(self, name: str, derived: Derived) -> None:
        """Put a newly made tensor under `name`: a parameter where one of its sources is trained, else a buffer."""
        value = self._derive(name, derived)
        if value.requires_grad:
            self._write(name, Slot("_parameters", value))
        else:
            self._write(name, Slot("_buffers", value.detach(), persistent=False))

    def free_name(self, name: str) -> str:
        """`name`, or `name_1`, ... where it is taken; beside a layer of the caller's model, never in it."""
        parent = name.rpartition(".")[0]
        name = name.replace(".", "_") if parent and is_layer(attribute(self.owner, parent)) else name
        candidate, number = name, 0
        while attribute(self.owner, candidate) is not None:
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def discard(self, call: Call) -> None:
        """Let go of the module and the weights that `call` used, as far as no node reads them any more."""
        if call.module is not None:
            name = self._name_of(call)
            if name is not None and self._facts.unread(call.module):
                self._write(name, None)
            return
        for value in call.arguments.values():
            if isinstance(value, Node) and value.op == "get_attr" and value not in self._erased and not value.users:
                self.discard_weight(value)

    def discard_module(self, name: str) -> None:
        """Let go of the module `name`, if no node calls it any more."""
        if self._facts.unread(attribute(self.owner, name)):
            self._write(name, None)

    def discard_weight(self, reader: Node) -> None:
        """Erase a `get_attr` node that nobody reads, and its tensor, if no other node reads that; layers stay whole."""
        tensor, target = attribute(self.owner, str(reader.target)), str(reader.target)
        self.erase(reader)
        parent = target.rpartition(".")[0]
        if self._facts.unread(tensor) and not (parent and is_layer(attribute(self.owner, parent))):
            self._write(target, None)

    # The transaction.

    @property
    def erased(self) -> set[Node]:
        """The nodes that are gone."""
        return self._erased

    def commit(self, number: int, where: str, sentence: str, consume: bool = False) -> SiteRecord:
        """The site as the journal keeps it."""
        changes = self._recorder.changes()
        if consume:
            changes = consumed(changes)
        training = {
            _join(*key): new.value.training
            for key, (_, new) in changes.slots.items()
            if new is not None and isinstance(new.value, nn.Module)
        }
        return SiteRecord(number, where, sentence, changes, self._weights, training, consume)

    def rollback(self) -> bool:
        """As if nothing had been done; whether anything had. The oracle is not told: it has to be asked anew."""
        changes = self._recorder.changes()
        Reversal(self._facts.root, changes, self._recorder.orders, None).apply()
        return bool(changes)

    # Inside.

    def _create(self, before: Node, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> Node:
        previous = before.prev
        try:
            with self.owner.graph.inserting_before(before):
                node = self.owner.graph.create_node(op, target, args, kwargs, name=name)
        finally:  # whatever interrupts this, what has been made is known
            if before.prev is not previous:
                self._recorder.new_node(self._path, before.prev)
        for key in ("nn_module_stack", "stack_trace"):
            if key in before.meta:
                node.meta[key] = before.meta[key]
        self._facts.note(node, self.owner)
        _mark(node, self._mark)
        return node

    def _rewrite(self, node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
        self._recorder.node(self._path, node)
        self._facts.forget(node)
        rewrite_node(node, op, target, args, kwargs)
        self._facts.note(node, self.owner)
        _mark(node, self._mark)

    def _infer(self, node: Node) -> None:
        """The fake result of a new function call, where the fake arguments are known."""
        missing = [n for n in node.all_input_nodes if "val" not in n.meta]
        if missing:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = cast(Any, node.target)(*args, **kwargs)

    def _derive(self, target: str, derived: Derived, value: Tensor | None = None) -> nn.Parameter:
        derivation, sources = derived
        if value is None:
            tensors = [source.tensor.detach() for source in sources]
            if self._dry:
                value = outside_inference_mode(derivation.outline, *(tensor.to("meta") for tensor in tensors))
            else:
                value = outside_inference_mode(derivation.compute, *tensors)
        differentiable = value.is_floating_point() or value.is_complex()
        trainable = differentiable and any(source.tensor.requires_grad for source in sources)
        names = tuple(_join(self._path, source.name) for source in sources)
        self._weights.append(WeightRecord(_join(self._path, target), names, derivation, trainable))
        return nn.Parameter(value, requires_grad=trainable)

    def _write(self, name: str, slot: Slot | None) -> None:
        full = _join(self._path, name)
        path, _, leaf = full.rpartition(".")
        parent = module_at(self._facts.root, path)
        old = self._recorder.slot(path, leaf, parent)
        if old is not None:
            self._facts.remove(full, old.value)
        write_slot(parent, leaf, slot)
        if slot is not None:
            self._facts.add(full, slot.value)

    def _name_of(self, call: Call) -> str | None:
        """The name under which the call's module still stands; None where something new has taken its place."""
        return call.where if attribute(self.owner, call.where) is call.module else None


def _mark(node: Node, mark: frozenset[str]) -> None:
    marks = node.meta.get(MARKS)
    node.meta[MARKS] = marks | mark if marks else mark


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
