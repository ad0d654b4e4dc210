"""Tests for transformations of your own: two assertions, and a fuzzer that tries to break a rule.

>>> import torch, regraft as rg
>>> from regraft.testing import assert_round_trip
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 3)).eval()
>>> assert_round_trip(rg.FuseBiasInLinear(), model, (torch.randn(2, 4),)).applied
1
"""

from regraft.testing.fuzzing import Program, fuzz, programs
from regraft.testing.laws import assert_refused, assert_round_trip
from regraft.testing.picture import assert_same_picture, picture

__all__ = [
    "Program",
    "assert_refused",
    "assert_round_trip",
    "assert_same_picture",
    "fuzz",
    "picture",
    "programs",
]
