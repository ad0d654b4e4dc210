"""The built-in transformations, one file each."""

from regraft.transformations.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from regraft.transformations.deep_copy import DeepCopy
from regraft.transformations.fold_batch_norm import FoldBatchNorm
from regraft.transformations.fold_scale import FoldScale
from regraft.transformations.fuse_attention import FuseAttention
from regraft.transformations.fuse_batch_norm1d_in_linear import FuseBatchNorm1dInLinear
from regraft.transformations.fuse_batch_norm2d_in_conv2d import FuseBatchNorm2dInConv2d
from regraft.transformations.fuse_bias_in_linear import FuseBiasInLinear
from regraft.transformations.fuse_gelu import FuseGelu
from regraft.transformations.fuse_norm import FuseNorm
from regraft.transformations.fuse_pad import FusePad
from regraft.transformations.hoist_activation import HoistActivation
from regraft.transformations.lint_and_recompile import LintAndRecompile
from regraft.transformations.merge_convs import MergeConvs
from regraft.transformations.merge_linears import MergeLinears
from regraft.transformations.pad_attention import PadAttention
from regraft.transformations.prepack_for_cpu import PrepackForCpu
from regraft.transformations.quantize import Quantize
from regraft.transformations.reduce_precision import ReducePrecision
from regraft.transformations.remove_dead_work import RemoveDeadWork
from regraft.transformations.remove_unread_rows import RemoveUnreadRows
from regraft.transformations.replace_activation import ReplaceActivation
from regraft.transformations.replace_einsum import ReplaceEinsum
from regraft.transformations.replace_matmul import ReplaceMatmul
from regraft.transformations.sum_convs import SumConvs

TRANSFORMATIONS = (
    MergeLinears,
    FuseBiasInLinear,
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm2dInConv2d,
    FuseBatchNorm1dInLinear,
    FoldBatchNorm,
    RemoveDeadWork,
    RemoveUnreadRows,
    FuseGelu,
    FusePad,
    HoistActivation,
    ReducePrecision,
    Quantize,
    PadAttention,
    PrepackForCpu,
    FuseAttention,
    FuseNorm,
    MergeConvs,
    SumConvs,
    ReplaceActivation,
    ReplaceEinsum,
    ReplaceMatmul,
    FoldScale,
    DeepCopy,
    LintAndRecompile,
)

__all__ = [
    "TRANSFORMATIONS",
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
    "FoldBatchNorm",
    "FoldScale",
    "FuseAttention",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "FuseGelu",
    "FuseNorm",
    "FusePad",
    "HoistActivation",
    "LintAndRecompile",
    "MergeConvs",
    "MergeLinears",
    "PadAttention",
    "PrepackForCpu",
    "Quantize",
    "ReducePrecision",
    "RemoveDeadWork",
    "RemoveUnreadRows",
    "ReplaceActivation",
    "ReplaceEinsum",
    "ReplaceMatmul",
    "SumConvs",
]
