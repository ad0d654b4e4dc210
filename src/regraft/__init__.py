"""regraft rewrites the graph of a PyTorch model so that it runs faster, proves that the result computes the same thing,
says what it did and what it refused and why, and can take any of it back, bit for bit."""

from regraft.capture import lift, symbolic_trace, trace
from regraft.core.compose import compose
from regraft.core.edit import Edit
from regraft.core.errors import (
    CaptureError,
    NothingApplied,
    Refused,
    RegraftError,
    ReversalConflict,
    VerificationError,
)
from regraft.core.history import forget, history, undo
from regraft.core.journal import Step
from regraft.core.pattern import Calls, Match, Pattern, Siblings
from regraft.core.query import Facts, require, that
from regraft.core.report import Report
from regraft.core.rewrite import Rewrite
from regraft.core.transformation import ReversibleTransformation, Transformation
from regraft.transformations import (
    TRANSFORMATIONS,
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FoldBatchNorm,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    LintAndRecompile,
    MergeLinears,
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
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "LintAndRecompile",
    "Match",
    "MergeLinears",
    "NothingApplied",
    "Pattern",
    "Refused",
    "RegraftError",
    "Report",
    "ReversalConflict",
    "ReversibleTransformation",
    "Rewrite",
    "Siblings",
    "Step",
    "Transformation",
    "Verification",
    "VerificationError",
    "bisect",
    "compose",
    "forget",
    "history",
    "lift",
    "require",
    "symbolic_trace",
    "that",
    "trace",
    "undo",
    "verify",
]
