"""`MergeConvs`: convolutions of one input and one geometry become one, whose output is split."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate

from torch import Tensor

from regraft.core.edit import Edit
from regraft.core.padding import per_axis
from regraft.core.pattern import Match, Siblings
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import value_of
from regraft.core.vocabulary import CONV, Call
from regraft.transformations._merge import common_parent, divide, side_by_side, take_part
from regraft.transformations._module_for import module_for

_GEOMETRY = ("stride", "padding", "dilation", "groups")


def _kind(call: Call) -> Hashable:
    """Equal for convolutions that can be one; those that share nothing else are no candidates for merging."""
    weight = call.weight("weight")
    size = tuple(weight.tensor.shape[2:]) if weight is not None else None
    axes = len(size) if size is not None else 0
    mode = getattr(call.module, "padding_mode", "zeros")
    return size, mode, *(per_axis(call[name], axes) for name in _GEOMETRY)


class MergeConvs(Rewrite):
    """Merge convolutions that take the same input with the same kernel size, stride, padding and dilation.

    `[W_1 * x + b_1, W_2 * x + b_2] = [W_1; W_2] * x + [b_1; b_2]`, stacked along the channels: the branches of an
    inception block, the heads of a detector. Any number of convolutions with one group; a missing bias becomes zeros.
    One that fits no other stays as it is, with the reason, and the rest are merged.

    No preset has it. To read some channels of many, or to add a residual to them, takes longer than to read the input
    twice; only packed layers gain, which run where no program of oneDNN Graph does.

    Example:
        >>> import torch, regraft as rg
        >>> class Heads(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.boxes, self.classes = torch.nn.Conv2d(8, 4, 3), torch.nn.Conv2d(8, 6, 3)
        ...     def forward(self, x):
        ...         return self.boxes(x), self.classes(x)
        >>> gm = rg.MergeConvs()(rg.symbolic_trace(Heads()))
        >>> gm.boxes_classes
        Conv2d(8, 10, kernel_size=(3, 3), stride=(1, 1))
    """

    preserves_computation = True
    pattern = Siblings(CONV, by=_kind)

    def divide(self, match: Match, facts: Facts) -> list[Match]:
        """See `Rewrite.divide`."""
        return divide(match, facts, _expect_mergeable)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        calls = match.calls
        weights = [weight for call in calls if (weight := call.weight("weight"))]
        widths = [weight.tensor.shape[0] for weight in weights]
        first, x, spatial = calls[0], calls[0].input, weights[0].tensor.ndim - 2

        names = [call.where.rpartition(".")[2] for call in calls]
        whole = edit.free_name(".".join(filter(None, (common_parent(calls), "_".join(names)))))
        modules = [call.module for call in calls if call.module is not None]
        like = modules[0] if modules else module_for(first, weights[0].tensor)
        derived = {name: side_by_side(calls, name) for name in ("weight", "bias")}
        edit.put_module(whole, like, derived, out_channels=sum(widths))
        merged = edit.insert_module(first.node, whole, x, value=_stacked(first, spatial, sum(widths)))
        for call, width, end in zip(calls, widths, accumulate(widths), strict=True):
            take_part(edit, facts, call, merged, (Ellipsis, slice(end - width, end), *[slice(None)] * spatial))
        return f"merged {' + '.join(names)}"


def _expect_mergeable(call: Call, facts: Facts) -> None:
    require(facts.plain(call))
    require(facts.alone(call))
    weight, bias = call.weight("weight"), call.weight("bias")
    assert weight is not None
    require(
        facts.agree([(w.name, w.tensor) for w in (weight, bias) if w is not None]),
        facts.strides_free(call.node, -1),
        that(call["groups"] == 1, f"{call.where} has {call['groups']} groups"),
    )


def _stacked(first: Call, spatial: int, channels: int) -> Tensor | None:
    """A fake tensor like the result of the first convolution, with all the channels."""
    value = value_of(first.node)
    if value is None:
        return None
    axis = value.ndim - spatial - 1
    return value.new_empty((*value.shape[:axis], channels, *value.shape[axis + 1 :]))
