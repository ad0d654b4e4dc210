"""A convolutional network with batch norms, before and after rewriting the graph: the same five steps as `minilm.py`.

ResNet-50 from its config, with random weights and random batch norm statistics (a fresh batch norm is the identity and
would hide mistakes). Run it with `python examples/resnet.py` where `pip install regraft[hf]` has been run.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import regraft as rg
from regraft.verify import compare_speed


def resnet() -> nn.Module:
    """ResNet-50 with every batch norm's statistics, scale and shift made random."""
    model = ResNetForImageClassification(ResNetConfig()).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model


def main() -> None:
    """Run the five steps and print what a user wants to see."""
    torch.manual_seed(0)
    model, images = resnet(), torch.randn(2, 3, 224, 224)

    graph = rg.trace(model, kwargs={"pixel_values": images}, dynamic_shapes="auto")
    code = graph.code
    rewrite = rg.compose(rg.RemoveDeadWork(), rg.FuseBatchNorm2dInConv2d())
    graph = rewrite(graph)
    for step in rg.history(graph):
        print(f"{step}: {len(step.applied)} applied, {len(step.refused)} refused, {step.seconds:.2f} s")
        for site in step.applied[:3]:
            print(f"   {site.sentence}")
        for refusal in step.refused[:3]:
            print(f"   refused {refusal.where}: {refusal.reason}")

    verification = rg.verify(model, graph, kwargs={"pixel_values": images}, vary_sizes=False)
    verification.raise_for_status()
    print(verification)
    speed = compare_speed(lambda: model(pixel_values=images), lambda: graph(pixel_values=images), min_seconds=4)
    times = f"{speed.baseline_seconds * 1e3:.0f} ms before, {speed.candidate_seconds * 1e3:.0f} ms after"
    print(f"{times}: {speed.describe()}")

    with torch.inference_mode():
        before = model(pixel_values=images).logits
        graph = rewrite(graph, reverse=True)
        restored = graph(pixel_values=images).logits
    assert torch.equal(before, restored), "the reversal is not exact"
    assert graph.code == code, "the reversal leaves other code"
    print("reversed: bit-exact, the same logits and the same code")


if __name__ == "__main__":
    main()
