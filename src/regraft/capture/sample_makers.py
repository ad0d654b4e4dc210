"""One function for each kind of input that `SampleMaker` can make."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regraft.capture.cache_names import NAMES, returned_in
from regraft.capture.untouched import untouched

if TYPE_CHECKING:
    from regraft.capture.sample_inputs import SampleMaker

#: sizes that are unlike each other, so that nothing in a model takes two axes for one
BATCH, IMAGES, LENGTH, TARGET, PAST, CHOICES, SAMPLES = 3, 2, 11, 7, 5, 4, 5600


class Unmakeable(Exception):
    """An input that cannot be made from the config."""


TEXT = "text_config decoder thinker_config"
VISION = "vision_config encoder backbone_config"
AUDIO = "audio_config encoder_config encoder"


def _mask(maker: SampleMaker) -> torch.Tensor:
    if str(getattr(maker.model, "main_input_name", "")) == "input_values":
        return torch.ones(maker.batch, SAMPLES, dtype=torch.long, device=maker.device)
    *outer, length = maker.text_shape()
    past = 0 if getattr(maker.model.config, "is_encoder_decoder", False) else maker.past
    return torch.ones(*outer, length + past, dtype=torch.long, device=maker.device)


def _question(maker: SampleMaker) -> torch.Tensor:
    """The text that a Q-Former reads beside the image, in a vocabulary of its own."""
    return maker.integers((maker.batch, maker.length), maker.setting("vocab_size", of="qformer_config"), start=3)


def _zeros(maker: SampleMaker) -> torch.Tensor:
    return torch.zeros(maker.text_shape(), dtype=torch.long, device=maker.device)


def _positions(maker: SampleMaker) -> torch.Tensor:
    shape = maker.text_shape()
    return (torch.arange(shape[-1], device=maker.device) + maker.past).expand(shape).contiguous()


def _embeds(maker: SampleMaker) -> torch.Tensor:
    width = maker.setting("embedding_size", "hidden_size", "d_model", "n_embd", of=TEXT)
    return maker.floats((*maker.text_shape(), width))


def _target(maker: SampleMaker) -> torch.Tensor:
    return maker.integers((maker.batch, TARGET), maker.setting("vocab_size", of="decoder text_config"), start=3)


def _target_mask(maker: SampleMaker) -> torch.Tensor:
    return torch.ones(maker.batch, TARGET + maker.past, dtype=torch.long, device=maker.device)


def _image_size(maker: SampleMaker) -> tuple[int, int]:
    return _sides(maker.setting("image_size", "crop_size", of=VISION, default=224))


def _patches(maker: SampleMaker) -> int:
    sides = zip(_image_size(maker), _sides(maker.setting("patch_size", of=VISION)), strict=True)
    return math.prod(whole // patch for whole, patch in sides)


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def image_token(model: nn.Module) -> int | None:
    """The token that stands for a piece of an image in a text; None for models that do not mix the two.

    Args:
        model: a transformers model.
    """
    for name in ("image_token_id", "image_token_index"):
        token = getattr(model.config, name, None)
        if isinstance(token, int) and token >= 0:
            return token
    return None


def tokens_per_image(maker: SampleMaker) -> int:
    """How many such tokens one image takes.

    Args:
        maker: the maker of the model's inputs.
    """
    names = ("image_seq_length", "mm_tokens_per_image", "num_query_tokens")
    return int(maker.setting(*names, default=0)) or _patches(maker)


def _pixels(maker: SampleMaker) -> torch.Tensor:
    channels = maker.setting("num_channels", "in_channels", "in_chans", of=VISION, default=3)
    frames = getattr(maker.model.config, "num_frames", None)
    outer = (maker.images, frames) if isinstance(frames, int) and frames > 1 else (maker.images,)
    return maker.floats((*outer, channels, *_image_size(maker)))


def _pixel_mask(maker: SampleMaker) -> torch.Tensor:
    return torch.ones(maker.images, *_image_size(maker), dtype=torch.long, device=maker.device)


def _masked_patches(maker: SampleMaker) -> torch.Tensor:
    return maker.integers((maker.images, _patches(maker)), 2).bool()


def _waves(maker: SampleMaker) -> torch.Tensor:
    bins, length = getattr(maker.model.config, "num_mel_bins", None), getattr(maker.model.config, "max_length", None)
    if isinstance(bins, int) and getattr(maker.model.config, "patch_size", None) is not None:
        return maker.floats((maker.batch, int(length or 1024), bins))  # a spectrogram that is looked at as an image
    if isinstance(getattr(maker.model.config, "codebook_size", None), int):  # a codec, whose waves have channels
        return maker.floats((maker.batch, maker.setting("audio_channels", default=1), SAMPLES))
    return maker.floats((maker.batch, SAMPLES))


def _features(maker: SampleMaker) -> torch.Tensor:
    positions = getattr(maker.model.config, "max_source_positions", None)
    kind = str(getattr(maker.model.config, "model_type", ""))
    if kind in ("whisper", "qwen2_audio", "moonshine_streaming"):
        return maker.floats((maker.batch, maker.setting("num_mel_bins"), 2 * int(positions or 1500)))
    widths = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "input_dim")
    width = maker.setting(*widths, of=AUDIO)
    return maker.floats((maker.batch, 160, width))


def _labels(maker: SampleMaker) -> torch.Tensor:
    kind, classes = type(maker.model).__name__, int(getattr(maker.model.config, "num_labels", 2) or 2)
    if "TokenClassification" in kind or "FrameClassification" in kind:
        return maker.integers(maker.text_shape(), classes)
    if "MultipleChoice" in kind:
        return maker.integers((maker.batch,), CHOICES)
    if "NextSentence" in kind:
        return maker.integers((maker.batch,), 2)
    if "Classification" in kind:
        return maker.floats((maker.batch,)) if classes == 1 else maker.integers((maker.batch,), classes)
    if any(part in kind for part in ("ConditionalGeneration", "Seq2SeqLM", "MTModel")):
        return _target(maker)
    if any(part in kind for part in ("LM", "PreTraining", "DoubleHeads")):
        return maker.text()
    raise Unmakeable(f"no labels can be made for a {kind}")


def _span(maker: SampleMaker) -> torch.Tensor:
    return maker.integers((maker.batch,), maker.length)


def _sentence(maker: SampleMaker) -> torch.Tensor:
    return maker.integers((maker.batch,), 2)


def _boxes(maker: SampleMaker) -> torch.Tensor:
    corner = maker.integers((*maker.text_shape(), 2), 8)
    return torch.cat([corner, corner + 4], dim=-1)


def _past(maker: SampleMaker) -> Any:
    """What the model itself keeps after some tokens, of whatever class that is."""
    model = maker.model
    before = maker.integers((maker.batch, PAST), maker.setting("vocab_size", of=TEXT), start=3)
    kwargs: dict[str, Any] = {"input_ids": before, "use_cache": True}
    if getattr(model.config, "is_encoder_decoder", False):
        kwargs.update(input_ids=maker.text(), decoder_input_ids=before)
    try:
        with untouched(model), torch.no_grad():
            kept = returned_in(model(**kwargs))
    except Exception as error:  # whatever a model raises that has no cache
        raise Unmakeable(f"{type(model).__name__} makes no cache ({error})") from error
    if kept is None:
        raise Unmakeable(f"{type(model).__name__} makes no cache")
    return kept


VISUAL = ("pixel_values", "pixel_mask", "bool_masked_pos")

MAKERS: dict[str, Callable[[SampleMaker], Any]] = {
    "input_ids": lambda maker: maker.text(),
    "attention_mask": _mask,
    "qformer_input_ids": _question,
    "token_type_ids": _zeros,
    "position_ids": _positions,
    "inputs_embeds": _embeds,
    "bbox": _boxes,
    "decoder_input_ids": _target,
    "decoder_attention_mask": _target_mask,
    **dict.fromkeys(NAMES, _past),
    "pixel_values": _pixels,
    "pixel_mask": _pixel_mask,
    "bool_masked_pos": _masked_patches,
    "input_values": _waves,
    "input_features": _features,
    "labels": _labels,
    "start_positions": _span,
    "end_positions": _span,
    "next_sentence_label": _sentence,
}
