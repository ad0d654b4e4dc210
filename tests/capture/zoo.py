"""Tiny transformers models of many families, with random weights in every parameter and buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf

TEXT = ("input_ids", "attention_mask")
TYPED = (*TEXT, "token_type_ids")
PAIR = (*TEXT, "decoder_input_ids")

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 1}
_SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 20,
}
_CLIP_TEXT = {**_SMALL, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1}
_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


@dataclass(frozen=True)
class Family:
    """One architecture: its class, its config, the inputs that it is captured with."""

    name: str
    model_class: str
    config_class: str
    settings: dict[str, Any]
    inputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The model, in eval mode."""
        torch.manual_seed(0)
        config = getattr(tf, self.config_class)(**self.settings)
        for name, value in self.attributes.items():
            setattr(config, name, value)
        return randomised(getattr(tf, self.model_class)(config).eval())


def randomised(model: torch.nn.Module) -> Any:
    """A model with random numbers in every weight and statistic: fresh ones hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name or name.endswith("A_log"):
                continue
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            if "running_var" in name or (name.endswith("weight") and tensor.dim() == 1):
                noise = noise.abs() + 0.5
            tensor.copy_(noise)
    return model


def _family(
    name: str, model: str, config: str, inputs: tuple[str, ...], *settings: dict[str, Any], **more: Any
) -> Family:
    merged: dict[str, Any] = {}
    for part in settings:
        merged.update(part)
    return Family(name, model, config, {**merged, **more}, inputs)


def _clip_vision(**more: Any) -> dict[str, Any]:
    return {**_VISION, "projection_dim": 8, **more}


FAMILIES: tuple[Family, ...] = (
    _family("bert", "BertModel", "BertConfig", TYPED, _SMALL),
    _family("bert-eager", "BertForSequenceClassification", "BertConfig", TYPED, _SMALL, attn_implementation="eager"),
    _family("roberta", "RobertaForMaskedLM", "RobertaConfig", TEXT, _SMALL),
    _family(
        "distilbert",
        "DistilBertModel",
        "DistilBertConfig",
        TEXT,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        vocab_size=60,
        max_position_embeddings=64,
    ),
    _family("albert", "AlbertModel", "AlbertConfig", TYPED, _SMALL, embedding_size=8),
    _family("electra", "ElectraForTokenClassification", "ElectraConfig", TYPED, _SMALL, embedding_size=8),
    _family(
        "deberta-v2",
        "DebertaV2Model",
        "DebertaV2Config",
        TEXT,
        _SMALL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
    ),
    _family("mpnet", "MPNetModel", "MPNetConfig", TEXT, _SMALL),
    _family(
        "modernbert",
        "ModernBertModel",
        "ModernBertConfig",
        TEXT,
        _SMALL,
        global_attn_every_n_layers=2,
        local_attention=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    _family(
        "gpt2", "GPT2LMHeadModel", "GPT2Config", TEXT, n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=60
    ),
    _family(
        "gpt-neo",
        "GPTNeoModel",
        "GPTNeoConfig",
        TEXT,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        vocab_size=60,
        max_position_embeddings=64,
        intermediate_size=24,
    ),
    _family("opt", "OPTModel", "OPTConfig", TEXT, _SMALL, ffn_dim=24, word_embed_proj_dim=16),
    _family("bloom", "BloomModel", "BloomConfig", TEXT, hidden_size=16, n_layer=2, n_head=2, vocab_size=60),
    _family("llama", "LlamaForCausalLM", "LlamaConfig", TEXT, _GROUPED),
    _family("mistral", "MistralModel", "MistralConfig", TEXT, _GROUPED, sliding_window=6, head_dim=8),
    _family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", TEXT, _GROUPED),
    _family("gemma", "GemmaModel", "GemmaConfig", TEXT, _GROUPED, head_dim=8),
    _family("phi", "PhiModel", "PhiConfig", TEXT, _SMALL),
    _family("mixtral", "MixtralModel", "MixtralConfig", TEXT, _GROUPED, num_local_experts=4, num_experts_per_tok=2),
    _family(
        "mamba",
        "MambaModel",
        "MambaConfig",
        ("input_ids",),
        hidden_size=16,
        num_hidden_layers=2,
        vocab_size=60,
        state_size=4,
    ),
    _family(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        PAIR,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        vocab_size=60,
        decoder_start_token_id=0,
    ),
    _family(
        "bart",
        "BartModel",
        "BartConfig",
        PAIR,
        _TOKENS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        vocab_size=60,
        max_position_embeddings=64,
    ),
    _family(
        "marian",
        "MarianMTModel",
        "MarianConfig",
        PAIR,
        _TOKENS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        vocab_size=60,
        max_position_embeddings=64,
    ),
    _family("vit", "ViTForImageClassification", "ViTConfig", ("pixel_values",), _VISION),
    _family("deit", "DeiTModel", "DeiTConfig", ("pixel_values",), _VISION),
    _family(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        ("pixel_values",),
        embedding_size=8,
        hidden_sizes=[8, 12],
        depths=[1, 2],
        layer_type="bottleneck",
    ),
    _family(
        "regnet",
        "RegNetModel",
        "RegNetConfig",
        ("pixel_values",),
        embedding_size=8,
        hidden_sizes=[8, 12],
        depths=[1, 1],
        groups_width=4,
    ),
    _family(
        "convnext",
        "ConvNextModel",
        "ConvNextConfig",
        ("pixel_values",),
        hidden_sizes=[8, 8, 12, 12],
        depths=[1, 1, 1, 1],
        image_size=64,
    ),
    _family(
        "swin",
        "SwinModel",
        "SwinConfig",
        ("pixel_values",),
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
    ),
    _family(
        "levit",
        "LevitForImageClassification",
        "LevitConfig",
        ("pixel_values",),
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
    ),
    _family(
        "mobilenet", "MobileNetV2Model", "MobileNetV2Config", ("pixel_values",), image_size=64, depth_multiplier=0.35
    ),
    _family(
        "segformer",
        "SegformerModel",
        "SegformerConfig",
        ("pixel_values",),
        hidden_sizes=[8, 8, 12, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
    ),
    _family("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", ("input_values",), _SPEECH),
    _family("hubert", "HubertModel", "HubertConfig", ("input_values",), _SPEECH),
    _family(
        "whisper",
        "WhisperModel",
        "WhisperConfig",
        ("input_features", "decoder_input_ids"),
        _TOKENS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        vocab_size=60,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
    ),
    _family(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        (*TEXT, "pixel_values"),
        text_config=_CLIP_TEXT,
        vision_config=_clip_vision(),
        projection_dim=8,
    ),
    _family(
        "siglip", "SiglipModel", "SiglipConfig", (*TEXT, "pixel_values"), text_config=_SMALL, vision_config=_VISION
    ),
    _family(
        "groupvit",
        "GroupViTModel",
        "GroupViTConfig",
        (*TEXT, "pixel_values"),
        text_config=_CLIP_TEXT,
        vision_config={**_VISION, "depths": [1, 1, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 0]},
        projection_dim=8,
        projection_intermediate_dim=12,
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}


def leaves(value: Any) -> list[Any]:
    """Every tensor and number in a result, caches and nested containers included."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (int, float, str)):
        return [value]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    inside = getattr(value, "__dict__", {})
    return [leaf for name in sorted(inside) for leaf in leaves(inside[name]) if isinstance(leaf, torch.Tensor)]


def assert_same(left: Any, right: Any) -> None:
    """Two results are of one class and the same bit for bit."""
    assert type(left) is type(right)
    if hasattr(left, "keys"):
        assert list(left.keys()) == list(right.keys())
    first, second = leaves(left), leaves(right)
    assert len(first) == len(second)
    for a, b in zip(first, second):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        else:
            assert a == b


Maker = Callable[[Family, int, int], dict[str, Any]]


def make_inputs(family: Family, batch: int, length: int) -> dict[str, Any]:
    """Inputs of some size, not made by regraft's own maker."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    side = _side(family)
    made = {
        "input_ids": torch.randint(3, 60, (batch, length), generator=generator),
        "attention_mask": _mask(batch, length),
        "token_type_ids": torch.randint(0, 2, (batch, length), generator=generator),
        "decoder_input_ids": torch.randint(3, 60, (batch, max(1, length - 2)), generator=generator),
        "pixel_values": torch.randn(batch, 3, side, side, generator=generator),
        "input_values": torch.randn(batch, 400 + 20 * length, generator=generator),
        "input_features": torch.randn(batch, 8, 40, generator=generator),
    }
    return {name: made[name] for name in family.inputs}


def _mask(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    if length > 1:
        mask[-1, -1] = 0
    return mask


def _side(family: Family) -> int:
    vision = family.settings.get("vision_config", family.settings)
    return int(vision.get("image_size", 64))
