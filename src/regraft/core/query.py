"""The safety oracle: every question that a rule may ask before it edits.

Each question is a method of `Facts` whose answer is None where all is well, and else a sentence that names the module,
the fact and the cure; a rule hands the answers to `require`. No rule answers a question of its own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.errors import Refused
from regraft.core.flow import Flow
from regraft.core.index import Index
from regraft.core.mutation import Mutations, is_own, may_alias, read_later
from regraft.core.plainness import dtype_name, plain_module, plain_tensor, unlike
from regraft.core.strides import order_readers, strided_reader
from regraft.core.values import made_of_sizes, target_name, value_of
from regraft.core.vocabulary import Call, Weight

Answer = str | None
"""None where a condition holds, else the sentence that says what does not."""


def require(*answers: Answer) -> None:
    """Refuse the site unless every answer is None.

    Args:
        answers: What the questions of `Facts`, or `that`, have said.

    Raises:
        TypeError: if one is neither None nor a sentence, as a bare condition is.
        Refused: with all the sentences; the engine records it, and the site stays as it was.
    """
    sentences = [answer for answer in answers if answer is not None]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise TypeError(
                f"require takes None or a sentence, and got {sentence!r}; a condition comes with what to say where it "
                'does not hold: require(that(condition, "why not"))'
            )
    if sentences:
        raise Refused("; ".join(dict.fromkeys(sentences)))


def that(condition: bool, sentence: str) -> Answer:
    """A condition of a rule's own: None where it holds, else `sentence`."""
    return None if condition else sentence


class Facts(Index, Flow):
    """What is known of a graph module, its nested graph modules included.

    Args:
        root: The graph module that is being rewritten.
    """

    def __init__(self, root: GraphModule) -> None:
        Index.__init__(self, root)
        Flow.__init__(self)
        self._mutations = {path: Mutations(owner) for path, owner in self.graphs.items()}
        self._path_of = {id(owner.graph): path for path, owner in self.graphs.items()}

    def follow(self, node: Node, value: Node) -> None:
        """See `Mutations.follow`."""
        self.mutations(node).follow(node, value)

    # The questions.

    def called_once(self, call: Call) -> Answer:
        """The module is called in one place."""
        readers = self.readers_of(call.module) if call.module is not None else ()
        if len(readers) > 1:
            return f"{call.where} is called {len(readers)} times, and a rewrite of one call would change the others"
        return None

    def one_name(self, call: Call) -> Answer:
        """The module is registered under one name."""
        paths = self.names_of(call.module) if call.module is not None else ()
        if len(paths) > 1:
            return f"{call.where} is registered under several names ({', '.join(paths)}); give each its own copy"
        return None

    def alone(self, call: Call) -> Answer:
        """The module is called once and has one name; its weights are read by it alone and tied to nothing."""
        if answer := self.called_once(call) or self.one_name(call):
            return answer
        for name in call.operation.weights:
            weight = call.weight(name)
            if weight is not None and (answer := self.untied(weight, call)):
                return answer
        return None

    def untied(self, weight: Weight, call: Call) -> Answer:
        """The weight is read by the call alone, once, and tied to nothing."""
        tensor, reader = weight.tensor, weight.node
        names = self.names_of(tensor)
        if len(names) > 1:
            return f"{names[0]} is tied to {' and '.join(names[1:])}; untie them, or leave {call.where} as it is"
        readers = self.readers_of(tensor) - {reader, call.node}
        if readers:
            return f"{names[0] if names else call.where} is also read by node {min(r.name for r in readers)!r}"
        if reader is not None and len(reader.users) > 1:
            return f"{reader.target} is read by {len(reader.users)} nodes"
        return None

    def read_once(self, weight: Weight, within: Set[Node] = frozenset()) -> Answer:
        """The weight is read by one node alone, once, or by some alone, and tied to nothing."""
        readers = self.readers_of(weight.tensor)
        others = [reader for reader in readers if reader is not weight.node and reader not in within]
        users = () if weight.node is None else [user for user in weight.node.users if user not in within]
        if len(self.names_of(weight.tensor)) > 1 or others or len(users) > (not within):
            return f"{weight.name} is tied, or read elsewhere, and is trained: it must stay one parameter"
        return None

    def plain(self, call: Call) -> Answer:
        """Nothing but `torch.nn`'s own computation happens in the call, on ordinary tensors."""
        module = call.module
        if module is not None and type(module) not in call.operation.modules:
            return unlike(call.where, module, call.operation.modules)
        if module is not None and (answer := plain_module(call.where, module)):
            return answer
        for name in call.operation.weights:
            weight = call.weight(name)
            if weight is None:
                if call.computed(name):
                    return f"the {name} of {call.where} is computed by the graph, not a parameter or a buffer"
                continue
            if answer := plain_tensor(weight.name, weight.tensor):
                return answer
            if weight.node is not None and (written := self.mutations(weight.node).of(weight.node)):
                return f"{weight.name} is written in the graph by node {written[0].name!r}"
        return None

    def agree(self, tensors: Sequence[tuple[str, Tensor]]) -> Answer:
        """The named tensors have one dtype, one device, and are all trainable or all frozen."""
        first_name, first = tensors[0]
        for name, tensor in tensors[1:]:
            if tensor.dtype != first.dtype:
                what = f"{first_name} is {dtype_name(first)} and {name} is {dtype_name(tensor)}"
                return f"{what}; convert the model to one dtype"
            if tensor.device != first.device and not (tensor.is_meta or first.is_meta):
                return f"{first_name} is on {first.device} and {name} on {tensor.device}; move the model to one device"
            if tensor.requires_grad != first.requires_grad:
                frozen, trainable = (name, first_name) if first.requires_grad else (first_name, name)
                return f"{frozen} is frozen and {trainable} is trainable; one parameter cannot be both"
        return None

    def evaluating(self, call: Call) -> Answer:
        """The call is in evaluation mode, and so has one fixed result."""
        training = call.module.training if call.module is not None else bool(call["training"])
        return f"{call.where} is in training mode; call .eval() on the model first" if training else None

    def disposable(self, value: Node, last: Node, gone: Sequence[Node] = ()) -> Answer:
        """After `last` nobody reads the memory of `value`, which its node made: `last` may write into it.

        Args:
            value: The value whose memory is to be used again.
            last: The node that would write into it.
            gone: Nodes that the rewrite removes.
        """
        owner = self.graphs[self._path_of[id(value.graph)]]
        mutations = self.mutations(value)
        written = [node for node in mutations.of(value) if value < node and node not in gone and node is not last]
        if written or not is_own(value, owner, mutations.heirs):
            return f"{value.name!r} may be the memory of another value"
        user = read_later(value, last, owner, gone)
        return None if user is None else f"{value.name!r} is read by node {user.name!r} after node {last.name!r}"

    def strides_free(self, value: Node, width: int) -> Answer:
        """No user of `value`, whose last axis has `width` elements, needs more than that axis to be contiguous."""
        user = strided_reader(value, width, self.owner(value))
        if user is None:
            return None
        return f"node {user.name!r} ({target_name(user)}) needs {value.name!r} to be contiguous; use reshape there"

    def order_free(self, value: Node) -> Answer:
        """No node can tell in which order the elements of `value` lie in memory; the caller who gets them may."""
        inside = bool(self._path_of[id(value.graph)])  # of a graph whose results the graph around it reads
        readers = order_readers(value, self.owner(value))
        user = next((user for user in readers if inside or user.op != "output"), None)
        return None if user is None else f"node {user.name!r} may tell in which order {value.name!r} lies"

    def laid_out_like_a_copy(self, source: Node, copy: Node) -> Answer:
        """`source` has the strides that a copy of it has, or nobody can tell them from those of `copy`."""
        owner = self.owner(source)
        if source.op not in ("placeholder", "get_attr") and not may_alias(source, owner):
            return None
        if self.returned(copy):
            return f"the caller gets {copy.name!r}, and {source.name!r} may have other strides"
        return self.order_free(copy)

    def same_mode(self, calls: Sequence[Call]) -> Answer:
        """The modules are all in training mode or all in evaluation mode."""
        modes = {call.module.training for call in calls if call.module is not None}
        return "some of the layers are in training mode and some are not" if len(modes) > 1 else None

    def plain_tensor(self, weight: Weight) -> Answer:
        """The tensor is an ordinary dense floating-point tensor."""
        return plain_tensor(weight.name, weight.tensor)

    def copies_last(self, weight: Weight) -> Answer:
        """A copy of the weight can be kept, because torch counts what is written to the weight."""
        made = f"{weight.name} was made in inference mode, where torch does not count what is written to it"
        return that(not weight.tensor.is_inference(), made)

    def tensor(self, value: Any) -> Answer:
        """`value` is a tensor, and not a size or a number made of sizes."""
        if not isinstance(value, Node):
            return f"{value!r} is a number, not a tensor"
        known = value.meta.get("val")
        if known is not None:
            return that(isinstance(known, Tensor), f"{value.name!r} is a {type(known).__name__}, not a tensor")
        if value.graph not in self._sizes:
            self._sizes[value.graph] = made_of_sizes(value.graph)
        return f"{value.name!r} is made of sizes, not a tensor" if value in self._sizes[value.graph] else None

    def floating(self, value: Any, dtype: torch.dtype | None = None) -> Answer:
        """`value` is of floating-point numbers, and of `dtype` where one is given; as far as capture knows."""
        known = value_of(value)
        if known is None or (known.dtype.is_floating_point and dtype in (None, known.dtype)):
            return None
        wanted = str(dtype).removeprefix("torch.") if dtype is not None else "floating point"
        return f"{value.name!r} is {dtype_name(known)}, not {wanted}"

    def rank(self, node: Any) -> int | None:
        """The number of axes of a value, where capture knows it."""
        value = value_of(node)
        return value.ndim if value is not None else None

    def widened(self, node: Node, width: int) -> Tensor | None:
        """A fake tensor like the result of `node`, with `width` elements in its last axis."""
        value = value_of(node)
        return value.new_empty((*value.shape[:-1], width)) if value is not None else None

    def owner(self, node: Node) -> GraphModule:
        return self.graphs[self._path_of[id(node.graph)]]

    def mutations(self, node: Node) -> Mutations:
        """The writes in the graph of `node`."""
        return self._mutations[self._path_of[id(node.graph)]]
