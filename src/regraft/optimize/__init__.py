"""The five steps in one call: capture, transform, verify, measure, and keep what pays."""

from regraft.optimize.optimize import optimize
from regraft.optimize.result import Optimized
from regraft.optimize.saving import load
from regraft.optimize.step_result import StepResult

__all__ = ["Optimized", "StepResult", "load", "optimize"]
