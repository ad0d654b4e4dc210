"""Models of transformers, small enough to capture in a second or two."""

from __future__ import annotations

import torch
from torch import nn

WINDOW = 20

_SPECIAL = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**_SPECIAL, **sizes, max_position_embeddings=32)).eval()


def decoder(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **_SPECIAL)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**_SPECIAL, **sizes)).eval()
    if kind == "Whisper":
        sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sides |= {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 2}
        sides |= {"num_mel_bins": 8, "max_source_positions": 20, "suppress_tokens": None, "begin_suppress_tokens": None}
        config = transformers.WhisperConfig(**_SPECIAL, **sides, max_target_positions=64)
        return transformers.WhisperForConditionalGeneration(config).eval()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 64}
    if kind == "Lfm2":  # a layer of a short convolution beside one of attention
        sizes |= {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_ff_dim": 24}
    if kind == "FalconH1":  # a layer that has keys and values, a convolution and a recurrent state
        sizes |= {"head_dim": 8, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4}
        sizes |= {"mamba_n_groups": 1, "mamba_chunk_size": 16}
    if kind in ("Mistral", "Gemma3"):
        sizes |= {"sliding_window": WINDOW, "head_dim": 8}
    if kind == "Gemma3":
        sizes |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(**_SPECIAL, **sizes, num_attention_heads=2, num_key_value_heads=1)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


_TEXT = {**_SPECIAL, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
_TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
_VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_VISION |= {"image_size": 16, "patch_size": 8}
IMAGE = 60  # the token that stands for a piece of an image


def of_images(kind: str) -> nn.Module:
    """A decoder that is told about images; Gemma's looks at all pieces of one at once, Qwen's numbers them by value."""
    import transformers

    torch.manual_seed(0)
    if kind == "Llava":
        parts = {"text_config": transformers.LlamaConfig(**_TEXT)}
        parts["vision_config"] = transformers.CLIPVisionConfig(**_VISION)
        config = transformers.LlavaConfig(**parts, image_token_index=IMAGE, image_seq_length=4)
    elif kind == "Gemma3":
        layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        text = {**_TEXT, **layers, "sliding_window": WINDOW}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=_VISION, mm_tokens_per_image=4, image_token_index=IMAGE
        )
    else:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 8, "mlp_ratio": 2}
        special = {
            "image_token_id": IMAGE,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        }
        config = transformers.Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **special
        )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model


def image_and_text(kind: str, seed: int = 0, length: int = 9) -> dict[str, torch.Tensor]:
    """A text with an image of four pieces in it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, IMAGE, (1, length), generator=generator)
    tokens[:, 2:6] = IMAGE
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind != "Qwen2VL":
        inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator)
        return inputs | ({"token_type_ids": (tokens == IMAGE).long()} if kind == "Gemma3" else {})
    inputs["pixel_values"] = torch.randn(16, 3 * 2 * 8 * 8, generator=generator)
    return inputs | {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (tokens == IMAGE).int()}
