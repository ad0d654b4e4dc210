"""`lift`: layers are built again from a program alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from regraft.capture import lift
from regraft.capture.layer_table import BUILDERS

LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(4, 3), (2, 4)),
    (nn.Linear(4, 3, bias=False), (2, 4)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    (nn.Conv2d(4, 6, 3, padding="same", bias=False), (2, 4, 9, 9)),
    (nn.Conv3d(4, 2, 2, dilation=2), (2, 4, 5, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 5)),
    (nn.ConvTranspose2d(4, 2, 3, padding=1, dilation=2), (2, 4, 5, 5)),
    (nn.ConvTranspose3d(4, 2, 2, bias=False), (2, 4, 3, 3, 3)),
    (nn.BatchNorm1d(4, eps=1e-3), (2, 4)),
    (nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3)),
    (nn.BatchNorm3d(4, track_running_stats=False), (2, 4, 3, 3, 3)),
    (nn.LayerNorm(4, eps=1e-2), (2, 4)),
    (nn.LayerNorm((3, 4), elementwise_affine=False), (2, 3, 4)),
    (nn.RMSNorm(4), (2, 4)),
    (nn.GroupNorm(2, 4), (2, 4, 3)),
    (nn.MaxPool2d(2, padding=1), (2, 4, 6, 6)),
    (nn.AvgPool2d(2, ceil_mode=True), (2, 4, 5, 5)),
    (nn.AdaptiveAvgPool2d((1, 2)), (2, 4, 6, 6)),
    (nn.Flatten(), (2, 4, 3)),
    (nn.ReLU(), (2, 4)),
    (nn.ReLU(inplace=True), (2, 4)),
    (nn.GELU(approximate="tanh"), (2, 4)),
    (nn.SiLU(), (2, 4)),
    (nn.LeakyReLU(0.3), (2, 4)),
    (nn.Softmax(-1), (2, 4)),
    (nn.Sigmoid(), (2, 4)),
    (nn.Hardswish(), (2, 4)),
]


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5) if "var" in name else tensor.normal_()
    return module


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=[type(layer).__name__ for layer, _ in LAYERS])
def test_a_layer_is_built_again(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(randomised(layer), nn.Tanh()).eval()
    program = torch.export.export(model, (torch.randn(*shape),), dynamic_shapes=({0: Dim.AUTO},))
    gm = lift(program)
    assert [node.target for node in gm.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert type(gm.get_submodule("0")) is type(layer)
    assert list(gm.state_dict()) == list(model.state_dict())
    assert all(tensor is dict(model.named_parameters())[name] for name, tensor in gm.named_parameters())
    assert not any(tensor.is_meta for tensor in gm.state_dict().values())
    x = torch.randn(5, *shape[1:])
    assert torch.equal(gm(x.clone()), model(x.clone()))


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=[type(layer).__name__ for layer, _ in LAYERS])
def test_a_program_that_is_one_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = randomised(layer).eval()
    gm = lift(torch.export.export(model, (torch.randn(*shape),), dynamic_shapes=({0: Dim.AUTO},)))
    assert list(gm.state_dict()) == list(model.state_dict())
    x = torch.randn(5, *shape[1:])
    assert torch.equal(gm(x.clone()), model(x.clone()))


def test_every_layer_that_can_be_built_is_tried() -> None:
    tried = {type(layer) for layer, _ in LAYERS}
    rest = {kind for kind, _ in BUILDERS} - tried
    assert rest <= {
        nn.Embedding,  # below
        nn.MaxPool1d,
        nn.AdaptiveAvgPool1d,
        nn.ReLU6,
        nn.Mish,
        nn.Tanh,
        nn.Hardsigmoid,
        nn.LogSoftmax,
        nn.Dropout,
    }


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, padding_idx=1)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("lost", torch.randn(4), persistent=False)
        self.register_buffer("kept", torch.randn(4))

    def forward(self, ids: torch.Tensor, extra: dict[str, torch.Tensor], flag: bool = True) -> dict[str, torch.Tensor]:
        y = self.linear(self.words(ids)) * self.lost + self.kept + extra["a"]
        return {"y": self.linear(y) if flag else y}


def test_it_is_called_as_the_program_was() -> None:
    model = Mixed()
    call = {"extra": {"a": torch.randn(4)}, "flag": True}
    program = torch.export.export(model, (torch.tensor([[1, 2, 3]]),), call)
    gm = lift(program)
    ids = torch.tensor([[4, 5, 1]])
    with torch.no_grad():
        assert torch.equal(gm(ids, **call)["y"], model(ids, **call)["y"])
        assert torch.equal(gm(flag=True, extra=call["extra"], ids=ids)["y"], model(ids, **call)["y"])
    assert gm.get_submodule("words").padding_idx == 1
    assert list(gm.state_dict()) == list(model.state_dict())
    with pytest.raises(TypeError, match="axis 1 of ids has size 2, expected 3"):
        gm(ids[:, :2], **call)
    with pytest.raises(TypeError, match="flag was True"):
        gm(ids, call["extra"], False)


@pytest.mark.parametrize("given", [nn.Linear(2, 2), None])
def test_what_is_no_program(given: object) -> None:
    with pytest.raises(TypeError, match=r"lift takes a torch.export.ExportedProgram.*regraft.trace\(model, args\)"):
        lift(given)  # type: ignore[arg-type]
