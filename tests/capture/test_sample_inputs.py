"""The inputs that are made from the config of a model of transformers are such that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regraft.capture.sample_inputs import SampleMaker, Unmakeable, example_call
from regraft.capture.sample_makers import TEXT
from regraft.capture.transformers_adapter import main_inputs

transformers = pytest.importorskip("transformers")

_CODEC = {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "hidden_size": 128, "codebook_size": 16}
_ENCODEC = {"num_filters": 8, "hidden_size": 32, "codebook_size": 16, "codebook_dim": 32, "audio_channels": 2}
_SPEECH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_SPECTROGRAM = {**_SPEECH, "max_length": 64, "num_mel_bins": 32}


@pytest.mark.parametrize(
    ("name", "config", "shape"),
    [
        ("DacModel", _CODEC, (1, None)),
        ("EncodecModel", _ENCODEC, (2, None)),
        ("HubertModel", _SPEECH, (None,)),
        ("ASTModel", _SPECTROGRAM, (64, 32)),
    ],
)
def test_sounds(name: str, config: dict[str, Any], shape: tuple[int | None, ...]) -> None:
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**config)).eval()
    (maker, *_) = SampleMaker.variants(model, ["input_values"])
    made = maker.make(["input_values"])
    _, *sizes = made["input_values"].shape
    assert len(sizes) == len(shape)
    assert all(size == wanted for size, wanted in zip(sizes, shape) if wanted is not None)
    with torch.no_grad():
        model(**made)


_TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
_VISION = {**_TEXT, "image_size": 16, "patch_size": 8}
_QUERIES = {"vision_config": _VISION, "qformer_config": {**_TEXT, "encoder_hidden_size": 16}, "image_token_index": 60}
_OPT = {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24}
_QUERIES |= {"text_config": {**_OPT, "vocab_size": 64, "word_embed_proj_dim": 16}, "num_query_tokens": 7}
_LLAVA = {"text_config": {**_TEXT, "model_type": "llama"}, "image_token_index": 60}
_LLAVA["vision_config"] = {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 2}
_INTERN = {
    "text_config": {**_TEXT, "model_type": "qwen2", "num_key_value_heads": 2},
    "image_token_id": 60,
    "downsample_ratio": 1.0,
}
_INTERN["vision_config"] = {**_VISION, "image_size": [16, 16], "patch_size": [8, 8]}


@pytest.mark.parametrize(
    ("name", "config", "shapes"),
    [
        ("LlavaForConditionalGeneration", {**_LLAVA, "image_seq_length": 4}, {"input_ids": (3, 15)}),
        ("InternVLForConditionalGeneration", {**_INTERN, "image_seq_length": 4}, {"pixel_values": (3, 3, 16, 16)}),
        ("Blip2ForConditionalGeneration", _QUERIES, {"input_ids": (3, 18), "pixel_values": (3, 3, 16, 16)}),
        ("InstructBlipForConditionalGeneration", _QUERIES, {"qformer_input_ids": (3, 11)}),
    ],
)
def test_images_and_texts(name: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], caplog: Any) -> None:
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**config)).eval()
    made = example_call(model)
    assert {name: tuple(made[name].shape) for name in shapes} == shapes
    assert set(made) == set(main_inputs(model))
    assert not caplog.records
    with torch.no_grad():
        assert model(**made).logits.shape[0] == 3


def test_without_images_where_none_fits(caplog: Any) -> None:
    """Its config says nothing of how many pieces an image has, and it is not as many as images have otherwise."""
    config = transformers.LlavaConfig(**_LLAVA, image_seq_length=5)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    made = example_call(model)
    assert list(made) == ["input_ids", "attention_mask"]
    (record,) = caplog.records
    assert record.getMessage() == "the example of LlavaForConditionalGeneration was made without pixel_values"


def test_a_call_that_cannot_be_made_says_what_was_tried() -> None:
    model = transformers.BrosModel(transformers.BrosConfig(**_TEXT)).eval()
    with pytest.raises(Unmakeable, match=r"BrosModel cannot be called with input_ids, .* made from its config"):
        example_call(model)


def test_what_forward_requires_is_a_main_input() -> None:
    model = transformers.InstructBlipForConditionalGeneration(transformers.InstructBlipConfig(**_QUERIES))
    assert main_inputs(model) == ["pixel_values", "qformer_input_ids", "input_ids", "attention_mask"]


def test_settings_are_looked_for_in_the_innermost_part() -> None:
    class Model(torch.nn.Module):
        config = transformers.PretrainedConfig(vocab_size=1, thinker_config={"vocab_size": 2, "text_config": {}})

    (maker, *_) = SampleMaker.variants(Model(), ["input_ids"])
    assert maker.setting("vocab_size", of=TEXT) == 2
    Model.config.thinker_config["text_config"]["vocab_size"] = 3
    assert maker.setting("vocab_size", of=TEXT) == 3
    assert maker.setting("vocab_size") == 1
