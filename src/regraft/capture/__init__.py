"""Capture: a model becomes a graph of its own layers."""

from regraft.capture.lift import lift
from regraft.capture.symbolic import symbolic_trace
from regraft.capture.trace import trace

__all__ = ["lift", "symbolic_trace", "trace"]
