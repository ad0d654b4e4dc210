"""The graph module through copies, pickle and `torch.save`: nothing may be lost, nothing traced again."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from regraft.capture import trace
from regraft.core.graph_module import GraphModule, adopt
from regraft.core.portable import portable


def saved(gm: Any) -> Any:
    stream = io.BytesIO()
    torch.save(gm, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def pickled(gm: Any) -> Any:
    return pickle.loads(pickle.dumps(gm))


every_way = pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, pickled, saved])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.inner[0].weight
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("lost", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.inner(x))[:, 1:3] + torch.ops.aten.relu.default(self.lost[0])


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def captured() -> GraphModule:
    model = Model().eval()
    gm = trace(model, (torch.randn(3, 4),), dynamic_shapes="auto")
    gm.register_forward_hook(doubled)
    gm.meta["journal"] = {"weight": gm.tied.weight, "layer": gm.tied, "self": gm}
    gm.note = ["mine", gm.inner]
    gm.tied.train()
    return gm


@every_way
def test_nothing_is_lost(again: Callable[[Any], Any]) -> None:
    gm = captured()
    other = again(gm)
    x = torch.randn(5, 4)
    assert isinstance(other, GraphModule)
    assert other.code == gm.code
    assert type(other).__name__ == type(gm).__name__
    assert [(n.name, n.op, str(n.target)) for n in other.graph.nodes] == [
        (n.name, n.op, str(n.target)) for n in gm.graph.nodes
    ]
    assert list(other.state_dict()) == list(gm.state_dict())
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in gm.named_parameters()]
    assert {name: module.training for name, module in other.named_modules()} == {
        name: module.training for name, module in gm.named_modules()
    }
    assert torch.equal(other(x), gm(x))
    assert other.tied.weight is other.get_submodule("inner.0").weight
    assert other.meta["journal"]["weight"] is other.tied.weight
    assert other.meta["journal"]["layer"] is other.tied
    assert other.note[0] == "mine"
    with pytest.raises(TypeError, match="axis 1 of x"):
        other(torch.randn(2, 5))
    other.graph.lint()


@every_way
def test_the_next_node_gets_the_same_name(again: Callable[[Any], Any]) -> None:
    gm = captured()
    names = []
    for module in (again(gm), gm):
        with module.graph.inserting_before(module.graph.output_node()):
            source = module.graph.output_node().args[0]
            names.append([module.graph.call_function(operator.add, (source, 1)).name for _ in range(2)])
    assert names[0] == names[1]


def test_copies_share_what_they_should() -> None:
    gm = captured()
    deep, shallow = copy.deepcopy(gm), copy.copy(gm)
    assert deep.tied is not gm.tied
    assert deep.meta["journal"]["self"] is deep
    assert shallow.tied is gm.tied
    assert shallow.inner is not gm.inner
    assert shallow.graph is not gm.graph
    assert shallow.inner.get_submodule("0") is gm.inner.get_submodule("0")
    for old, new in zip(gm.graph.nodes, deep.graph.nodes):
        assert old is not new
        assert old.meta.get("val") is new.meta.get("val")
    shallow.delete_submodule("tied")
    assert hasattr(gm, "tied")


def test_fake_tensors_come_back_with_their_symbols() -> None:
    gm = captured()
    other = pickled(gm)
    modes = set()
    for old, new in zip(gm.graph.nodes, other.graph.nodes):
        before, after = old.meta.get("val"), new.meta.get("val")
        assert type(before) is type(after)
        if isinstance(after, FakeTensor):
            modes.add(id(after.fake_mode))
            assert str(before.shape) == str(after.shape)
            assert str(before.stride()) == str(after.stride())
            assert (before.dtype, before.device) == (after.dtype, after.device)
            assert before.requires_grad == after.requires_grad
        assert old.meta.get("stack_trace") == new.meta.get("stack_trace")
        assert old.meta.get("nn_module_stack") == new.meta.get("nn_module_stack")
    assert len(modes) == 1
    placeholder = next(iter(other.graph.nodes))
    with placeholder.meta["val"].fake_mode:
        assert str((placeholder.meta["val"] + 1).shape) == str(placeholder.meta["val"].shape)


def test_what_cannot_be_saved_names_the_node() -> None:
    gm = adopt(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(lambda x: x, (1,)).name = "culprit"
    with pytest.raises(ValueError, match="culprit"):
        pickle.dumps(gm)


def test_unpicklable_meta_is_dropped_and_no_more() -> None:
    gm = adopt(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    node = next(iter(gm.graph.nodes))
    node.meta.update(bad=lambda: None, good=[1, {"a": (2, torch.float16)}])
    meta = next(iter(pickled(gm).graph.nodes)).meta
    assert "bad" not in meta
    assert meta["good"] == node.meta["good"]


def test_nested_graph_modules() -> None:
    inner = adopt(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    outer = adopt(torch.fx.symbolic_trace(nn.Sequential(inner, nn.ReLU())))
    x = torch.randn(3, 2)
    for other in (copy.deepcopy(outer), pickled(outer)):
        assert torch.equal(other(x), outer(x))


def test_a_derived_class_stays() -> None:
    layer = nn.Linear(2, 2)
    module = Derived(layer, torch.fx.Tracer().trace(layer))
    assert adopt(module) is module
    for other in (module, copy.deepcopy(module), pickled(module)):
        assert isinstance(other, Derived)
        assert isinstance(other, GraphModule)
        assert other.greeting() == "hello"
    assert torch.equal(pickled(module)(torch.ones(1, 2)), layer(torch.ones(1, 2)))


class Derived(torch.fx.GraphModule):
    def greeting(self) -> str:
        return "hello"


def test_objects_of_others_can_keep_fake_tensors() -> None:
    gm = captured()
    gm.meta["history"] = Keeper([node.meta.get("val") for node in gm.graph.nodes])
    other = pickled(gm)
    kept = other.meta["history"].values
    assert [str(value) for value in kept] == [str(node.meta.get("val")) for node in gm.graph.nodes]
    assert kept[0].fake_mode is next(iter(other.graph.nodes)).meta["val"].fake_mode
    copy.deepcopy(gm)


class Keeper:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __getstate__(self) -> Any:
        return portable(self.__dict__)


def test_a_memory_format_among_the_arguments_is_saved() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.contiguous(memory_format=torch.channels_last) + 1

    gm = adopt(torch.fx.symbolic_trace(Model()))
    buffer = io.BytesIO()
    torch.save(gm, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).code == gm.code


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, torch.fx.GraphModule) or super().is_leaf_module(m, name)


@pytest.mark.parametrize("wrap", [lambda gm: gm, adopt, nn.Sequential], ids=["plain", "regraft's", "in a container"])
@every_way
def test_graph_modules_inside_are_copied_and_saved_whole(again: Callable[[Any], Any], wrap: Any) -> None:
    inner = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    next(iter(inner.graph.nodes)).meta["note"] = 1
    model = nn.Sequential(nn.ReLU(), wrap(inner))
    nodes, kind = list(inner.graph.nodes), type(inner)
    gm = adopt(torch.fx.GraphModule(model, Leaves().trace(model)))
    (part,) = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm]
    assert part is not inner
    assert part.get_submodule("0") is inner.get_submodule("0")
    assert (list(inner.graph.nodes), type(inner)) == (nodes, kind)
    copied = again(gm)
    for path, owner in gm.named_modules():
        if isinstance(owner, GraphModule):
            other = copied.get_submodule(path)
            assert [node.name for node in other.graph.nodes] == [node.name for node in owner.graph.nodes]
            assert [n.meta.get("note") for n in other.graph.nodes] == [n.meta.get("note") for n in owner.graph.nodes]
    x = torch.randn(2, 4)
    assert torch.equal(copied(x), model(x))
