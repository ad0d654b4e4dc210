"""Inputs for a transformers model, made from its config.

Only their form matters to capture, but they are valid inputs: the graph is tried on some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regraft.capture.untouched import untouched

#: sizes that are unlike each other, so that nothing in a model takes two axes for one
_BATCH, _IMAGES, _LENGTH, _TARGET, _PAST, _CHOICES, _SAMPLES = 3, 2, 11, 7, 5, 4, 5600


class Unmakeable(Exception):
    """An input that cannot be made from the config."""


@dataclass
class SampleMaker:
    """Makes the inputs of one model.

    Args:
        model: the model.
        batch: how many texts, sounds or examples there are.
        images: how many images; in most models as many as there are texts, in dual encoders any number.
        narrow: whether the sizes of images are those of the example; otherwise they may vary.
    """

    model: nn.Module
    batch: int
    images: int
    narrow: bool
    past: int = 0
    image_tokens: int = 0

    @classmethod
    def variants(cls, model: nn.Module, names: Sequence[str]) -> list[SampleMaker]:
        """The makers to try in turn, the one whose graph accepts most first.

        Args:
            model: the model.
            names: the inputs that it is to get.
        """
        visual = any(name in _VISUAL for name in names)
        both = visual and any(name not in _VISUAL for name in names) and _image_token(model) is None
        batches = [(_BATCH, _IMAGES), (_BATCH, _BATCH)] if both else [(_BATCH, _BATCH)]
        plain = cls(model, _BATCH, _BATCH, False)
        # a model whose config names its image size is made for that size; to leave it open takes export minutes
        fixed = visual and plain.setting("image_size", "crop_size", of=_VISION, default=0) != 0
        return [cls(model, *sizes, narrow) for sizes in batches for narrow in sorted({fixed, visual})]

    def make(self, names: Sequence[str]) -> dict[str, Any]:
        """The inputs by name.

        Args:
            names: what to make.

        Raises:
            Unmakeable: one of them cannot be made.
        """
        self.generator = torch.Generator().manual_seed(0)
        self.past = _PAST if "past_key_values" in names else 0
        self.image_tokens = _tokens_per_image(self) if "pixel_values" in names and _image_token(self.model) else 0
        made: dict[str, Any] = {}
        for name in names:
            maker = _MAKERS.get(name)
            if maker is None:
                raise Unmakeable(f"no {name} can be made from the config of {type(self.model).__name__}")
            made[name] = maker(self)
        return made

    def narrowed(self, label: str, axes: dict[int, Any] | None) -> dict[int, Any] | None:
        """The axes that vary of one input.

        Args:
            label: the input.
            axes: all of its axes.
        """
        if axes is None or not self.narrow or label not in _VISUAL:
            return axes
        return {0: axes[0]}

    def setting(self, *names: str, of: str = "", default: Any = None) -> Any:
        """The first of some settings that the config has, in the part of it for one kind of input.

        Args:
            names: what the setting is called in one config or another.
            of: the name of the part, such as `vision_config`; where there is none the whole is asked.
            default: for a config without.

        Raises:
            Unmakeable: there is none and no default.
        """
        config = self.model.config
        for place in [getattr(config, part, None) for part in of.split()] + [config]:
            for name in names:
                value = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
                if value is not None:
                    return value
        if default is None:
            raise Unmakeable(f"the config of {type(self.model).__name__} has no {' or '.join(names)}")
        return default

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        return next((t.dtype for t in self.model.parameters() if t.is_floating_point()), torch.float32)

    def integers(self, shape: Sequence[int], below: int, start: int = 0) -> torch.Tensor:
        """Random integers.

        Args:
            shape: their shape.
            below: what they are less than.
            start: the least of them.
        """
        drawn = torch.randint(min(start, max(below - 1, 0)), below, tuple(shape), generator=self.generator)
        return drawn.to(self.device)

    def floats(self, shape: Sequence[int]) -> torch.Tensor:
        """Random numbers, normally distributed.

        Args:
            shape: their shape.
        """
        return torch.randn(tuple(shape), generator=self.generator).to(self.device, self.dtype)

    @property
    def length(self) -> int:
        """How long a text is; shorter than the model's positions, of which some models keep two."""
        limit = self.setting("max_position_embeddings", "n_positions", of=_TEXT, default=512)
        return max(2, min(_LENGTH, (int(limit) if isinstance(limit, int) and limit > 0 else 512) - 3 - self.past))

    def text_shape(self) -> tuple[int, ...]:
        """The shape of a batch of texts."""
        if "MultipleChoice" in type(self.model).__name__:
            return self.batch, _CHOICES, self.length
        return self.batch, self.length + self.image_tokens

    def text(self) -> torch.Tensor:
        """Token numbers, without those that mean something special but for places that images go into."""
        text = self.integers(self.text_shape(), self.setting("vocab_size", of=_TEXT), start=3)
        token = _image_token(self.model)
        if token is not None:
            text[text == token] = (token + 1) % self.setting("vocab_size", of=_TEXT)
            text[:, 1 : 1 + self.image_tokens] = token
        return text


_TEXT = "text_config decoder thinker_config"
_VISION = "vision_config encoder backbone_config"


def _mask(maker: SampleMaker) -> torch.Tensor:
    if str(getattr(maker.model, "main_input_name", "")) == "input_values":
        return torch.ones(maker.batch, _SAMPLES, dtype=torch.long, device=maker.device)
    *outer, length = maker.text_shape()
    past = 0 if getattr(maker.model.config, "is_encoder_decoder", False) else maker.past
    return torch.ones(*outer, length + past, dtype=torch.long, device=maker.device)


def _zeros(maker: SampleMaker) -> torch.Tensor:
    return torch.zeros(maker.text_shape(), dtype=torch.long, device=maker.device)


def _positions(maker: SampleMaker) -> torch.Tensor:
    shape = maker.text_shape()
    return (torch.arange(shape[-1], device=maker.device) + maker.past).expand(shape).contiguous()


def _embeds(maker: SampleMaker) -> torch.Tensor:
    width = maker.setting("embedding_size", "hidden_size", "d_model", "n_embd", of=_TEXT)
    return maker.floats((*maker.text_shape(), width))


def _target(maker: SampleMaker) -> torch.Tensor:
    return maker.integers((maker.batch, _TARGET), maker.setting("vocab_size", of="decoder text_config"), start=3)


def _target_mask(maker: SampleMaker) -> torch.Tensor:
    return torch.ones(maker.batch, _TARGET + maker.past, dtype=torch.long, device=maker.device)


def _image_size(maker: SampleMaker) -> tuple[int, int]:
    size = maker.setting("image_size", "crop_size", of=_VISION, default=224)
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _image_token(model: nn.Module) -> int | None:
    """The token that stands for a piece of an image in a text; None for models that do not mix the two."""
    for name in ("image_token_id", "image_token_index"):
        token = getattr(model.config, name, None)
        if isinstance(token, int) and token >= 0:
            return token
    return None


def _tokens_per_image(maker: SampleMaker) -> int:
    given = maker.setting("image_seq_length", "mm_tokens_per_image", default=0)
    height, width = _image_size(maker)
    patch = int(maker.setting("patch_size", of=_VISION, default=1))
    return int(given) or (height // patch) * (width // patch)


def _pixels(maker: SampleMaker) -> torch.Tensor:
    channels = maker.setting("num_channels", "in_channels", "in_chans", of=_VISION, default=3)
    frames = getattr(maker.model.config, "num_frames", None)
    outer = (maker.images, frames) if isinstance(frames, int) and frames > 1 else (maker.images,)
    return maker.floats((*outer, channels, *_image_size(maker)))


def _pixel_mask(maker: SampleMaker) -> torch.Tensor:
    return torch.ones(maker.images, *_image_size(maker), dtype=torch.long, device=maker.device)


def _masked_patches(maker: SampleMaker) -> torch.Tensor:
    height, width = _image_size(maker)
    patch = maker.setting("patch_size", of=_VISION)
    return maker.integers((maker.images, (height // patch) * (width // patch)), 2).bool()


def _waves(maker: SampleMaker) -> torch.Tensor:
    bins, length = getattr(maker.model.config, "num_mel_bins", None), getattr(maker.model.config, "max_length", None)
    if isinstance(bins, int) and getattr(maker.model.config, "patch_size", None) is not None:
        return maker.floats((maker.batch, int(length or 1024), bins))  # a spectrogram that is looked at as an image
    return maker.floats((maker.batch, _SAMPLES))


def _features(maker: SampleMaker) -> torch.Tensor:
    positions = getattr(maker.model.config, "max_source_positions", None)
    kind = str(getattr(maker.model.config, "model_type", ""))
    if kind in ("whisper", "qwen2_audio", "moonshine_streaming"):
        return maker.floats((maker.batch, maker.setting("num_mel_bins"), 2 * int(positions or 1500)))
    width = maker.setting("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "input_dim")
    return maker.floats((maker.batch, 160, width))


def _labels(maker: SampleMaker) -> torch.Tensor:
    kind, classes = type(maker.model).__name__, int(getattr(maker.model.config, "num_labels", 2) or 2)
    if "TokenClassification" in kind or "FrameClassification" in kind:
        return maker.integers(maker.text_shape(), classes)
    if "MultipleChoice" in kind:
        return maker.integers((maker.batch,), _CHOICES)
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
    before = maker.integers((maker.batch, _PAST), maker.setting("vocab_size", of=_TEXT), start=3)
    kwargs: dict[str, Any] = {"input_ids": before, "use_cache": True}
    if getattr(model.config, "is_encoder_decoder", False):
        kwargs.update(input_ids=maker.text(), decoder_input_ids=before)
    try:
        with untouched(model), torch.no_grad():
            kept = model(**kwargs).past_key_values
    except Exception as error:  # whatever a model raises that has no cache
        raise Unmakeable(f"{type(model).__name__} makes no past_key_values ({error})") from error
    if kept is None:
        raise Unmakeable(f"{type(model).__name__} makes no past_key_values")
    return kept


_VISUAL = ("pixel_values", "pixel_mask", "bool_masked_pos")

_MAKERS: dict[str, Callable[[SampleMaker], Any]] = {
    "input_ids": SampleMaker.text,
    "attention_mask": _mask,
    "token_type_ids": _zeros,
    "position_ids": _positions,
    "inputs_embeds": _embeds,
    "bbox": _boxes,
    "decoder_input_ids": _target,
    "decoder_attention_mask": _target_mask,
    "past_key_values": _past,
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
