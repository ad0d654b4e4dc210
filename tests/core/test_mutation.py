"""Which memory a value may share with others, and what writes into it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer, symbolic_trace
from torch.nn import functional as F

from regraft.core.mutation import Mutations, may_alias, weights_written

ALIASES: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "method with an overload that is given its output": (lambda x, y: x.mean(1), False),
    "function with such an overload": (lambda x, y: torch.add(x, y), False),
    "function with several outputs": (lambda x, y: torch.max(x, 1), False),
    "function given its output": (lambda x, y: torch.add(x, 1, out=y), True),
    "view": (lambda x, y: x.view(-1), True),
    "cast that may do nothing": (lambda x, y: x.to(y.dtype), True),
    "in place": (lambda x, y: x.add_(y), True),
    "einsum of one operand, which may be a view": (lambda x, y: torch.einsum("ij->ji", x), True),
    "einsum of two operands": (lambda x, y: torch.einsum("ij,jk->ik", x, y), False),
}


@pytest.mark.parametrize("name", ALIASES)
def test_may_alias(name: str) -> None:
    function, expected = ALIASES[name]
    gm = symbolic_trace(function)
    (*_, node) = (node for node in gm.graph.nodes if node.op != "output")
    assert may_alias(node, gm) is expected


@pytest.mark.parametrize(
    "equation", ["ij,jk->ik", "ij,ij->ij", "ij,ij->ji", "ij,->ij", "ij,kl->ijkl", "ij,i->i", "ii,ij->ji"]
)
def test_a_product_is_in_memory_of_its_own(equation: str) -> None:
    """What is held of einsum, and stands in no schema."""
    ranks = [len(axes) for axes in equation.split("->")[0].split(",")]
    for size in (1, 3):
        operands = [torch.randn([size] * rank) for rank in ranks]
        before = [each.clone() for each in operands]
        torch.einsum(equation, *operands).mul_(2).add_(1)
        assert all(map(torch.equal, operands, before))


class Table(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.table)


class WithBuffers(Tracer):
    proxy_buffer_attributes = True


def writes_to_the_table(function: Callable[[Tensor, Tensor], Tensor]) -> bool:
    module = Table(function)
    gm = GraphModule(module, WithBuffers().trace(module))
    (table,) = gm.graph.find_nodes(op="get_attr")
    return bool(Mutations(gm).of(table))


def test_sizes_are_no_memory() -> None:
    """ConViT and MViT expand weights and new tensors by the sizes of the same input."""
    assert not writes_to_the_table(lambda x, t: (lambda n: (x * 2).view(n, 6).add_(1) + t.expand(n, 6))(x.size(0)))
    assert not writes_to_the_table(lambda x, t: (lambda s: (x * 2).view(s[0] - 1).add_(1) + t.view(s[0]))(x.shape))
    assert writes_to_the_table(lambda x, table: table.expand(x.size(0), 6).add_(1) + x)


def test_an_index_is_no_memory_of_what_it_picks() -> None:
    assert not writes_to_the_table(lambda x, table: (x * 2)[table.argmax(1)].add_(1) + x)
    assert not writes_to_the_table(lambda x, table: (x * 2)[table.view(-1, 6).long()].add_(1))
    assert writes_to_the_table(lambda x, table: table[0].add_(1) + x)
    assert writes_to_the_table(lambda x, table: table[x.argmax()].add_(1) + x)  # a number would make it a view


def test_what_is_given_to_a_method_in_place_is_no_memory_of_its_result() -> None:
    assert not writes_to_the_table(lambda x, table: (x * 2).add_(table))
    assert not writes_to_the_table(lambda x, table: (x * 2).copy_(table).mul_(2))
    assert writes_to_the_table(lambda x, table: table.add_(x))
    assert writes_to_the_table(lambda x, table: table.view(-1).__and__(x).add(table.clamp_(0)))
    assert writes_to_the_table(lambda x, table: (x * 2).set_(table).add_(1))


NORMS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "of the batch": (lambda x, m, v, w: F.batch_norm(x, m, v, w, None, True), True),
    "of the batch, by name": (lambda x, m, v, w: F.batch_norm(x, running_var=v, running_mean=m, training=True), True),
    "of what was seen": (lambda x, m, v, w: F.batch_norm(x, m, v, w, training=False), False),
    "of what was seen, unsaid": (lambda x, m, v, w: F.batch_norm(x, m, v, w), False),
    "torch's": (lambda x, m, v, w: torch.batch_norm(x, w, None, m, v, True, 0.1, 1e-5, False), True),
    "torch's, of what was seen": (lambda x, m, v, w: torch.batch_norm(x, w, w, m, v, False, 0.1, 1e-5, False), False),
    "ATen's": (lambda x, m, v, w: torch.ops.aten.batch_norm.default(x, w, w, m, v, True, 0.1, 1e-5, False), True),
    "of an image": (lambda x, m, v, w: F.instance_norm(x[None], m, v, w), True),
    "of an image as seen": (lambda x, m, v, w: F.instance_norm(x[None], m, v, w, use_input_stats=False), False),
    "of an image, torch's": (
        lambda x, m, v, w: torch.instance_norm(x[None], w, w, m, v, True, 0.1, 1e-5, False),
        True,
    ),
    "of an image, ATen's": (
        lambda x, m, v, w: torch.ops.aten.instance_norm.default(x[None], w, w, m, v, False, 0.1, 1e-5, False),
        False,
    ),
}


class Norm(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        for name in ("mean", "var", "weight"):
            self.register_buffer(name, torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.mean, self.var, self.weight)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_in_training_writes_its_statistics(name: str) -> None:
    function, expected = NORMS[name]
    module = Norm(function)
    gm = GraphModule(module, WithBuffers().trace(module))
    named = {id(buffer): key for key, buffer in gm.named_buffers()}
    assert {named[id(tensor)] for tensor in weights_written(gm)} == ({"mean", "var"} if expected else set())
    before, x = copy.deepcopy(module.state_dict()), torch.randn(4, 4, 6)
    module(x[0] if "image" in name else x)
    for key, value in before.items():  # and so it is
        assert torch.equal(getattr(module, key), value) is not (expected and key != "weight")
