"""Inputs for a transformers model, made from its config.

Only their form matters to capture, but they are valid inputs: the graph is tried on some of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regraft.capture.cache_names import name_in
from regraft.capture.sample_makers import (
    BATCH,
    CHOICES,
    IMAGES,
    LENGTH,
    MAKERS,
    PAST,
    TEXT,
    VISION,
    VISUAL,
    image_token,
    tokens_per_image,
)
from regraft.capture.sample_makers import Unmakeable as Unmakeable
from regraft.capture.transformers_adapter import main_inputs
from regraft.capture.untouched import untouched

logger = logging.getLogger("regraft")


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
        visual = any(name in VISUAL for name in names)
        both = visual and any(name not in VISUAL for name in names) and image_token(model) is None
        batches = [(BATCH, IMAGES), (BATCH, BATCH)] if both else [(BATCH, BATCH)]
        plain = cls(model, BATCH, BATCH, False)
        # a model whose config names its image size is made for that size; to leave it open takes export minutes
        fixed = visual and plain.setting("image_size", "crop_size", of=VISION, default=0) != 0
        return [cls(model, *sizes, narrow) for sizes in batches for narrow in sorted({fixed, visual})]

    def make(self, names: Sequence[str]) -> dict[str, Any]:
        """The inputs by name.

        Args:
            names: what to make.

        Raises:
            Unmakeable: one of them cannot be made.
        """
        self.generator = torch.Generator().manual_seed(0)
        self.past = PAST if name_in(names) else 0
        self.image_tokens = tokens_per_image(self) if "pixel_values" in names and image_token(self.model) else 0
        made: dict[str, Any] = {}
        for name in names:
            maker = MAKERS.get(name)
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
        if axes is None or not self.narrow or label not in VISUAL:
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
        for place in _places(self.model.config, of.split()):
            for name in names:
                value = _entry(place, name)
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
        limit = self.setting("max_position_embeddings", "n_positions", of=TEXT, default=512)
        return max(2, min(LENGTH, (int(limit) if isinstance(limit, int) and limit > 0 else 512) - 3 - self.past))

    def text_shape(self) -> tuple[int, ...]:
        """The shape of a batch of texts."""
        if "MultipleChoice" in type(self.model).__name__:
            return self.batch, CHOICES, self.length
        return self.batch, self.length + self.image_tokens

    def text(self) -> torch.Tensor:
        """Token numbers, without those that mean something special but for places that images go into."""
        text = self.integers(self.text_shape(), self.setting("vocab_size", "num_hash_buckets", of=TEXT), start=3)
        token = image_token(self.model)
        if token is not None:
            text[text == token] = (token + 1) % self.setting("vocab_size", "num_hash_buckets", of=TEXT)
            text[:, 1 : 1 + self.image_tokens] = token
        return text


def _entry(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _places(config: Any, parts: Sequence[str]) -> Iterator[Any]:
    """The parts of a config that have one of some names, and theirs, innermost first; then the whole."""
    for part in parts:
        inner = _entry(config, part)
        if inner is not None:
            yield from _places(inner, parts)
    yield config


def example_call(model: nn.Module) -> dict[str, Any]:
    """A call of a model that it runs: its main inputs, or without images where none can be made that it takes.

    Args:
        model: a transformers model.

    Raises:
        Unmakeable: none was found.
    """
    names = main_inputs(model)
    texts = [name for name in names if name not in VISUAL]
    reasons: list[str] = []
    for some in [names, texts] if "input_ids" in texts and texts != names else [names]:
        for maker in SampleMaker.variants(model, some):
            try:
                call = maker.make(some)
                with untouched(model), torch.no_grad():
                    model(**call)
            except Exception as error:  # whatever a model raises that does not take them
                reasons.append(str(error) if isinstance(error, Unmakeable) else f"{type(error).__name__}: {error}")
            else:
                if some != names:
                    left_out = [name for name in names if name not in some]
                    logger.warning("the example of %s was made without %s", type(model).__name__, ", ".join(left_out))
                return call
    said = (reasons[0].strip().splitlines() or [""])[0]
    raise Unmakeable(f"{type(model).__name__} cannot be called with {', '.join(names)} made from its config ({said})")
