"""The operations of layers and arithmetic, and views."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from regraft.core.operation import Operation
from regraft.core.operation import overloads as _overloads

_CONV = "input weight bias stride padding dilation groups"
_CONV_DEFAULTS: Mapping[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_ATEN_BATCH_NORM = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_TRANSPOSED_DEFAULTS: Mapping[str, Any] = {**_CONV_DEFAULTS, "output_padding": 0}

ADD = Operation(
    "add", "input other alpha", (operator.add, torch.add, *_overloads("add.Tensor", "add.Scalar")), ("add", "__add__")
)
ADD_IN_PLACE = Operation(
    "add in place",
    "input other alpha",
    (operator.iadd, *_overloads("add_.Tensor", "add_.Scalar")),
    ("add_", "__iadd__"),
)
SUBTRACT = Operation(
    "subtract",
    "input other alpha",
    (
        operator.sub,
        torch.sub,
        torch.subtract,
        *_overloads("sub.Tensor", "sub.Scalar", "subtract.Tensor", "subtract.Scalar"),
    ),
    ("sub", "subtract"),
)
MULTIPLY = Operation(
    "multiply",
    "input other",
    (
        operator.mul,
        torch.mul,
        torch.multiply,
        *_overloads("mul.Tensor", "mul.Scalar", "multiply.Tensor", "multiply.Scalar"),
    ),
    ("mul", "multiply"),
)
DIVIDE = Operation(
    "divide",
    "input other rounding_mode",
    (
        operator.truediv,
        operator.itruediv,
        torch.div,
        torch.divide,
        torch.true_divide,
        *_overloads("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor"),
        *_overloads("true_divide.Scalar", "divide.Tensor", "divide.Scalar", "divide.Tensor_mode", "divide.Scalar_mode"),
    ),
    ("div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_"),
)
LINEAR = Operation(
    "linear", "input weight bias", (F.linear, torch._C._nn.linear, *_overloads("linear.default")), (), (nn.Linear,)
)
CONV = Operation(
    "convolution",
    _CONV,
    (F.conv1d, F.conv2d, F.conv3d, *_overloads("conv1d.default", "conv2d.default", "conv3d.default")),
    (),
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    _CONV_DEFAULTS,
)
TRANSPOSED_CONV = Operation(
    "transposed convolution",
    _TRANSPOSED,
    (
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        *_overloads("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
    ),
    (),
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    _TRANSPOSED_DEFAULTS,
)
BATCH_NORM = Operation(
    "batch norm",
    "input running_mean running_var weight bias training momentum eps",
    (F.batch_norm, torch.batch_norm, *_overloads("batch_norm.default")),
    (),
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    {"training": False, "momentum": 0.1, "eps": 1e-5},
    dict.fromkeys((torch.batch_norm, *_overloads("batch_norm.default")), _ATEN_BATCH_NORM),
    (nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
IDENTITY = Operation("identity", "input", (), (), (nn.Identity,))
DROPOUT = Operation(
    "dropout",
    "input p training inplace",
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
        *_overloads("dropout.default"),
    ),
    (),
    (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    {"training": True, "inplace": False},
)
FLATTEN = Operation(
    "flatten",
    "input start_dim end_dim",
    (torch.flatten, *_overloads("flatten.using_ints")),
    ("flatten",),
    (nn.Flatten,),
    {"start_dim": 0, "end_dim": -1},
)
RESHAPE = Operation(
    "reshape",
    "input shape",
    (
        torch.reshape,
        *_overloads("reshape.default", "view.default", "_unsafe_view.default", "reshape_as.default", "view_as.default"),
    ),
    ("reshape", "view", "reshape_as", "view_as"),
)
PAD = Operation(
    "pad",
    "input pad mode value",
    (F.pad, *_overloads("constant_pad_nd.default", "pad.default")),
    modules=(
        *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
        *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    ),
    defaults={"mode": "constant"},
    orders=dict.fromkeys(_overloads("constant_pad_nd.default"), "input pad value"),
    attributes={"pad": "padding"},
)
INDEX = Operation("index", "input index", (operator.getitem,), ("__getitem__",))
