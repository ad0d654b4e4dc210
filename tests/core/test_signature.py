"""`Transformation.signature`: equal for equal class and arguments, different otherwise, the same in every process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import torch
from torch import nn

import regraft as rg


class T(rg.Transformation):
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def transform(self, graph_module):
        return graph_module


class U(T):
    pass


@dataclass
class Point:
    x: int


class Slots:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


def helper(x):
    return x


def closure(n):
    return lambda x: x + n


VALUES = [-1, -2, 0, False, 0.0, -0.0, 1, True, 1.0, "1", b"1", None, (), [], {}, set(), (1,), [1], {1}, {1: 2}, {2: 1}]
VALUES += [float("inf"), 1j, torch.float16, torch.float32, torch.device("cpu"), torch.tensor(1.0), torch.tensor(2.0)]
VALUES += [
    torch.tensor([1.0]),
    torch.tensor(1),
    nn.ReLU(),
    nn.ReLU(True),
    nn.GELU(),
    nn.GELU("tanh"),
    Point(1),
    Point(2),
]
VALUES += [Slots(1), Slots(2), helper, len, torch.relu, torch.ops.aten.relu.default, closure(1), closure(2), "helper"]
VALUES += [
    lambda x: x + 1,
    lambda x: x + 2,
    lambda x, y=1: x,
    lambda x, y=2: x,
    int,
    nn.Linear,
    slice(1, 2),
    slice(1, 3),
]
VALUES += [[[1], 2], [[1, 2]], {"a": {"b": 1}}, {"a": {"b": 2}}, range(3), range(4), Ellipsis, nn.Hardtanh(-1, 2)]


def test_different_for_every_two_values():
    signatures = [T(value).signature for value in VALUES]
    clashes = [(VALUES[i], VALUES[j]) for i in range(len(VALUES)) for j in range(i) if signatures[i] == signatures[j]]
    assert not clashes


def test_equal_for_equal_values():
    for value in VALUES:
        assert T(value).signature == T(value).signature
    assert T([1, {2: [3]}]).signature == T([1, {2: [3]}]).signature
    assert T(Point(3)).signature == T(Point(3)).signature
    assert T(torch.ones(2)).signature == T(torch.ones(2)).signature
    assert T(a=1, b=2).signature == T(b=2, a=1).signature
    assert T(closure(3)).signature == T(closure(3)).signature
    assert rg.MergeLinears().signature == rg.MergeLinears().signature


def test_the_class_counts():
    assert T(1).signature != U(1).signature
    assert rg.FoldBatchNorm().signature != rg.FuseBatchNorm2dInConv2d().signature


def test_no_side_effect():
    t = T([1], a={2})
    before = dict(vars(t))
    assert t.signature == t.signature
    assert vars(t) == before


def test_cycles_end():
    loop: list[object] = [1]
    loop.append(loop)
    assert T(loop).signature == T(loop).signature


def test_the_same_in_every_process():
    program = """
import regraft as rg, torch
from torch import nn
class T(rg.Transformation):
    def __init__(self, *args): self.args = args
    def transform(self, graph_module): return graph_module
ts = [T(-1), T({'a', 'b', 'c', 'd'}), T(nn.ReLU()), T(torch.ones(3)), T(lambda x: x in ('a', 'b')), rg.MergeLinears()]
ts += [T(lambda x: x in {'a', 'b', 'c'}), T(nn.Linear), T(len), T(1), rg.compose(rg.MergeLinears(), T([1]))]
ts += [T(lambda x: [y for y in x]), T(lambda x: (lambda z: z + 1)(x))]
print([t.signature for t in ts])
"""
    run = [sys.executable, "-c", program]
    signatures = set()
    for seed in ("0", "1", "77"):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        signatures.add(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(signatures) == 1


def test_composition():
    def make(n):
        return rg.compose(T(n), rg.MergeLinears())

    assert make(1).signature == make(1).signature
    assert make(1).signature != make(2).signature
    assert rg.compose(T(1), T(2)).signature != rg.compose(T(2), T(1)).signature
    assert rg.compose(T(1)).signature != rg.compose(T(1), inplace=False).signature
