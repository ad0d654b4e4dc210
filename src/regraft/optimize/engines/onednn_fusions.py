"""What oneDNN Graph must not fuse, since it then ends the process, goes wrong, or takes far longer."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from regraft.core.vocabulary import GELU, read
from regraft.transformations._mkldnn import slower_inside

CALLS = ("call_function", "call_method")
PRODUCTS = {"linear", "bilinear", "matmul", "mm", "bmm", "mv", "einsum", "addmm", "baddbmm", "addmv", "addbmm"}
"""Matrix products, by the names of their functions, methods and layers."""
ADDING = {"addmm", "baddbmm", "addmv", "addbmm"}
"""Those that are added to their first tensor."""
_CONVOLUTIONS = {f"conv{kind}{axes}d" for kind in ("", "transpose") for axes in (1, 2, 3)}
_SUMS = {"add", "iadd"}
_FACTORS = {"mul", "imul", "multiply", "div", "divide", "truedivide", "truediv", "itruediv"}
_JOINING = {*_SUMS, *_FACTORS}
_ELEMENTWISE = {
    *("abs", "clamp", "clip", "elu", "exp", "gelu", "hardswish", "hardtanh", "leakyrelu", "log", "relu", "relu6"),
    *("round", "sigmoid", "silu", "sqrt", "square", "tanh"),
}
_ACTIVATIONS = {"gelu": "gelu", "silu": "swish", "tanh": "tanh"}
"""oneDNN's names of some."""
POOLINGS = {f"{kind}{end}{axes}d" for kind in ("avg", "max") for end in ("pool", "_pool") for axes in (1, 2, 3)}
"""Poolings, by the names of their functions and layers."""
_OTHERS = {"layernorm", "batchnorm", *(f"batchnorm{axes}d" for axes in (1, 2, 3)), *POOLINGS}
BROADCASTING = {
    *(name + end for name in ("add", "sub", "mul", "div", "masked_fill") for end in ("", "_")),
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv")),
    *("truediv", "true_divide", "multiply", "subtract", "divide", "rsub", "pow"),
    *("maximum", "minimum", "max", "min", "where", "softmax"),
}
"""Operations that are fused with tensors of their result's size alone, by the names of their functions and methods."""
IN_PLACE = {name for name in BROADCASTING if name.endswith("_")} | {"iadd", "isub", "imul", "itruediv"}
"""Those of them that write into their first argument."""
_AT_MOST = 16
"""So much of what was read is remembered: more than a kernel takes."""
_LOOKED_AT = 200
"""So many nodes are looked at between a tensor and its sum: more than a residual block has."""


def kept_apart(gm: GraphModule) -> set[Node]:
    """The results that may not be fused with what reads them.

    An elementwise function goes into the kernel of the product, convolution or sum before it, and what follows it does
    so, too. Without one, or where others read that as well, oneDNN Graph has only its reference kernel. So it has after
    a norm or a pooling. Some functions take longer in the kernel of a product than by themselves. And what is added to
    a layer norm it takes for one of the norm's own tensors. It takes a factor or a sum for the beginning of the product
    that reads it, rather than for the end of a kernel before; such a product has neither its weight packed nor its
    activation fused.

    Args:
        gm: The graph.
    """
    apart: set[Node] = set()
    leading: set[Node] = set()  # what begins such a kernel, and the functions in it
    for node in gm.graph.nodes:
        name = _plain(node, gm)
        if name in _JOINING or name in PRODUCTS or name in _CONVOLUTIONS:
            leading.add(node)
        elif name in _OTHERS or (name == "gelu" and _is_written_out(node, gm)):
            apart.add(node)
        elif name in _ELEMENTWISE:
            before = node.all_input_nodes[0]
            slower = _plain(before, gm) in PRODUCTS and slower_inside(_ACTIVATIONS.get(name, ""))
            if slower:
                apart.add(before)
            fused = before in leading and not slower and (len(before.users) == 1 or _is_swish(node, before, gm))
            (leading if fused else apart).add(node)
        if (name in _JOINING or name == "silu") and any(_plain(user, gm) in PRODUCTS for user in node.users):
            apart.add(node)
    return apart


def overwritten(gm: GraphModule) -> set[Node]:
    """What is added to the result of a product or a convolution, and may be read after that.

    The kernel writes the sum into its memory, unless torch has the tensor, too.

    Args:
        gm: The graph.
    """
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if _plain(node, gm) in _SUMS:
            for added in node.all_input_nodes:
                if not _come_before(set(added.users) - {node}, node, added):
                    found.add(added)
    return found


def _come_before(users: set[Node], last: Node, value: Node) -> bool:
    """Whether the last node is made of all users of a value, as far as is looked."""
    left, seen, ahead = set(users), {last}, [last]
    while ahead and left and len(seen) < _LOOKED_AT:
        for node in ahead.pop().all_input_nodes:
            if node not in seen and value < node:
                seen.add(node)
                ahead.append(node)
                left.discard(node)
    return not left


def read_twice(gm: GraphModule) -> dict[Node, dict[Node, int]]:
    """The arguments that a call has to be given as copies, and which of its copies: the same kernel was made of them.

    Where something is added to a product or a convolution of `x`, or to `x * x`, and the sum is joined with `x`, the
    process ends.

    Args:
        gm: The graph.
    """
    copies: dict[Node, dict[Node, int]] = {}
    copied: Counter[Node] = Counter()
    first: dict[Node, Node] = {}  # of two equal calls the first, since TorchScript makes one of them
    equal: dict[str, Node] = {}
    made_of: dict[Node, tuple[Node, ...]] = {}  # what was read in the kernel of a value
    summed: set[Node] = set()
    for node in gm.graph.nodes:
        arguments = map_arg((node.args, node.kwargs), first.__getitem__)
        first[node] = equal.setdefault(repr((node.op, node.target, arguments)), node)
        name, given = _plain(node, gm), {each: first[each] for each in node.all_input_nodes}
        if name in PRODUCTS or name in _CONVOLUTIONS:
            made_of[first[node]] = tuple(given.values())
        elif name in _JOINING or name in _ELEMENTWISE:
            sums = summed.intersection(given.values())
            for each, same in given.items():
                if any(same in made_of[other] for other in sums):
                    copied[same] += 1
                    copies.setdefault(node, {})[each] = copied[same]
            read = dict.fromkeys(each for other in given.values() for each in made_of.get(other, ()))
            if sums or (name in _SUMS and read):
                summed.add(first[node])
            if name in _JOINING:
                read.update(dict.fromkeys(given.values()))
            made_of[first[node]] = tuple(read)[-_AT_MOST:]
    return copies


def begins_kernel(node: Node, gm: nn.Module) -> bool:
    """Whether a node is a matrix product or a convolution.

    Args:
        node: The node.
        gm: The graph module.
    """
    name = _plain(node, gm)
    return name in PRODUCTS or name in _CONVOLUTIONS


def goes_inside(node: Node, before: Node, gm: nn.Module) -> bool:
    """Whether a node goes into the kernel of a product or a convolution that it reads.

    Args:
        node: The node.
        before: What it reads: the product, or what has gone into its kernel.
        gm: The graph module.
    """
    name = _plain(node, gm)
    if len(before.users) > 1:
        return _is_swish(node, before, gm)
    return name in _ELEMENTWISE or name in _JOINING


def is_elementwise(node: Node, gm: nn.Module) -> bool:
    """Whether a node calls a function of each element, as an activation is.

    Args:
        node: The node.
        gm: The graph module.
    """
    return _plain(node, gm) in _ELEMENTWISE


def is_factor(node: Node, gm: nn.Module) -> bool:
    """Whether a node multiplies or divides.

    Args:
        node: The node.
        gm: The graph module.
    """
    return _plain(node, gm) in _FACTORS


def called(node: Node, gm: nn.Module) -> str:
    """The name of the function or method that a node calls, or of torch's class of the layer, in small letters.

    Args:
        node: The node.
        gm: The graph module.
    """
    if node.op == "call_module":
        classes = type(gm.get_submodule(str(node.target))).__mro__
        return next(cls.__name__.lower() for cls in classes if cls.__module__.startswith("torch.nn."))
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0] if node.op in CALLS else ""


def _plain(node: Node, gm: nn.Module) -> str:
    return called(node, gm).replace("_", "")


def _is_written_out(gelu: Node, gm: GraphModule) -> bool:
    """Whether it is GELU by tanh, which is as much arithmetic as one kernel takes."""
    call = read(gelu, gm)
    return call is not None and call.operation is GELU and call["approximate"] == "tanh"


def _is_swish(node: Node, given: Node, gm: nn.Module) -> bool:
    """Whether a value is multiplied with its own sigmoid, for which there is a kernel."""
    readers = list(node.users)
    names = [_plain(each, gm) for each in (node, *readers)]
    return names in (["sigmoid", "mul"], ["sigmoid", "imul"]) and set(given.users) == {node, *readers}
