"""Existing engines that run a rewritten graph: which are there, whether they are right, and whether they are faster."""

from regraft.optimize.engines.choosing import PAIRS, EngineResult, adopt_engine, let_go, pause_after
from regraft.optimize.engines.wanted import ENGINES, expect_engines

__all__ = ["ENGINES", "PAIRS", "EngineResult", "adopt_engine", "expect_engines", "let_go", "pause_after"]
