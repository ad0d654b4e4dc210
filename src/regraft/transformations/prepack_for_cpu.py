"""`PrepackForCpu`: convolutions and linear layers with packed weights, and what follows them fused into them."""

from __future__ import annotations

import torch
from torch import nn

from regraft.core.edit import Edit
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import CHANNELS_LAST, layout_of, value_of
from regraft.core.vocabulary import LINEAR, TRANSPOSED_CONV, Call
from regraft.core.weights import Same
from regraft.transformations import _mkldnn as mkldnn
from regraft.transformations._activations import NONE, Activation
from regraft.transformations._conv_region import BORDER, JOIN, LayersAndBorders
from regraft.transformations._following import between, following
from regraft.transformations._module_for import place_of
from regraft.transformations._packed import CONVOLUTIONS, Packed, even_padding, packed_kind
from regraft.transformations._packed_linear import PackedLinear


class PrepackForCpu(Rewrite):
    """Pack the weights of linear layers and convolutions for the CPU, and fuse what follows into them.

    `activation(W x + b + other)` in one call of oneDNN, which finds the weight in the layout that it works in.
    Between convolutions values are channels last, as is what is joined with them; outputs, and views that need it,
    get back the layout of the capture, before they are enlarged if that is the last thing done to them. A linear
    layer is computed in the fastest way, timed at the first call of about so many rows: by torch's own product, by
    oneDNN's packed one, in float32 by MKL's, or without AVX-512 by oneDNN's convolution, for which each row is a
    pixel. The last two pack for one number of rows, one that comes twice running. So the first of several equal
    calls may round otherwise than the next, and another process than this one;
    `torch.use_deterministic_algorithms(True)` leaves it at torch's own. Of what follows a linear layer only the
    activation is fused in: oneDNN's addition is many times slower in its product than torch's.

    Transposed convolutions are packed over two axes, and others over one to three; in float32 those over one axis only
    with groups, because oneDNN's are no faster else. Every call is right at every size; a new image size packs again,
    once. In bfloat16 or float16 on a processor without instructions for it, a layer is computed in float32 and its
    result rounded once, which is many times faster than torch's own; its packed copy is then in float32. Gradients,
    autocast, tracing and other devices get the plain layers. The layers stay what they are (`nn.Linear`, `nn.Conv2d`,
    the same parameters), and saving, copying and moving them is as before. A packed copy takes the weight's memory once
    more (what packs for a number of rows: once for each of the last two).

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.symbolic_trace(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval())
        >>> rg.PrepackForCpu()(gm).get_submodule("0")
        PackedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), activation=relu)
    """

    preserves_computation = True
    pattern = LayersAndBorders()

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        if call.operation in (BORDER, JOIN):
            some = any(isinstance(module, CONVOLUTIONS) for module in match.owner.modules())
            require(that(some, f"{call.where} reads no packed convolution"))
            return _laid(call, edit)
        weight = call.weight("weight")
        require(facts.plain(call), facts.alone(call) if call.module is None else facts.one_name(call))
        assert weight is not None
        require(that(weight.tensor.ndim > 1, f"the weight of {call.where} is a vector"), facts.copies_last(weight))
        name, module = place_of(call, weight.tensor, edit)
        require(_packable(call, module, weight.tensor))
        if facts.called_once(call):
            edit.put_sharing(name, _packed(call, module, NONE))
            return "packed, for every place that calls it"
        other, last, activation, done = following(match, facts)
        gone = between(call.node, last)
        inplace = other is not None and other is not call.input and facts.disposable(other, last, gone) is None

        packed = _packed(call, module, activation, inplace)
        if call.module is not None:
            edit.put_sharing(name, packed)
        else:
            given = {key: call.weight(key) for key in ("weight", "bias")}
            edit.put_module(name, packed, {key: (Same(), [one]) if one else None for key, one in given.items()})
        edit.replace_with_module(last, name, *([call.input] if other is None else [call.input, other]))
        for node in gone:
            edit.erase(node)
        if inplace and other is not None:
            edit.writes(last, other)
        edit.discard(call)
        for fused in done:
            edit.discard(fused)
        return "packed" + "".join(f", with {fused.where}" for fused in done)


def _packed(call: Call, module: nn.Module, activation: Activation, inplace: bool = False) -> Packed:
    kind = PackedLinear if call.operation is LINEAR else packed_kind(module)
    assert kind is not None
    return kind.of(module, activation, inplace)


def _packable(call: Call, module: nn.Module, weight: torch.Tensor) -> str | None:
    if weight.device.type not in ("cpu", "meta"):
        return f"{call.where} is on {weight.device}; the packed layouts are the CPU's"
    if call.operation is LINEAR:
        kind = mkldnn.MKL if mkldnn.works(mkldnn.MKL, weight.dtype) else mkldnn.LINEAR
    elif packed_kind(module) is None:
        what = f"{call.where} is a {type(module).__name__}"
        return f"{what}; of transposed convolutions only those over two axes are packed"
    elif isinstance(module, nn.Conv1d) and weight.dtype is torch.float32 and module.groups == 1:
        return f"{call.where} is a convolution over one axis in float32, which torch computes as fast without groups"
    elif not even_padding(module):
        return f"{call.where} pads the ends of an axis differently, or not with zeros"
    else:
        kind = mkldnn.TRANSPOSED if call.operation is TRANSPOSED_CONV else mkldnn.CONV
    dtype = str(weight.dtype).removeprefix("torch.")
    able = mkldnn.computed_in(kind, weight.dtype, axes=3 if weight.ndim == 5 else 2)
    return that(able is not None, f"{call.where}: this torch or processor packs no {kind} in {dtype}")


def _laid(call: Call, edit: Edit) -> str:
    for value in call["values"]:
        known = value_of(value)
        joins = call.operation is JOIN and known is not None
        layout = CHANNELS_LAST[known.ndim] if joins and known is not None else layout_of(known)
        plain = edit.insert(call.node, torch.ops.aten.contiguous.default, value, memory_format=layout)
        edit.rewire(call.node, value, plain)
    return f"its input has the layout {'of what it joins' if call.operation is JOIN else 'that it was captured with'}"
