"""The values of a graph that are the same in each call of a program, since it is made for inputs of certain sizes."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from regraft.core.flow import draws, known
from regraft.core.mutation import Mutations, is_own, writes
from regraft.core.values import made_of_sizes
from regraft.core.vocabulary import read
from regraft.optimize.engines.onednn_fusions import CALLS


def same_in_each_call(gm: GraphModule) -> set[Node]:
    """The values that depend on the sizes of the inputs and on weights alone.

    Args:
        gm: The graph.
    """
    found, mutations = made_of_sizes(gm.graph), Mutations(gm)
    written = {node: writes(node, gm) for node in gm.graph.nodes}
    # what writes into a new value that nobody else reads might as well make another
    renewing = {node for node, values in written.items() if values and all(_is_left(v, node, gm) for v in values)}
    for node in gm.graph.nodes:
        pure = _pure(node, gm) if not written[node] else node in renewing and node.op in CALLS
        steady = pure and not draws(node, gm) and found.issuperset(node.all_input_nodes)
        if (node.op == "get_attr" or steady) and renewing.issuperset(mutations.of(node)):
            found.add(node)
    for node in renewing - found:
        found.difference_update(written[node])
    return found


def _pure(node: Node, gm: GraphModule) -> bool:
    if node.op == "call_module":
        call = read(node, gm)
        return call is not None and getattr(call.module, "max_norm", None) is None
    return node.op in CALLS and known(node)


def _is_left(value: Node, node: Node, gm: GraphModule) -> bool:
    return is_own(value, gm) and list(value.users) == [node]
