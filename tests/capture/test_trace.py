"""`trace` and `symbolic_trace` on plain torch models, the awkward ones among them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
import pickle
import sys
import time
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import regraft as rg
from helpers import Wrap
from regraft.capture import symbolic_trace, trace
from regraft.capture.module_tree import is_leaf
from regraft.capture.probing import Probe
from regraft.core.errors import CaptureError
from regraft.core.fx_private import codegen_of
from regraft.core.graph_module import GraphModule, adopt


def targets(gm: torch.fx.GraphModule, op: str = "call_module") -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == op]


class Layers(nn.Module):
    """A layer called twice, one under two names, one that is not used, and functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.again = self.twice
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.alone = nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.randn(4))
        self.register_buffer("lost", torch.randn(4), persistent=False)
        self.plain = torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(self.first(x)))
        y = self.twice(self.again(self.twice(y))) / 7 + self.alone * self.kept - self.lost + self.plain
        return F.linear(torch.div(y, 3.0), self.first.weight, self.first.bias) + self.tied(y)


def randomised(model: nn.Module) -> Any:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                if module.weight is not None:
                    module.weight.uniform_(0.5, 2.0)
                    module.bias.normal_()
    return model


class Named(nn.Module):
    def forward(self, lambda_: Tensor, _: Tensor, input: Tensor, __: Any = None) -> Tensor:  # noqa: A002
        return lambda_ * 2 + _ - input


def test_an_argument_may_have_any_name() -> None:
    given = (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3))
    gm = rg.trace(Named(), given, dynamic_shapes="auto")
    assert torch.equal(gm(given[1], _=given[2], input=given[0]), Named()(given[1], given[2], given[0]))
    by_name = {"lambda_": given[2], "_": given[0], "input": given[1]}
    assert torch.equal(pickle.loads(pickle.dumps(gm))(**by_name), Named()(**by_name))


def test_layers_weights_and_names() -> None:
    model = randomised(Layers()).eval()
    gm = trace(model, (torch.randn(3, 4),), dynamic_shapes="auto")
    assert targets(gm) == ["first", "norm", "twice", "twice", "twice", "tied"]
    assert all(gm.get_submodule(name) is model.get_submodule(name) for name in targets(gm))
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [*gm.named_parameters()] == [*model.named_parameters()]
    assert gm.again is gm.twice
    assert gm.tied.weight is gm.first.weight
    for batch in (1, 2, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(gm(x), model(x))
        assert torch.equal(gm(x=x), model(x))
    assert operator.truediv in targets(gm, "call_function")
    assert set(targets(gm, "get_attr")) == {"alone", "kept", "lost", "plain", "first.weight", "first.bias"}
    assert not any(isinstance(target, torch._ops.OpOverload) for target in targets(gm, "call_function"))


class Strided(nn.Conv2d):
    """A layer that is only made otherwise, as EfficientNet's by channel is."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, stride=2, padding="valid", groups=width)


class Louder(Strided):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Inner(Strided):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


@pytest.mark.parametrize("capture", [trace, lambda model, inputs: symbolic_trace(model)])
def test_a_layer_that_is_only_made_otherwise_is_that_of_torch(capture: Any) -> None:
    model, x = nn.Sequential(Strided(4), nn.ReLU()).eval(), torch.randn(2, 4, 9, 9)
    gm = capture(model, (x,))
    assert type(gm.get_submodule("0")) is nn.Conv2d
    assert type(model[0]) is Strided
    assert [str(node.target) for node in gm.graph.nodes][1] == "0"
    assert list(gm.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))  # as of any layer, the graph sees it
        assert torch.equal(pickle.loads(pickle.dumps(gm))(x), model(x))
        model[0].stride = (1, 1)
        model[0].register_forward_hook(lambda module, args, result: result + 1)
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_containers_are_no_layers() -> None:
    containers = (nn.Sequential(), nn.ModuleList(), nn.ParameterList([torch.ones(1)]), nn.Module())
    assert not any(map(is_leaf, containers))


@pytest.mark.parametrize("capture", [trace, lambda model, inputs: symbolic_trace(model)])
@pytest.mark.parametrize("kind", [Louder, Inner])
def test_a_layer_that_computes_otherwise_is_traced_through(capture: Any, kind: type[Strided]) -> None:
    model, x = nn.Sequential(kind(4), nn.ReLU()).eval(), torch.randn(2, 4, 9, 9)
    gm = capture(model, (x,))
    assert [node for node in gm.graph.nodes if node.target == "0"] == []
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_the_symbolic_way_has_the_same_tree() -> None:
    model = randomised(Layers()).eval()
    gm = symbolic_trace(model)
    assert isinstance(gm, GraphModule)
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [*gm.named_parameters()] == [*model.named_parameters()]
    x = torch.randn(2, 4)
    assert torch.equal(gm(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(gm))(x), model(x))


def test_a_graph_module_is_given_back() -> None:
    plain = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert trace(plain) is plain
    assert isinstance(plain, GraphModule)
    assert symbolic_trace(plain) is plain


def test_training_mode_keeps_dropout_and_statistics() -> None:
    model = randomised(Layers()).train()
    other = copy.deepcopy(model)
    gm = trace(model, (torch.randn(3, 4),))
    assert gm.training
    assert "drop" in targets(gm)
    x = torch.randn(3, 4)
    torch.manual_seed(3)
    expected = other(x)
    torch.manual_seed(3)
    assert torch.equal(gm(x), expected)
    assert torch.equal(model.norm.running_mean, other.norm.running_mean)
    assert model.norm.num_batches_tracked == other.norm.num_batches_tracked == 1


def test_mixed_modes_stay_mixed() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), nn.Dropout(0.5).eval())
    model.training = False
    gm = trace(model, (torch.randn(3, 4),))
    assert not gm.training
    assert gm.get_submodule("0").training
    assert targets(gm) == ["0.0", "0.1"]


def test_gradients_reach_the_model() -> None:
    model = randomised(Layers()).eval()
    gm = trace(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    gm(x).sum().backward()
    given = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(given[name], p.grad) for name, p in model.named_parameters() if p.grad is not None)


def test_hooks_run_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    gm = trace(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))
    assert targets(gm) == ["0", "1"]


def test_a_hook_on_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model.register_forward_hook(lambda module, args, output: output * 2)
    gm = trace(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))


def test_pruned_and_parametrized_layers() -> None:
    from torch.nn.utils import parametrizations, prune

    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)
    gm = trace(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))
    assert list(gm.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        model[1].parametrizations.weight.original1.mul_(2)
        model[0].weight_orig.mul_(2)
    assert torch.equal(gm(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(gm))(x), model(x))


def test_what_makes_the_weight_of_a_parametrized_layer_is_no_layer() -> None:
    from torch.nn.utils import parametrizations

    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()).eval()
    gm = trace(model, (torch.randn(3, 4),))
    assert [node.target for node in gm.graph.find_nodes(op="call_module")] == ["1"]
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        z = y[:]
        z[:, 0].add_(1)
        self.act(y)
        self.count.add_(1)
        x.mul_(2)
        return y + x, z


def test_what_is_written_in_place_stays_so() -> None:
    model = InPlace().eval()
    other = copy.deepcopy(model)
    gm = trace(model, (torch.randn(3, 4),), dynamic_shapes="auto")
    assert model.count == 0
    gm.graph.eliminate_dead_code()
    gm.recompile()
    for batch in (3, 5):
        x = torch.randn(batch, 4)
        left, right = x.clone(), x.clone()
        for a, b in zip(other(left), gm(right)):
            assert torch.equal(a, b)
        assert torch.equal(left, right)
    assert torch.equal(gm.count, other.count)


class Augmented(nn.Module):
    """`+=` writes into whatever shares the memory; a buffer is what it is when the graph runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.T
        turned += 1
        whole = x.reshape(-1)
        whole *= 2
        self.steps += 1
        return x * self.steps.detach().exp()[0]


@pytest.mark.parametrize("capture", [lambda m, x: trace(m, (x,)), lambda m, _: symbolic_trace(m)], ids=["trace", "fx"])
def test_augmented_assignments_write_into_memory(capture: Any) -> None:
    x = torch.randn(2, 3)
    model, twin = Augmented(), Augmented()
    gm = capture(twin, x)
    assert torch.equal(twin.steps, torch.zeros(3))
    for _ in range(2):
        left, right = x.clone(), x.clone()
        assert torch.equal(model(left), gm(right))
        assert torch.equal(left, right)
    assert torch.equal(model.steps, gm.steps)


class ByTheSizeOfABuffer(Augmented):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x * i for i in range(self.steps.shape[0])) + self.steps


def test_a_buffer_may_decide_while_a_model_is_traced() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(symbolic_trace(ByTheSizeOfABuffer())(x), ByTheSizeOfABuffer()(x))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.channels = nn.Dropout(), nn.Dropout2d()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        part = x[..., :2]
        dropped = [
            self.dropout(part),
            self.channels(part),
            F.dropout(part, 0.5, self.training),
            F.dropout(part, training=self.training, inplace=True),
            torch.dropout(part, 0.5, train=self.training),
        ]
        return [tensor.contiguous().view(-1) for tensor in dropped]


def test_dropout_in_evaluation_is_its_input_strides_and_all() -> None:
    model, x = Dropped().eval(), torch.randn(2, 3, 4, 5)
    for gm in (trace(model, (x,)), trace(model, (x,), dynamic_shapes="auto")):
        assert all(map(torch.equal, gm(x), model(x)))
    assert [n for n in trace(model.train(), (x,)).graph.nodes if "dropout" in n.name]


class Structured(nn.Module):
    class Pair(NamedTuple):
        left: torch.Tensor
        right: torch.Tensor

    def forward(
        self, x: dict[str, Any], *more: torch.Tensor, scale: float = 2.0, flag: bool = False, **rest: Any
    ) -> Any:
        out = x["a"] * scale + sum(more)
        if flag:
            out = -out
        if rest:
            out = out + rest["extra"]
        return {"pair": self.Pair(out, x["b"][0]), "list": [out + 1, None, 3], "size": out.shape[0]}


def test_containers_go_in_and_come_out() -> None:
    model = Structured()
    x = {"a": torch.randn(3, 2), "b": [torch.randn(2)]}
    gm = trace(model, (x, torch.randn(3, 2)), {"flag": True, "extra": torch.randn(2)}, dynamic_shapes="auto")
    x = {"a": torch.randn(5, 2), "b": [torch.randn(2)]}
    more, extra = torch.randn(5, 2), torch.randn(2)
    expected = model(x, more, flag=True, extra=extra)
    given = gm(x, more, flag=True, extra=extra)
    assert type(given["pair"]) is Structured.Pair
    assert torch.equal(given["pair"].left, expected["pair"].left)
    assert given["list"][1:] == [None, 3]
    assert given["size"] == 5
    with pytest.raises(TypeError, match="flag was True"):
        gm(x, more, flag=False, extra=extra)
    with pytest.raises(TypeError, match="x has another structure"):
        gm({"a": x["a"]}, more, flag=True, extra=extra)
    with pytest.raises(TypeError, match=r"x\['a'\] has 1 axes"):
        gm({"a": x["a"][0], "b": x["b"]}, more, flag=True, extra=extra)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        out = x @ y
        return out if z is None else out + z


class Scaled(nn.Module):
    def forward(self, x, by):
        return x / torch.tensor(by)


def test_a_zero_is_of_one_sign():
    model, x = Scaled(), torch.ones(3)
    for captured, other in ((0.0, -0.0), (-0.0, 0.0)):
        gm = rg.trace(model, (x, captured))
        assert torch.equal(gm(x, captured), model(x, captured))
        with pytest.raises(TypeError, match=f"by was {captured} when the graph was captured, .* but {other} was given"):
            gm(x, other)


def test_wrong_shapes_name_argument_axis_and_cure() -> None:
    gm = trace(TwoInputs(), (torch.randn(2, 3), torch.randn(3, 4)))
    with pytest.raises(TypeError, match=r'axis 0 of x has size 5, expected 2: .*dynamic_shapes="auto"'):
        gm(torch.randn(5, 3), torch.randn(3, 4))
    with pytest.raises(TypeError, match="missing the argument y"):
        gm(torch.randn(2, 3))
    with pytest.raises(TypeError, match="unexpected argument z"):
        gm(torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 4))
    with pytest.raises(TypeError, match="y is a float"):
        gm(torch.randn(2, 3), 1.0)
    gm = trace(TwoInputs(), (torch.randn(2, 3), torch.randn(3, 4)), dynamic_shapes="auto")
    assert gm(torch.randn(5, 7), torch.randn(7, 1)).shape == (5, 1)
    with pytest.raises(TypeError, match="axis 0 of y has size 3, expected 7, the size of axis 1 of x"):
        gm(torch.randn(5, 7), torch.randn(3, 4))
    batch = Dim("batch", min=2, max=8)
    gm = trace(TwoInputs(), (torch.randn(3, 3), torch.randn(3, 4)), dynamic_shapes={"x": {0: batch}, "y": None})
    assert gm(torch.randn(8, 3), torch.randn(3, 4)).shape == (8, 4)
    with pytest.raises(TypeError, match="axis 0 of x has size 9, expected a size from 1 to 8"):
        gm(torch.randn(9, 3), torch.randn(3, 4))


class BranchOnOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x * 3


class OnlyEven(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3


def test_never_silently_wrong_at_another_size() -> None:
    gm = trace(BranchOnOne(), (torch.randn(4, 2),), dynamic_shapes="auto")
    assert gm(torch.ones(3, 2)).sum() == 18
    with pytest.raises(TypeError, match="axis 0 of x has size 1, expected a size of 2 or more"):
        gm(torch.ones(1, 2))
    gm = trace(BranchOnOne(), (torch.randn(1, 2),), dynamic_shapes="auto")
    assert gm(torch.ones(1, 2)).sum() == 4
    with pytest.raises(TypeError, match="axis 0 of x has size 3, expected 1"):
        gm(torch.ones(3, 2))
    gm = trace(OnlyEven(), (torch.randn(4, 2),), dynamic_shapes="auto")
    assert gm(torch.ones(6, 2)).sum() == 24
    with pytest.raises(TypeError, match=r"x\.shape\[0\] % 2"):
        gm(torch.ones(3, 2))


def test_a_sample_of_one_still_gives_any_batch() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    gm = trace(randomised(model), (torch.randn(1, 1, 8, 8),), dynamic_shapes="auto")
    for batch in (1, 2, 5):
        x = torch.randn(batch, 1, 8, 8)
        assert torch.equal(gm(x), model(x))
    assert targets(gm) == ["0", "1", "2", "3", "4"]


def test_each_size_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sample of one, some of the sizes to try are the sample's own, and some the same as others."""
    run, tried = Probe._run, []

    def spied(probe: Probe, module: nn.Module, leaves: list[Tensor]) -> Any:
        tried.append((module is probe.model, *(tuple(leaf.shape) for leaf in leaves)))
        return run(probe, module, leaves)

    monkeypatch.setattr(Probe, "_run", spied)
    gm = trace(Added(), (torch.randn(1, 6), torch.randn(1, 6)), dynamic_shapes="auto")
    assert sorted(tried) == [(its, *(((1, size),) * 2)) for its in (False, True) for size in (1, 6)]
    for sizes in ((1, 1), (1, 5), (4, 1), (4, 5)):
        x, y = torch.randn(sizes), torch.randn(sizes)
        assert torch.equal(gm(x, y), Added()(x, y))


class Added(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x + y, x], 1)


class BranchOnTwoOfThree(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x.sum() * (3 if x.shape[0] == 1 and y.shape[0] == 1 and z.shape[1] > 1 else 2) + y.sum() + z.sum()


def test_sizes_that_are_one_only_together() -> None:
    # each alone is right, the first two without the third are not, and all of them are
    gm = trace(BranchOnTwoOfThree(), (torch.ones(3), torch.ones(4), torch.ones(5, 6)), dynamic_shapes="auto")
    assert gm(torch.ones(1), torch.ones(1), torch.ones(1, 1)) == 4
    assert gm(torch.ones(2), torch.ones(2), torch.ones(2, 2)) == 10
    with pytest.raises(TypeError, match=r"x.shape\[0\] is 1 only if y.shape\[0\] == z.shape\[1\] == "):
        gm(torch.ones(1), torch.ones(1), torch.ones(1, 5))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (BranchOnOne(), [("a", 4)]),
        (OnlyEven(), [("a", 4)]),
        (nn.Sequential(nn.ReLU()), [("a", 4)]),
        (nn.Conv2d(1, 2, 2), [("a", 1, "b", "c")]),
        (BranchOnTwoOfThree(), [("a",), ("b",), ("c", "d")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_compiler_asks_of_sizes_is_what_a_call_is_asked(model, shapes) -> None:
    axes = sorted({axis for shape in shapes for axis in shape if isinstance(axis, str)})

    def made(sizes: dict[str, int]) -> list[torch.Tensor]:
        return [torch.ones([axis if isinstance(axis, int) else sizes[axis] for axis in shape]) for shape in shapes]

    gm = trace(model, tuple(made(dict.fromkeys(axes, 4))), dynamic_shapes="auto")
    constraints = codegen_of(gm.graph).calling.constraints
    answers = set()
    for sizes in itertools.product((1, 2, 3, 5), repeat=len(axes)):
        given = made(dict(zip(axes, sizes)))
        for _ in range(2):  # the second time it is known
            try:
                constraints.check(given)
                answers.add(True)
                assert constraints.holds(given), sizes
            except TypeError:
                answers.add(False)
                assert not constraints.holds(given), sizes
    assert True in answers


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_size_that_nobody_can_try_is_two_or_more(least) -> None:
    model = nn.Sequential(nn.Linear(4, 2)).to("meta")
    sizes = {"input": {0: Dim("batch", min=least)}}
    gm = trace(model, (torch.empty(3, 4, device="meta"),), dynamic_shapes=sizes)
    constraints = codegen_of(gm.graph).calling.constraints
    assert [constraints.holds([torch.empty(size, 4)]) for size in (1, 2, 5)] == [False, True, True]
    with pytest.raises(TypeError, match="expected a size of 2 or more"):
        gm(torch.empty(1, 4, device="meta"))


SINGLE = {
    "Linear": (nn.Linear(4, 2), torch.randn(3, 4)),
    "Conv2d": (nn.Conv2d(4, 2, 3, padding=1), torch.randn(3, 4, 5, 5)),
    "BatchNorm2d": (nn.BatchNorm2d(4), torch.randn(3, 4, 5, 5)),
    "LayerNorm": (nn.LayerNorm(4), torch.randn(3, 4)),
    "Embedding": (nn.Embedding(5, 4), torch.tensor([[0, 4], [2, 2]])),
    "ReLU": (nn.ReLU(), torch.randn(3, 4)),
    "Dropout": (nn.Dropout(0.5), torch.randn(3, 4)),
}


@pytest.mark.parametrize("dynamic_shapes", [None, "auto"])
@pytest.mark.parametrize("name", SINGLE)
def test_a_model_that_is_one_layer(name, dynamic_shapes) -> None:
    layer, x = SINGLE[name]
    layer = randomised(copy.deepcopy(layer)).eval()
    gm = trace(layer, (x,), dynamic_shapes=dynamic_shapes)
    assert torch.equal(gm(x), layer(x))
    assert gm.state_dict().keys() == layer.state_dict().keys()
    assert torch.equal(pickle.loads(pickle.dumps(gm))(x), layer(x))
    if dynamic_shapes == "auto":
        assert torch.allclose(gm(x[:1]), layer(x[:1]))


class BranchOnTwo(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x.sum() * (3 if y.shape[0] == 1 and z.shape[0] == 1 else 2) + y.sum() + z.sum()


def test_a_sample_of_one_is_taken_where_others_must_not_be_one_together() -> None:
    sample = (torch.ones(1), torch.ones(4), torch.ones(5, 6))
    gm = trace(BranchOnTwo(), sample, dynamic_shapes="auto")
    assert gm(*sample) == BranchOnTwo()(*sample)
    with pytest.raises(TypeError, match=r"size 1|is 1 only if"):
        gm(torch.ones(1), torch.ones(1), torch.ones(1, 6))


class AddsWhatIsAsLong(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if x.shape[0] == y.shape[0] else x - y


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (5, 1)])
def test_a_one_that_is_made_as_large_as_another_size_is_taken_for_fixed(sizes: tuple[int, int]) -> None:
    x, y = (torch.randn(size, 3) for size in sizes)
    gm = trace(AddsWhatIsAsLong(), (x, y), dynamic_shapes="auto")
    assert torch.equal(gm(x, y), x - y)
    with pytest.raises(TypeError, match=r"axis 0 of . has size 2, expected 1"):
        gm(torch.randn(2, 3), torch.randn(2, 3))


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value=value)


def test_attention_has_as_many_keys_as_values() -> None:
    # torch's kernel does not ask, and reads beyond what is shorter
    query, key = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 5, 8)
    gm = trace(Attention(), (query, key, key + 1), dynamic_shapes="auto")
    longer = torch.randn(2, 1, 9, 8)
    assert torch.equal(gm(query, longer, longer * 2), Attention()(query, longer, longer * 2))
    with pytest.raises(TypeError, match="axis 2 of value has size 1, expected 9, the size of axis 2 of key"):
        gm(query, longer, longer[:, :, :1])
    with pytest.raises(CaptureError, match="attention to keys and values of two lengths"):
        trace(Attention(), (query, key, longer))


class WrittenForItsSize(nn.Module):
    """Export cannot solve for the side, of which (x / 2) // 2 has to be 2."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(x, 3, 2, 1)
        return y.reshape(self.batch, 2, 4, 4, 4).mean(1).sum(1) + F.avg_pool2d(y, 2).reshape(self.batch, 8, 2, 2).sum()


def test_where_sizes_cannot_be_made_out_fewer_vary() -> None:
    x = torch.randn(2, 8, 8, 8)
    gm = trace(WrittenForItsSize(2), (x,), dynamic_shapes="auto")
    assert torch.equal(gm(x), WrittenForItsSize(2)(x))
    with pytest.raises(TypeError, match="axis 0 of x has size 3, expected 2: the model itself fixes this size"):
        gm(torch.randn(3, 8, 8, 8))
    gm = trace(WrittenForItsSize(-1), (x,), dynamic_shapes="auto")
    other = torch.randn(3, 8, 8, 8)
    assert torch.equal(gm(other), WrittenForItsSize(-1)(other))


class Windows(nn.Module):
    """Rolls and pads to whole windows of seven, then halves the sides, again and again, as Swin does."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.depth):
            height, width = x.shape[1:3]
            x = F.pad(x, (0, 0, 0, (7 - width % 7) % 7, 0, (7 - height % 7) % 7))
            x = x.view(-1, x.shape[1] // 7, 7, x.shape[2] // 7, 7, x.shape[3]).softmax(2).flatten(1, 2).flatten(2, 3)
            x = F.pad(x[:, :height, :width], (0, 0, 0, width % 2, 0, height % 2))
            x = x[:, ::2, ::2] + x[:, 1::2, 1::2]
        return x


@pytest.mark.parametrize(("depth", "varies"), [(1, True), (3, False)])
def test_sides_that_hang_together_in_a_long_expression_are_fixed_rather_than_solved_for_minutes(
    depth: int, varies: bool
) -> None:
    model, side = Windows(depth), 56
    gm = trace(model, (torch.randn(2, side, side, 3),), dynamic_shapes="auto")
    assert torch.equal(gm(x := torch.randn(3, side, side, 3)), model(x))
    larger = torch.randn(2, 2 * side, 2 * side, 3)
    if varies:
        assert torch.equal(gm(larger), model(larger))
    else:
        with pytest.raises(TypeError, match="axis 1 of x has size 112, expected 56"):
            gm(larger)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.up = nn.ConvTranspose1d(3, 3, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        y = self.up(x.transpose(1, 2))
        return self.up(y, output_size=[y.shape[-1] * 2 + 1])


def test_layers_with_several_inputs_or_outputs_stay_right() -> None:
    model = Recurrent().eval()
    gm = trace(model, (torch.randn(3, 5, 4),))
    x = torch.randn(3, 5, 4)
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))
    assert targets(gm) == ["up"]
    assert list(gm.state_dict()) == list(model.state_dict())


def test_a_transformer_encoder_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    gm = trace(model, (torch.randn(3, 5, 8),), dynamic_shapes="auto")
    x = torch.randn(2, 7, 8)
    with torch.no_grad():
        assert torch.allclose(gm(x), model(x), atol=1e-5)


class Translator(nn.Module):
    """Torch's transformer with a causal mask for the target, which it compares with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1])
        out: torch.Tensor = self.transformer(source, target, tgt_mask=mask)
        return out


def test_torchs_transformer_with_a_causal_mask_that_it_makes() -> None:
    model = Translator().eval()
    gm = trace(model, (torch.randn(3, 5, 8), torch.randn(3, 4, 8)), dynamic_shapes="auto")
    for sizes in ((3, 5, 4), (2, 3, 9)):
        call = torch.randn(sizes[0], sizes[1], 8), torch.randn(sizes[0], sizes[2], 8)
        with torch.no_grad():
            assert torch.allclose(gm(*call), model(*call), atol=1e-5)


def test_torchs_transformer_encoder_with_any_mask() -> None:
    """A graph that was captured with a causal mask applies another one, too."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    compares = nn.modules.transformer._detect_is_causal_mask
    gm = trace(model, (torch.randn(3, 5, 8),), {"mask": causal}, dynamic_shapes="auto")
    assert nn.modules.transformer._detect_is_causal_mask is compares
    x, other = torch.randn(2, 5, 8), torch.where(torch.eye(5).roll(1, 0) == 1, -torch.inf, 0.0)
    with torch.no_grad():  # of masks that are added, torch's fused encoder takes none but these numbers
        for mask in (causal, other, causal.T):
            assert torch.allclose(gm(x, mask=mask), model(x, mask=mask), atol=1e-5)
        assert not torch.allclose(model(x, mask=causal), model(x, mask=other), atol=1e-2)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that stands in the way
            return y
        return -y


@pytest.mark.parametrize("capture", [lambda m: trace(m, (torch.randn(2, 3),)), symbolic_trace])
def test_what_cannot_be_captured_names_the_line(capture: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_trace\.py:\d+, in forward:\n    if y\.sum\(\) > 0") as caught:
        capture(Opaque())
    assert caught.value.__cause__ is not None


def test_what_was_typed_into_a_notebook_names_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # which has no file
    typed = type("Typed", (Opaque,), {"__module__": "__main__"})
    with pytest.raises(CaptureError, match=r"in forward:\n    if y\.sum\(\) > 0.*\n.*\n.*optimize the parts"):
        trace(typed(), (torch.randn(2, 3),))


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sizes of the sample that each export is given."""
    seen, export = [], torch.export.export

    def noted(model: nn.Module, args: tuple[Tensor, ...], **options: Any) -> Any:
        seen.append(args[0].shape)
        return export(model, args, **options)

    monkeypatch.setattr(torch.export, "export", noted)
    return seen


def test_a_decision_by_value_is_not_tried_over_and_over(exports: list[Any]) -> None:
    with pytest.raises(CaptureError, match="by the value of a tensor"):
        trace(Opaque(), (torch.randn(1, 3),), dynamic_shapes="auto")
    # once with a larger sample; then with sizes that are fixed, in both ways; then as it decides of this one, in both
    assert exports == [(2, 3)] + [(1, 3)] * 4


class Placed(nn.Module):
    """Adds a table of the places in an image of one size, which says of its sides what sympy cannot solve."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.Conv2d(8, 8, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, 8, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(self.conv(x))
        z = y.flatten(2)
        return (z @ z.transpose(1, 2) @ z).view(y.shape) + self.places


def test_sides_that_nobody_can_solve_for_are_not_tried_over_and_over(exports: list[Any]) -> None:
    model = Placed().eval()
    gm = trace(model, (torch.randn(1, 3, 64, 64),), dynamic_shapes="auto")
    assert exports == [(2, 3, 64, 64)] * 2  # with all axes, and with the batch alone
    assert torch.equal(gm(x := torch.randn(3, 3, 64, 64)), model(x))


def test_sides_that_are_asked_for_are_tried_with_each_sample(exports: list[Any]) -> None:
    with pytest.raises(CaptureError):
        trace(
            Placed().eval(), (torch.randn(1, 3, 64, 64),), dynamic_shapes={"x": {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}}
        )
    assert exports == [(2, 3, 64, 64), (1, 3, 64, 64)] * 2


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("inner", "cure"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 4)), "into inner, which is of TorchScript"),
        (lambda: nn.LazyLinear(4), "call the model once"),
        (lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4))), "before it is quantized"),
        (lambda: torch.inference_mode()(nn.Linear)(4, 4), r"copy\.deepcopy\(model\)"),
    ],
    ids=["scripted", "lazy", "quantized", "inference"],
)
def test_parts_that_export_knows_nothing_of(inner: Callable[[], nn.Module], cure: str) -> None:
    with pytest.raises(CaptureError, match=cure):
        trace(Around(inner()).eval(), (torch.randn(3, 4),))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [rg.trace, rg.optimize])
def test_what_is_no_module_in_python(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    for made in (torch.jit.script(nn.Linear(4, 4).eval()), torch.jit.trace(nn.Linear(4, 4).eval(), x)):
        with pytest.raises(TypeError, match=f"not one in TorchScript.*regraft.{function.__name__}"):
            function(made, (x,))
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        function(len, (x,))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"input_names": ["zz"]}, CaptureError, "Linear.forward takes no zz; it takes input"),
        ({"input_names": ["inputs"]}, CaptureError, "did you mean input?"),
        ({"input_names": ["zz"], "tracer_cls": torch.fx.Tracer}, CaptureError, "takes no zz"),
        ({"input_names": "input"}, TypeError, r"symbolic_trace\(model, input_names=\['input'\]\)"),
        ({"input_names": "input", "disable_check": True}, TypeError, r"input_names=\['input'\]"),
        ({"input_names": 3}, TypeError, r"input_names=3, but takes names: .*input_names=\['input_ids'\]"),
        ({"input_names": [3]}, TypeError, "takes names"),
        ({"tracer_cls": 3}, TypeError, r"tracer_cls=3, .*symbolic_trace\(model, tracer_cls=torch.fx.Tracer\)"),
        pytest.param({"tracer_cls": torch.fx.Tracer()}, TypeError, "takes a class of tracers", id="an instance"),
    ],
    ids=str,
)
def test_wrong_names_and_tracers(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        symbolic_trace(nn.Linear(4, 4), **options)


def test_names_that_the_forward_has() -> None:
    for names in (["input"], {"input": 1}.keys()):
        assert [node.name for node in symbolic_trace(nn.ReLU(), names).graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (torch.ones(3, 4), None, r"args is a Tensor.*trace\(model, args=\(x,\)\)"),
        ({"input": torch.ones(3, 4)}, None, r"args is a dict.*trace\(model, kwargs=inputs\)"),
        ((), [torch.ones(3, 4)], "kwargs is a list.*trace"),
    ],
)
def test_arguments_that_are_in_no_tuple_or_dictionary(args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        rg.trace(nn.Linear(4, 4).eval(), args, kwargs)


class DecidesOnlyOfSome(nn.Module):
    """Of several in the one line, of one in the other, which the second way to export does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            if x.sum() > 0:
                return x
        elif torch.backends.mha.get_fastpath_enabled() and x.sum() > 0:
            return x
        return x + 1


def test_where_samples_stop_at_different_lines_each_is_tried_in_each_way(exports: list[Any]) -> None:
    x = -torch.rand(1, 3)
    gm = trace(DecidesOnlyOfSome(), (x,), dynamic_shapes="auto")
    assert torch.equal(gm(x), x + 1)
    # once; with sizes that are fixed, in both ways, of which the second is one; in that with each that varies
    assert exports == [(2, 3), (1, 3), (1, 3), (2, 3), (1, 3)]


class DecidesBySize(nn.Module):
    """That a number of at most 11 is not above 12 can be told where the size is fixed."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        number = count.item()
        torch._check(number >= 0)
        torch._check(number <= 11)
        return x + 1 if number <= x.shape[self.axis] else x + 2


@pytest.mark.parametrize("axis", [0, 1])
def test_a_size_that_decides_with_a_value_is_fixed(axis: int) -> None:
    model, count, shape = DecidesBySize(axis), torch.tensor(5), [12, 12]
    gm = trace(model, (torch.randn(shape), count), dynamic_shapes="auto")
    assert torch.equal(gm(x := torch.randn(shape), count), model(x, count))
    if axis == 1:
        assert torch.equal(gm(x := torch.randn(3, 12), count), model(x, count))
    shape[axis] = 4
    with pytest.raises(TypeError, match=f"axis {axis} of x has size 4, expected 12"):
        gm(torch.randn(shape), count)


def test_a_failed_capture_leaves_no_marks_on_the_tensors_of_the_call() -> None:
    x = torch.randn(2, 3)
    x.own = {1}
    torch._dynamo.mark_dynamic(x, 1)
    before = copy.deepcopy(vars(x))
    with pytest.raises(CaptureError, match="by the value of a tensor"):
        trace(Opaque(), (x,), dynamic_shapes="auto")
    assert vars(x) == before


def test_a_call_that_the_model_does_not_take() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        trace(TwoInputs(), (torch.randn(2, 3),))
    with pytest.raises(TypeError, match="dynamic_shapes names w"):
        trace(TwoInputs(), (torch.randn(2, 3), torch.randn(3, 4)), dynamic_shapes={"w": {0: Dim.AUTO}})


def test_one_tensor_for_two_arguments() -> None:
    x = torch.randn(3, 3)
    gm = trace(TwoInputs(), (x, x))
    y = torch.randn(3, 3)
    assert torch.equal(gm(x, y), x @ y)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        y = F.batch_norm(y, self.mean, self.var, self.weight[0], self.bias, False, 0.1, 1e-3)
        y = torch.div(y, 8.0) + y.div(2.0) - torch.true_divide(y, self.var)
        y = F.layer_norm(y, (4,), self.weight[0], self.bias)
        return F.softmax(F.gelu(y), dim=-1).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)[:, 1:3] @ self.weight[:2, :2]


def test_functional_calls_are_spelled_as_people_write_them() -> None:
    model = Functional()
    gm = trace(model, (torch.randn(3, 4),), dynamic_shapes="auto")
    functions = targets(gm, "call_function")
    for function in (F.linear, F.batch_norm, operator.truediv, F.layer_norm, F.softmax, F.gelu, torch.matmul):
        assert function in functions
    assert functions.count(operator.truediv) == 3
    assert "view" in targets(gm, "call_method")
    for batch in (1, 6):
        x = torch.randn(batch, 4)
        assert torch.equal(gm(x), model(x))


SPELLED: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "elu": (F.elu, lambda x: F.elu(x, 0.7)),
    "elu as it is": (F.elu, F.elu),
    "hardshrink": (F.hardshrink, lambda x: F.hardshrink(x, 0.3)),
    "softshrink": (F.softshrink, lambda x: F.softshrink(x, 0.3)),
    "threshold": (F.threshold, lambda x: F.threshold(x, 0.1, 20.0)),
    "prelu": (F.prelu, lambda x: F.prelu(x, torch.full((4,), 0.3))),
    "instance norm": (F.instance_norm, lambda x: F.instance_norm(x, weight=torch.arange(4.0), eps=1e-3)),
    "average in 3d": (F.avg_pool3d, lambda x: F.avg_pool3d(x[..., None], (2, 2, 1), (1, 2, 1), ceil_mode=True)),
    "global average in 3d": (F.adaptive_avg_pool3d, lambda x: F.adaptive_avg_pool3d(x[..., None], (2, 3, 1))),
    "maximum in 3d": (F.max_pool3d, lambda x: F.max_pool3d(x[..., None], (2, 2, 1), padding=(1, 0, 0))),
    "pixel unshuffle": (F.pixel_unshuffle, lambda x: F.pixel_unshuffle(x, 2)),
    "cosine similarity": (F.cosine_similarity, lambda x: F.cosine_similarity(x, x.flip(0), 2, 1e-2)),
    "distance": (F.pairwise_distance, lambda x: F.pairwise_distance(x, x.flip(0), 3.0, 1e-2)),
}


@pytest.mark.parametrize("name", SPELLED)
def test_what_has_a_function_is_spelled_by_it(name: str) -> None:
    function, compute = SPELLED[name]
    model, x = Wrap(lambda m, x: compute(x) * 2), torch.randn(3, 4, 6, 8)
    gm = trace(model, (x,))
    assert function in targets(gm, "call_function")
    assert not any(isinstance(target, torch._ops.OpOverload) for target in targets(gm, "call_function"))
    assert torch.equal(gm(x), model(x))


def test_the_graph_can_be_compiled_and_exported() -> None:
    model = randomised(Layers()).eval()
    gm = trace(model, (torch.randn(3, 4),), dynamic_shapes="auto")
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(torch.compile(gm, fullgraph=True, backend="eager")(x), model(x))
        program = torch.export.export(gm, (torch.randn(3, 4),), dynamic_shapes={"x": {0: Dim.AUTO}})
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(torch.fx.Interpreter(gm).run(x), model(x))
    assert torch.equal(torch.fx.symbolic_trace(gm)(x), model(x))


def test_export_takes_keywords_in_any_order() -> None:
    gm = trace(TwoInputs(), (torch.randn(3, 3), torch.randn(3, 3)))
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    program = torch.export.export(gm, (), {"y": y, "x": x})
    assert torch.equal(program.module()(x=x, y=y), x @ y)


def test_a_condition_that_divides_by_nothing_does_not_hold() -> None:
    from regraft.capture.constraints import Constraints, Range

    guard = ("rows % (columns - 1) == 0", "d[0, 0] % (d[0, 1] - 1) == 0")
    ranges = {"s0": Range(1, float("inf"), (0, 0)), "s1": Range(1, float("inf"), (0, 1))}
    constraints = Constraints(["x"], [("s0", "s1")], ranges, [guard])
    constraints.check([torch.ones(4, 3)])
    for shape in ((5, 3), (4, 1)):
        with pytest.raises(TypeError, match="rows % "):
            constraints.check([torch.ones(shape)])


def test_a_failed_capture_says_what_it_says_in_its_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if bool((torch.rand_like(x) == x.flip(0)).all()) else x + 1

    with pytest.raises(CaptureError, match="by the value of a tensor"):
        trace(Decides(), (torch.randn(3, 4),), dynamic_shapes="auto")
    assert "def forward" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "capture",
    [lambda model: trace(model, (torch.randn(2),), dynamic_shapes="auto"), symbolic_trace],
    ids=["with an example", "without"],
)
def test_captures_in_several_threads_take_turns(capture: Callable[[nn.Module], GraphModule]) -> None:
    running: list[int] = []
    together: list[int] = []

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            running.append(1)
            time.sleep(0.02)
            together.append(len(running))
            running.pop()
            return x + 1

    errors, filters = sys.stderr, list(warnings.filters)
    with ThreadPoolExecutor(3) as pool:
        traced = list(pool.map(lambda _: capture(Slow()), range(3)))
    assert [float(gm(torch.ones(1))) for gm in traced] == [2.0] * 3
    assert max(together) == 1
    assert sys.stderr is errors
    assert list(warnings.filters) == filters


def test_models_of_other_threads_run_while_one_is_traced() -> None:
    """torch.fx puts its own __call__ and __getattr__ of nn.Module in place, for every thread."""
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    given = torch.randn(3, 2)
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as pool:
                made.append(pool.submit(lambda: (other(given), other[1].running_mean)).result())
            return self.other(x)

    gm = symbolic_trace(Slow())
    assert torch.equal(made[0][0], other(given))
    assert made[0][1] is other[1].running_mean
    assert torch.equal(gm(-given), other(-given))


def test_what_a_model_raises_is_not_logged_either(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="non-empty"):
        trace(Wrap(lambda m, x: torch.stack([*x[:0]])), (torch.randn(2),))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_adopting_keeps_the_object() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    assert adopt(traced) is traced


def test_a_layer_under_autocast_is_not_called_a_second_time() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.a(x)
            return y, self.b(x)

    model, x = Half().eval(), torch.randn(3, 4)
    gm = trace(model, (x,))
    for got, expected in zip(gm(x), model(x), strict=True):
        assert torch.equal(got, expected)
    assert [node.target for node in gm.graph.nodes if node.op == "call_module"] == ["b"]


def test_in_inference_mode_constants_are_made_that_can_be_watched() -> None:
    class Shifted(nn.Module):
        def forward(self, x):
            return x + torch.tensor([1.0, 2.0, 3.0])

    with torch.inference_mode():
        gm, x = trace(Shifted(), (torch.randn(2, 3),)), torch.randn(2, 3)
        constants = [*gm.parameters(), *gm.buffers()]
        assert len(constants) == 1
        assert not constants[0].is_inference()
        assert torch.equal(gm(x), Shifted()(x))


class Counting(nn.Module):
    """Takes four features, and changes itself before it finds out that there are others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add_(1)
        return self.layer(x)


@pytest.mark.parametrize("sizes", [None, "auto"])
@pytest.mark.parametrize("function", [trace, rg.optimize])
def test_an_example_that_the_model_itself_does_not_take_is_to_blame(function: Any, sizes: str | None) -> None:
    model, x = Counting().eval(), torch.randn(2, 5)
    message = r"Counting cannot be captured, because it does not take this example itself: RuntimeError: mat1 and mat2"
    with pytest.raises(CaptureError, match=message):
        function(model, (x,), dynamic_shapes=sizes)
    assert (model.calls, model.seen.item()) == (0, 0)
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):  # which the model does take
        function(Wrap(lambda m, x: x if torch.rand_like(x).sum() > 0 else -x), (x,), dynamic_shapes=sizes)


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


def swapped(pair: Pair) -> Pair:
    assert pair.second is not None
    return Pair(pair.second * 2, pair.first)


def test_a_dataclass_is_refused_with_the_cure_which_helps() -> None:
    model = Wrap(lambda _, x: Pair(x, x * 2)).eval()
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"returns a Pair.*\n.*torch\.export\.register_dataclass\(Output\)"):
        trace(model, (x,))
    other = Wrap(lambda _, pair: swapped(pair)).eval()
    with pytest.raises(CaptureError, match=r"is a Pair.*torch\.export\.register_dataclass\(Pair\)"):
        trace(other, (Pair(x, x),))
    torch.export.register_dataclass(Pair)
    gm = trace(other, (Pair(x, x + 1),), dynamic_shapes="auto")
    y = torch.randn(5, 4)
    found = gm(Pair(y, y + 1))
    assert isinstance(found, Pair)
    assert found.second is not None
    torch.testing.assert_close((found.first, found.second), (2 * y + 2, y))
    result = rg.optimize(model, (x,), keep="all", engine="eager", seconds=0.01)
    assert torch.equal(result.model(y).second, y * 2)
