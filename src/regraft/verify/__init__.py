"""Whether a rewritten model still computes the same thing, where it went wrong, and whether it is faster."""

from regraft.verify.bisect import Culprit, bisect
from regraft.verify.depth import Depth, error_by_depth
from regraft.verify.measure import Comparison, compare_speed
from regraft.verify.result import Case, Leaf, Verification
from regraft.verify.verify import verify

__all__ = [
    "Case",
    "Comparison",
    "Culprit",
    "Depth",
    "Leaf",
    "Verification",
    "bisect",
    "compare_speed",
    "error_by_depth",
    "verify",
]
