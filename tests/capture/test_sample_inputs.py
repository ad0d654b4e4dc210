"""The inputs that are made from the config of a model of transformers are such that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regraft.capture.sample_inputs import SampleMaker

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
