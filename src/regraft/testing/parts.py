"""What generated models are made of beside `torch.nn`; it can be imported, so a printed model runs as it stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions


class DoubledLinear(nn.Linear):
    """A linear layer with a `forward` of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Twice what a linear layer gives."""
        return 2 * super().forward(input)


def add_one(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """A forward hook that changes the result."""
    return output + 1


def negate(_module: nn.Module, args: Any) -> Any:
    """A forward pre-hook that changes the input."""
    return tuple(-value for value in args)


def randomised(model: nn.Module) -> nn.Module:
    """The model with other numbers in every weight and every statistic: fresh ones hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not name.rpartition(".")[2].startswith("constant"):
            values = torch.rand(tensor.shape, generator=generator)
            tensor.detach().copy_(values + 0.3 if name.endswith("running_var") else values * 1.6 - 0.8)
    return model


def numbers(*shape: int) -> Tensor:
    """Random numbers, the same ones each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def traced_with_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
    """The model traced by fx, with a fake tensor in the `meta` of every node."""
    gm = torch.fx.symbolic_trace(model)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*args, *kwargs.values())
    return gm


def nested(gm: GraphModule, start: int, length: int) -> GraphModule:
    """The graph with `length` of its nodes, from number `start` on, in a graph module of their own."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    chosen = nodes[start % max(1, len(nodes)) :][:length]
    if not any(user not in chosen for node in chosen for user in node.users):
        return gm
    fused = fuse_by_partitions(gm, [dict.fromkeys(chosen)])
    return GraphModule(fused, fused.graph)  # a layer that has gone inside has left its old place
