"""The operations of activations, attention and norms."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.nn import functional as F

from regraft.core.operation import Operation
from regraft.core.operation import overloads as _overloads

RELU = Operation(
    "relu",
    "input inplace",
    (F.relu, torch.relu, torch.relu_, *_overloads("relu.default")),
    ("relu", "relu_"),
    (nn.ReLU,),
)
RELU6 = Operation("relu6", "input inplace", (F.relu6, *_overloads("relu6.default")), (), (nn.ReLU6,))
HARDTANH = Operation(
    "hardtanh",
    "input min_val max_val inplace",
    (F.hardtanh, *_overloads("hardtanh.default")),
    (),
    (nn.Hardtanh,),
    {"min_val": -1.0, "max_val": 1.0},
)
GELU = Operation(
    "gelu", "input approximate", (F.gelu, *_overloads("gelu.default")), (), (nn.GELU,), {"approximate": "none"}
)
SILU = Operation("silu", "input inplace", (F.silu, *_overloads("silu.default")), (), (nn.SiLU,))
HARDSWISH = Operation(
    "hardswish", "input inplace", (F.hardswish, *_overloads("hardswish.default")), (), (nn.Hardswish,)
)
HARDSIGMOID = Operation(
    "hardsigmoid", "input inplace", (F.hardsigmoid, *_overloads("hardsigmoid.default")), (), (nn.Hardsigmoid,)
)
LEAKY_RELU = Operation(
    "leaky relu",
    "input negative_slope inplace",
    (F.leaky_relu, *_overloads("leaky_relu.default")),
    (),
    (nn.LeakyReLU,),
    {"negative_slope": 0.01},
)
SIGMOID = Operation(
    "sigmoid",
    "input",
    (torch.sigmoid, torch.special.expit, F.sigmoid, *_overloads("sigmoid.default")),
    ("sigmoid", "sigmoid_"),
    (nn.Sigmoid,),
)
TANH = Operation("tanh", "input", (torch.tanh, F.tanh, *_overloads("tanh.default")), ("tanh", "tanh_"), (nn.Tanh,))
SOFTMAX = Operation(
    "softmax",
    "input dim dtype",
    (torch.softmax, F.softmax, torch.special.softmax, *_overloads("softmax.int")),
    ("softmax",),
    (nn.Softmax,),
    orders={F.softmax: "input dim _stacklevel dtype"},
)
MATMUL = Operation(
    "matrix product",
    "input other",
    (operator.matmul, torch.matmul, torch.bmm, torch.mm, *_overloads("matmul.default", "bmm.default", "mm.default")),
    ("matmul", "bmm", "mm", "__matmul__"),
)
ADDMM = Operation(
    "product and sum",
    "bias input other beta alpha",
    (torch.addmm, *_overloads("addmm.default")),
    ("addmm",),
    defaults={"beta": 1, "alpha": 1},
)
PRODUCT_AND_SUM = Operation(
    "batched product and sum",
    "bias input other beta alpha",
    (torch.baddbmm, *_overloads("baddbmm.default")),
    ("baddbmm",),
    defaults={"beta": 1, "alpha": 1},
)
MASKED_FILL = Operation(
    "masked fill",
    "input mask value",
    (torch.masked_fill, *_overloads("masked_fill.Scalar", "masked_fill.Tensor")),
    ("masked_fill",),
)
WHERE = Operation(
    "where",
    "condition input other",
    (torch.where, *_overloads("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")),
)
TRANSPOSE = Operation(
    "transpose",
    "input dim0 dim1",
    (torch.transpose, torch.swapaxes, torch.swapdims, *_overloads("transpose.int")),
    ("transpose", "swapaxes", "swapdims"),
)
ADJOINT = Operation(
    "adjoint", "input", (torch.adjoint, *_overloads("adjoint.default", "mT.default", "mH.default")), ("adjoint",)
)
PERMUTE = Operation("permute", "input shape", (torch.permute, *_overloads("permute.default")), ("permute",))
MATRIX_TRANSPOSE = Operation(
    "transpose of a matrix", "input", (torch.t, *_overloads("t.default", "numpy_T.default")), ("t",)
)
EXPAND = Operation("expand", "input shape", _overloads("expand.default"), ("expand",))
REPEAT = Operation(
    "repeat",
    "input repeats dim",
    (torch.repeat_interleave, *_overloads("repeat_interleave.self_int")),
    ("repeat_interleave",),
)
UNSQUEEZE = Operation("unsqueeze", "input dim", (torch.unsqueeze, *_overloads("unsqueeze.default")), ("unsqueeze",))
CAST = Operation(
    "cast", "input dtype", _overloads("to.dtype"), ("to", "type", "float", "double", "half", "bfloat16", "type_as")
)
MEAN = Operation(
    "mean", "input dim keepdim dtype", (torch.mean, *_overloads("mean.dim")), ("mean",), (), {"keepdim": False}
)
VARIANCE = Operation(
    "variance",
    "input dim unbiased keepdim correction",
    (torch.var, *_overloads("var.dim")),
    ("var",),
    (),
    {"keepdim": False},
)
POWER = Operation(
    "power", "input exponent", (operator.pow, torch.pow, *_overloads("pow.Tensor_Scalar")), ("pow", "__pow__")
)
SQUARE = Operation("square", "input", (torch.square, *_overloads("square.default")), ("square",))
SQRT = Operation("square root", "input", (torch.sqrt, *_overloads("sqrt.default")), ("sqrt",))
RSQRT = Operation("inverse square root", "input", (torch.rsqrt, *_overloads("rsqrt.default")), ("rsqrt",))
ERF = Operation(
    "error function",
    "input",
    (torch.erf, torch.special.erf, *_overloads("erf.default", "special_erf.default")),
    ("erf",),
)
NEGATE = Operation("negate", "input", (operator.neg, torch.neg, torch.negative, *_overloads("neg.default")), ("neg",))
EMBEDDING = Operation(
    "embedding",
    "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    (F.embedding,),
    (),
    (nn.Embedding,),
    {"norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False},
)
LAYER_NORM = Operation(
    "layer norm",
    "input normalized_shape weight bias eps",
    (F.layer_norm, torch.layer_norm, *_overloads("layer_norm.default")),
    (),
    (nn.LayerNorm,),
    {"eps": 1e-5},
)
RMS_NORM = Operation(
    "RMS norm",
    "input normalized_shape weight eps",
    (F.rms_norm, torch.rms_norm, *_overloads("rms_norm.default")),
    (),
    (nn.RMSNorm,),
)
INSTANCE_NORM = Operation(
    "instance norm",
    "input running_mean running_var weight bias use_input_stats momentum eps",
    (F.instance_norm, torch.instance_norm, *_overloads("instance_norm.default")),
    (),
    (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
    dict.fromkeys(
        (torch.instance_norm, *_overloads("instance_norm.default")),
        "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
    ),
)
ATTENTION = Operation(
    "attention",
    "input key value attn_mask dropout_p is_causal scale enable_gqa",
    (F.scaled_dot_product_attention, *_overloads("scaled_dot_product_attention.default")),
    defaults={"dropout_p": 0.0, "is_causal": False, "enable_gqa": False},
)
