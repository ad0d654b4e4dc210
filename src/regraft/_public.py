"""Everything that `regraft` offers: to add a name, import it here and put it into `__all__`.

`regraft/__init__.py` imports this module when the first of the names is asked for.
"""

from regraft.capture import lift, symbolic_trace, trace
from regraft.core.checkpoint import load_original_state_dict, original_state_dict
from regraft.core.compose import compose
from regraft.core.edit import Edit
from regraft.core.errors import (
    CaptureError,
    NothingApplied,
    Refused,
    RegraftError,
    ReversalConflict,
    TransformationError,
    VerificationError,
)
from regraft.core.history import forget, history, undo
from regraft.core.journal import Step
from regraft.core.pattern import Calls, Match, Pattern, Siblings
from regraft.core.query import Facts, require, that
from regraft.core.report import Report
from regraft.core.rewrite import Rewrite
from regraft.core.transformation import ReversibleTransformation, Transformation
from regraft.optimize import Optimized, StepResult, load, optimize
from regraft.transformations import (
    TRANSFORMATIONS,
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FoldBatchNorm,
    FoldScale,
    FuseAttention,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    FuseGelu,
    FuseNorm,
    FusePad,
    HoistActivation,
    LintAndRecompile,
    MergeConvs,
    MergeLinears,
    PadAttention,
    PrepackForCpu,
    Quantize,
    ReducePrecision,
    RemoveDeadWork,
    RemoveUnreadRows,
    ReplaceActivation,
    ReplaceEinsum,
    ReplaceMatmul,
    SumConvs,
)
from regraft.verify import Culprit, Verification, bisect, verify

__all__ = [
    "TRANSFORMATIONS",
    "Calls",
    "CaptureError",
    "ChangeTrueDivToMulByInverse",
    "Culprit",
    "DeepCopy",
    "Edit",
    "Facts",
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
    "Match",
    "MergeConvs",
    "MergeLinears",
    "NothingApplied",
    "Optimized",
    "Pattern",
    "PadAttention",
    "PrepackForCpu",
    "Quantize",
    "ReducePrecision",
    "Refused",
    "RegraftError",
    "RemoveDeadWork",
    "RemoveUnreadRows",
    "ReplaceActivation",
    "ReplaceEinsum",
    "ReplaceMatmul",
    "Report",
    "ReversalConflict",
    "ReversibleTransformation",
    "Rewrite",
    "Siblings",
    "Step",
    "StepResult",
    "SumConvs",
    "Transformation",
    "TransformationError",
    "Verification",
    "VerificationError",
    "bisect",
    "compose",
    "forget",
    "history",
    "lift",
    "load",
    "load_original_state_dict",
    "optimize",
    "original_state_dict",
    "require",
    "symbolic_trace",
    "that",
    "trace",
    "undo",
    "verify",
]
