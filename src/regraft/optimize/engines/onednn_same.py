"""The values of a graph that are the same in each call of a program, since it is made for inputs of certain sizes."""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from regraft.core.flow import draws, known
from regraft.core.mutation import Mutations, writes
from regraft.core.values import MAKERS, called_name, made_of_sizes
from regraft.core.vocabulary import read
from regraft.optimize.engines.onednn_fusions import CALLS


def same_in_each_call(gm: GraphModule) -> set[Node]:
    """The values that depend on the sizes of the inputs and on weights alone; each is what it is at last.

    A table that is written piece by piece, as BEiT's of relative positions, is one where nothing that changes from call
    to call goes into it, and nothing that does so is made of it before it is whole.

    Args:
        gm: The graph.
    """
    mutations = Mutations(gm)
    writing = {node for node in gm.graph.nodes if writes(node, gm)}
    changing: set[Node] = set()  # what writes into values that are not the same
    while True:
        found = _found(gm, mutations, writing, changing)
        more = writing - found - changing
        for node in gm.graph.nodes:
            if node not in found:
                written = (mutations.of(value) for value in found.intersection(node.all_input_nodes))
                more.update(each[-1] for each in written if each and node < each[-1])  # it takes the others along
        if not more:
            return found
        changing |= more


def _found(gm: GraphModule, mutations: Mutations, writing: set[Node], changing: set[Node]) -> set[Node]:
    found = made_of_sizes(gm.graph)
    for node in gm.graph.nodes:
        understood = _writes_as_it_says(node, gm) if node in writing else _pure(node, gm)
        steady = understood and not draws(node, gm) and found.issuperset(_values_read(node))
        if (steady or (node.op == "get_attr" and not mutations.of(node))) and changing.isdisjoint(mutations.of(node)):
            found.add(node)
    return found


def _values_read(node: Node) -> list[Node]:
    """The arguments of which a node reads more than the type and the size, as `new_zeros` of what it is called on."""
    like = node.args[0] if called_name(node) in MAKERS and node.args else None
    return [argument for argument in node.all_input_nodes if argument is not like]


def _writes_as_it_says(node: Node, gm: GraphModule) -> bool:
    if node.op == "call_module":  # an activation in place
        return _pure(node, gm)
    of_torch = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return of_torch or known(node)


def _pure(node: Node, gm: GraphModule) -> bool:
    if node.op == "call_module":
        call = read(node, gm)
        return call is not None and getattr(call.module, "max_norm", None) is None
    return node.op in CALLS and known(node)
