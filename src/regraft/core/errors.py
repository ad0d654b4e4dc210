"""Every error that regraft raises on purpose.

Each message says what is wrong, where, and what to do instead.
"""

from __future__ import annotations


class RegraftError(Exception):
    """The root of regraft's own errors."""


class CaptureError(RegraftError):
    """A model could not be captured; the message names the line of its source and the cure."""


class Refused(RegraftError):
    """One site does not meet a condition of a rewrite; the message is the sentence shown to the user.

    Raised by `require` inside a `Rewrite.rewrite`; the engine records it and leaves the site as it was.
    """


class NotCovered(RegraftError, TypeError):
    """A captured graph was called with sizes for which it does not hold; the message names the axis and the cure."""


class TransformationError(RegraftError, TypeError):
    """A transformation is not written as the engine needs it; the message names its class, the lack and the cure."""


class NothingApplied(RegraftError):
    """`strict=True` was asked for and a transformation found no site that it could rewrite."""


class ReversalConflict(RegraftError):
    """Something made later stands on what would be undone; nothing was changed."""


class VerificationError(RegraftError):
    """The candidate does not compute what the reference computes, within the bound."""
