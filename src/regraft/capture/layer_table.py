"""From one ATen call to the layer of `torch.nn` that makes it, for programs that come without their model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

aten = torch.ops.aten

#: the arguments of a call that are no nodes, by name, and its tensors by name
Call = Mapping[str, Any]
Builder = Callable[[Call], nn.Module]


def _linear(call: Call) -> nn.Module:
    out_features, in_features = call["weight"].shape
    return nn.Linear(in_features, out_features, bias=call["bias"] is not None)


def _conv(kind: type[Any]) -> Builder:
    def build(call: Call) -> nn.Module:
        weight, groups = call["weight"], call["groups"]
        padding = call["padding"] if isinstance(call["padding"], str) else tuple(call["padding"])
        return kind(  # type: ignore[no-any-return]
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),
            stride=tuple(call["stride"]),
            padding=padding,
            dilation=tuple(call["dilation"]),
            groups=groups,
            bias=call["bias"] is not None,
        )

    return build


def _transposed(kind: type[Any]) -> Builder:
    def build(call: Call) -> nn.Module:
        weight, groups = call["weight"], call["groups"]
        return kind(  # type: ignore[no-any-return]
            weight.shape[0],
            weight.shape[1] * groups,
            tuple(weight.shape[2:]),
            stride=tuple(call["stride"]),
            padding=tuple(call["padding"]),
            output_padding=tuple(call["output_padding"]),
            groups=groups,
            bias=call["bias"] is not None,
            dilation=tuple(call["dilation"]),
        )

    return build


def _batch_norm(kind: type[Any]) -> Builder:
    def build(call: Call) -> nn.Module:
        known = next(call[name] for name in ("running_mean", "weight") if call[name] is not None)
        norm = kind(
            known.shape[0],
            eps=call["eps"],
            momentum=call["momentum"],
            affine=call["weight"] is not None,
            track_running_stats=call["running_mean"] is not None,
        )
        return norm.train(call["training"])  # type: ignore[no-any-return]

    return build


def _layer_norm(call: Call) -> nn.Module:
    affine = call["weight"] is not None
    shape = list(call["normalized_shape"])
    return nn.LayerNorm(shape, eps=call["eps"], elementwise_affine=affine, bias=call["bias"] is not None)


def _rms_norm(call: Call) -> nn.Module:
    return nn.RMSNorm(list(call["normalized_shape"]), eps=call["eps"], elementwise_affine=call["weight"] is not None)


def _group_norm(call: Call) -> nn.Module:
    channels = call["weight"].shape[0]
    return nn.GroupNorm(call["num_groups"], channels, eps=call["eps"])


def _embedding(call: Call) -> nn.Module:
    count, width = call["weight"].shape
    index = call["padding_idx"] if call["padding_idx"] >= 0 else None
    return nn.Embedding(
        count, width, padding_idx=index, scale_grad_by_freq=call["scale_grad_by_freq"], sparse=call["sparse"]
    )


def _pool(kind: type[Any]) -> Builder:
    def build(call: Call) -> nn.Module:
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override")
        given = {name: call[name] for name in names if name in call}
        if not given["stride"]:
            given["stride"] = given["kernel_size"]
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})  # type: ignore[no-any-return]

    return build


def _plain(kind: type[Any], **names: str) -> Builder:
    """A layer whose settings are arguments of the call: by the layer's name for it, the call's."""
    return lambda call: kind(**{setting: call[name] for setting, name in names.items()})


#: by class and overload; a layer that is not here stays the call that it was exported to
BUILDERS: dict[tuple[type[nn.Module], Any], Builder] = {
    (nn.Linear, aten.linear.default): _linear,
    **{(k, o): _conv(k) for k, o in ((nn.Conv1d, aten.conv1d.default), (nn.Conv2d, aten.conv2d.default))},
    (nn.Conv3d, aten.conv3d.default): _conv(nn.Conv3d),
    (nn.Conv1d, aten.conv1d.padding): _conv(nn.Conv1d),
    (nn.Conv2d, aten.conv2d.padding): _conv(nn.Conv2d),
    (nn.Conv3d, aten.conv3d.padding): _conv(nn.Conv3d),
    (nn.ConvTranspose1d, aten.conv_transpose1d.default): _transposed(nn.ConvTranspose1d),
    (nn.ConvTranspose2d, aten.conv_transpose2d.input): _transposed(nn.ConvTranspose2d),
    (nn.ConvTranspose3d, aten.conv_transpose3d.input): _transposed(nn.ConvTranspose3d),
    **{(k, aten.batch_norm.default): _batch_norm(k) for k in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
    (nn.LayerNorm, aten.layer_norm.default): _layer_norm,
    (nn.RMSNorm, aten.rms_norm.default): _rms_norm,
    (nn.GroupNorm, aten.group_norm.default): _group_norm,
    (nn.Embedding, aten.embedding.default): _embedding,
    (nn.MaxPool1d, aten.max_pool1d.default): _pool(nn.MaxPool1d),
    (nn.MaxPool2d, aten.max_pool2d.default): _pool(nn.MaxPool2d),
    (nn.AvgPool2d, aten.avg_pool2d.default): _pool(nn.AvgPool2d),
    (nn.AdaptiveAvgPool1d, aten.adaptive_avg_pool1d.default): _plain(nn.AdaptiveAvgPool1d, output_size="output_size"),
    (nn.AdaptiveAvgPool2d, aten.adaptive_avg_pool2d.default): _plain(nn.AdaptiveAvgPool2d, output_size="output_size"),
    (nn.Flatten, aten.flatten.using_ints): _plain(nn.Flatten, start_dim="start_dim", end_dim="end_dim"),
    (nn.ReLU, aten.relu.default): _plain(nn.ReLU),
    (nn.ReLU, aten.relu_.default): lambda _: nn.ReLU(inplace=True),
    (nn.ReLU6, aten.relu6.default): _plain(nn.ReLU6),
    (nn.GELU, aten.gelu.default): _plain(nn.GELU, approximate="approximate"),
    (nn.SiLU, aten.silu.default): _plain(nn.SiLU),
    (nn.SiLU, aten.silu_.default): lambda _: nn.SiLU(inplace=True),
    (nn.Mish, aten.mish.default): _plain(nn.Mish),
    (nn.Tanh, aten.tanh.default): _plain(nn.Tanh),
    (nn.Sigmoid, aten.sigmoid.default): _plain(nn.Sigmoid),
    (nn.Hardswish, aten.hardswish.default): _plain(nn.Hardswish),
    (nn.Hardsigmoid, aten.hardsigmoid.default): _plain(nn.Hardsigmoid),
    (nn.LeakyReLU, aten.leaky_relu.default): _plain(nn.LeakyReLU, negative_slope="negative_slope"),
    (nn.Softmax, aten.softmax.int): _plain(nn.Softmax, dim="dim"),
    (nn.LogSoftmax, aten.log_softmax.int): _plain(nn.LogSoftmax, dim="dim"),
    (nn.Dropout, aten.dropout.default): lambda call: nn.Dropout(call["p"]).train(call["train"]),
}


def arguments_of(node: Node, tensor: Callable[[Node], Any]) -> dict[str, Any]:
    """The arguments of an ATen call by name, defaults included, with `tensor(node)` in the place of nodes.

    Args:
        node: the call.
        tensor: what stands for a node.
    """
    found: dict[str, Any] = {}
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = parameter.default_value if parameter.has_default_value() else None
        value = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name, default)
        if isinstance(value, (list, tuple)):
            value = [tensor(part) if isinstance(part, Node) else part for part in value]
        found[parameter.name] = tensor(value) if isinstance(value, Node) else value
    return found
