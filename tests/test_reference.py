"""The examples of `optimum.fx.optimization`'s documents, with their imports changed and their models made from configs.

Models: BERT, ResNet and GroupViT. What an example does not show (that the result computes the same, and that it can be
taken back bit for bit) is checked here too.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GroupViTConfig,
    GroupViTModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import regraft as rg
from regraft import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    ReversibleTransformation,
    Transformation,
    compose,
    symbolic_trace,
)

TEXT = {
    "input_ids": torch.randint(0, 99, (2, 7)),
    "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
    "token_type_ids": torch.zeros(2, 7, dtype=torch.long),
}


def randomised(model: nn.Module) -> nn.Module:
    """A fresh batch norm is the identity and would hide mistakes."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.normal_(std=0.1)
    return model.eval()


def bert() -> nn.Module:
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
    return randomised(BertModel(config))


def traced_bert() -> tuple[nn.Module, torch.fx.GraphModule]:
    model = bert()
    return model, symbolic_trace(model, input_names=["input_ids", "attention_mask", "token_type_ids"])


class Products(nn.Module):
    """What BERT no longer has in its graph: products and quotients of tensors, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.second(x) * 3 / 7


class ChangeMulToAdd(Transformation):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                node.target = operator.add
        return graph_module


class MulToMulTimesTwo(ReversibleTransformation):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                x, y = node.args
                node.args = (2 * x, y)
        return graph_module

    def reverse(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                x, y = node.args
                node.args = (x / 2, y)
        return graph_module


@pytest.mark.parametrize(
    "transformation",
    [
        MergeLinears(),
        FuseBiasInLinear(),
        ChangeTrueDivToMulByInverse(),
        compose(ChangeTrueDivToMulByInverse(), MergeLinears()),
    ],
    ids=lambda t: type(t).__name__,
)
def test_the_examples_on_bert(transformation) -> None:
    model, traced = traced_bert()
    code, expected = traced.code, model(**TEXT)
    transformed_model = transformation(traced)
    rg.verify(model, transformed_model, kwargs=TEXT).raise_for_status()

    restored_model = transformation(transformed_model, reverse=True)
    assert restored_model.code == code
    assert torch.equal(restored_model(**TEXT).last_hidden_state, expected.last_hidden_state)
    assert [id(p) for p in restored_model.parameters()] == [id(p) for p in model.parameters()]


def test_merge_linears_leaves_one_linear_in_each_attention() -> None:
    _, traced = traced_bert()
    transformed = MergeLinears()(traced)
    for layer in range(2):
        attention = transformed.get_submodule(f"encoder.layer.{layer}.attention.self")
        assert sum(isinstance(module, nn.Linear) for module in attention.modules()) == 1


def test_fuse_bias_leaves_no_bias() -> None:
    _, traced = traced_bert()
    linears = [m for m in FuseBiasInLinear()(traced).modules() if isinstance(m, nn.Linear)]
    assert linears
    assert all(module.bias is None for module in linears)


def test_fuse_batch_norm_2d_on_resnet() -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3)
    model = randomised(ResNetForImageClassification(config))
    traced_model = symbolic_trace(model, input_names=["pixel_values"], disable_check=True)
    assert any(isinstance(module, nn.BatchNorm2d) for module in traced_model.modules())
    code = traced_model.code

    transformation = FuseBatchNorm2dInConv2d()
    transformed_model = transformation(traced_model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in transformed_model.modules())
    pixels = {"pixel_values": torch.rand(2, 3, 64, 64)}
    rg.verify(model, transformed_model, kwargs=pixels, vary_sizes=False).raise_for_status()
    assert torch.allclose(model(**pixels).logits, transformed_model(**pixels)["logits"], atol=1e-5)

    restored = transformation(transformed_model, reverse=True)
    assert restored.code == code
    assert torch.equal(model(**pixels).logits, restored(**pixels).logits)


def test_fuse_batch_norm_1d_on_groupvit() -> None:
    text = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 16, "intermediate_size": 20, "depths": [1, 1, 1], "num_hidden_layers": 3}
    vision |= {"num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0], "num_attention_heads": 2}
    config = GroupViTConfig(
        text_config=text | {"vocab_size": 99, "eos_token_id": 98},
        vision_config=vision | {"image_size": 32, "patch_size": 8},
        projection_dim=12,
        projection_intermediate_dim=24,
    )
    model = randomised(GroupViTModel(config))
    traced_model = symbolic_trace(
        model, input_names=["input_ids", "attention_mask", "pixel_values"], disable_check=True
    )
    code = traced_model.code
    assert any(isinstance(module, nn.BatchNorm1d) for module in traced_model.modules())

    transformation = FuseBatchNorm1dInLinear()
    transformed_model = transformation(traced_model)
    assert not any(isinstance(module, nn.BatchNorm1d) for module in transformed_model.modules())
    inputs = {
        "pixel_values": torch.rand(1, 3, 32, 32),
        "input_ids": torch.randint(0, 98, (2, 9)),
        "attention_mask": torch.ones(2, 9),
    }
    expected, got = model(**inputs), transformed_model(**inputs)
    for name in ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"):
        assert torch.allclose(expected[name], got[name], atol=1e-5), name

    restored = transformation(transformed_model, reverse=True)
    assert restored.code == code
    assert torch.equal(restored(**inputs).text_embeds, expected.text_embeds)


def test_the_guides_transformation_on_bert() -> None:
    _, traced = traced_bert()
    transformed_model = ChangeMulToAdd()(traced)
    assert not traced.graph.find_nodes(op="call_function", target=operator.mul)
    assert transformed_model(**TEXT).last_hidden_state.shape == (2, 7, 32)


def test_the_guides_reversible_transformation() -> None:
    model = Products().eval()
    x = torch.randn(3, 4)
    traced = symbolic_trace(model)
    code, expected = traced.code, model(x)

    transformation = MulToMulTimesTwo()
    doubled = transformation(traced)
    assert torch.allclose(doubled(x), expected * 4)
    restored = transformation(doubled, reverse=True)
    assert restored.code == code
    assert torch.equal(restored(x), expected)


def test_the_guides_composition() -> None:
    model = Products().eval()
    x = torch.randn(3, 4)
    traced = symbolic_trace(model)
    code = traced.code

    composition = compose(MulToMulTimesTwo(), ChangeMulToAdd())
    transformed = composition(traced)
    first, second = model.first(x), model.second(x)
    # every product is a sum now, those by two among them: 2 + ((2 + first) + second) + 3
    assert torch.allclose(transformed(x), (2 + (2 + first) + second + 3) / 7)
    assert not composition.preserves_computation
    assert rg.undo(rg.undo(transformed)).code == code


@pytest.mark.parametrize("inplace", [True, False])
def test_compose_is_the_same_as_one_after_the_other(inplace: bool) -> None:
    _, traced = traced_bert()
    transformed = MergeLinears()(ChangeTrueDivToMulByInverse()(traced))
    _, traced = traced_bert()
    composition = compose(ChangeTrueDivToMulByInverse(), MergeLinears(), inplace=inplace)
    composed = composition(traced)
    assert (composed is traced) is inplace
    assert transformed.code == composed.code

    restored = MergeLinears()(ChangeTrueDivToMulByInverse()(transformed, reverse=True), reverse=True)
    assert restored.code == composition(composed, reverse=True).code


def test_marks() -> None:
    class MarkLinears(ReversibleTransformation):
        def __init__(self, some_argument=None):
            self.some_argument = some_argument

        def transform(self, graph_module):
            for node in graph_module.graph.find_nodes(op="call_module"):
                if isinstance(graph_module.get_submodule(node.target), nn.Linear):
                    self.mark_as_transformed(node)
            return graph_module

        def reverse(self, graph_module):
            for node in self.get_transformed_nodes(graph_module):
                self.mark_as_restored(node)
            return graph_module

    _, traced = traced_bert()
    first, second = MarkLinears(), MarkLinears(some_argument="test")
    traced = first(traced)
    marked = first.get_transformed_nodes(traced)
    assert len(marked) == 13
    assert not second.get_transformed_nodes(traced)
    traced = second(traced)
    assert second.get_transformed_nodes(traced) == marked
    traced = first(traced, reverse=True)
    assert not first.get_transformed_nodes(traced)
    assert second.get_transformed_nodes(traced) == marked
    with pytest.raises(ValueError, match="not marked"):
        first.mark_as_restored(marked[0])


def test_signature() -> None:
    class Dummy(Transformation):
        def __init__(self, some_argument=None):
            self.some_argument = some_argument

        def transform(self, graph_module):
            return graph_module

    assert Dummy().signature == Dummy().signature
    assert Dummy().signature != Dummy(some_argument=1).signature
    assert Dummy(some_argument=1).signature != type("Other", (Dummy,), {})(some_argument=1).signature
