"""`SumConvs`: convolutions of one input whose results are added become one convolution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.edit import Derived, Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Answer, Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import ADD, ADD_IN_PLACE, BATCH_NORM, CONV, Call, operation_of, read
from regraft.transformations._kernels import Sum, kernel_of, places_in, same_channels
from regraft.transformations._module_for import place_of

_BRANCHES = {CONV, BATCH_NORM}


class _Branches(Calls):
    """Sums of two convolutions of one input, or of a convolution and a batch norm; and sums of what such become."""

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        sums: set[Node] = set()
        for (node,) in super().candidates(owner):
            given = node.all_input_nodes
            if len(given) == 2 and all(each in sums or operation_of(each, owner) in _BRANCHES for each in given):
                sums.add(node)
                yield (node,)

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        match = super().match(owner, nodes)
        branches = [read(each, owner) for each in nodes[0].all_input_nodes]
        return match if len(branches) == 2 and _on_one_input(*branches) else None


def _on_one_input(first: Call | None, second: Call | None) -> bool:
    if first is None or second is None or CONV not in (first.operation, second.operation):
        return False
    return {first.operation, second.operation} <= _BRANCHES and first["input"] is second["input"]


class SumConvs(Rewrite):
    """Make one convolution of those that take the same input and whose results are added, and of a batch norm there.

    `W_1 * x + b_1 + W_2 * x + b_2 = (W_1 + W_2) * x + (b_1 + b_2)`, where the smaller kernel is added to the elements
    of the larger that meet the same pixels; a batch norm in evaluation mode is a kernel of one pixel for each channel.
    This is the re-parameterization of RepVGG (Ding et al. 2021, arXiv:2101.03697), for networks that are deployed with
    the branches that they were trained with, once `FoldBatchNorm` has been there: RepVGG, MobileOne, RT-DETR.

    Example:
        >>> import torch, regraft as rg
        >>> class Branches(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 1)
        ...     def forward(self, x):
        ...         return self.a(x) + self.b(x)
        >>> gm = rg.SumConvs()(rg.symbolic_trace(Branches()))
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['a']
    """

    preserves_computation = True
    pattern = _Branches(ADD, ADD_IN_PLACE)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        add = match.call
        first, second = (match.producer(node) for node in add.node.all_input_nodes)
        assert first is not None
        assert second is not None
        require(
            that(add["alpha"] in (None, 1), f"{add.where} multiplies what it adds by {add['alpha']}"),
            *(answer for call in (first, second) for answer in _answers(call, add, facts)),
            facts.same_mode((first, second)),
        )
        convs = [call for call in (first, second) if call.operation is CONV]
        whole = max(convs, key=lambda call: kernel_of(call).numel())
        other, kernel = second if whole is first else first, kernel_of(whole)
        places = places_in(whole, other)
        require(that(places is not None, f"{other.where} reads other pixels than {whole.where}, or in other steps"))
        assert places is not None
        sources = [
            (f"{part}_{key}", weight)
            for part, call in (("whole", whole), ("other", other))
            for key in ("weight", "bias", "running_mean", "running_var")
            if (weight := call.weight(key)) is not None
        ]
        require(facts.agree([(w.name, w.tensor) for key, w in sources if "running" not in key]))
        eps = float(other["eps"]) if other.operation is BATCH_NORM else None
        names, given = tuple(key for key, _ in sources), [weight for _, weight in sources]
        sums = {part: Sum(part, names, places, eps) for part in ("weight", "bias")}
        if eps is not None:
            scale = sums["weight"].scale(*(weight.tensor.detach() for weight in given))
            require(same_channels(other, whole, facts), _finite(scale, other, kernel))
        derived: dict[str, Derived | None] = {part: (total, given) for part, total in sums.items()}
        if eps is None and not any(key.endswith("bias") for key in names):
            derived["bias"] = None
        name, like = place_of(whole, kernel, edit)
        edit.put_module(name, like, derived)
        edit.replace_with_module(add.node, name, whole.input)
        for call in (whole, other):
            edit.erase(call.node)
            edit.discard(call)
        return f"added {other.where} to {whole.where}"


def _answers(call: Call, add: Call, facts: Facts) -> Iterator[Answer]:
    yield facts.plain(call)
    yield facts.alone(call)
    yield facts.only_user(call.node, add.node)
    yield facts.unchanged(call.input, call.node, add.node)
    if call.operation is BATCH_NORM:
        yield facts.evaluating(call)
        yield that(call.weight("running_mean") is not None, f"{call.where} keeps no running statistics")
    elif getattr(call.module, "padding_mode", "zeros") != "zeros":
        yield f"{call.where} does not pad with zeros"


def _finite(scale: Tensor, norm: Call, kernel: Tensor) -> Answer:
    finite = scale.is_meta or bool((scale.abs() < torch.finfo(kernel.dtype).max / 2).all())
    return that(finite, f"{norm.where} makes a scale that is not finite in {kernel.dtype}")
