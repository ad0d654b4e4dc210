"""Existing engines that run a rewritten graph: which are there, whether they are right, and whether they are faster."""

from regraft.optimize.engines.choosing import ENGINES, PAIRS, EngineResult, adopt_engine, let_go, pause_after

__all__ = ["ENGINES", "PAIRS", "EngineResult", "adopt_engine", "let_go", "pause_after"]
