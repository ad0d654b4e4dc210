"""MergeLinears where one input feeds every layer: the keys and values of a decoder's cross attention."""

from __future__ import annotations

import pytest
import torch

import regraft as rg

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_every_key_and_value_of_one_encoder_output_is_one_product(kind: str) -> None:
    sizes = {"vocab_size": 40, "d_model": 16}
    if kind == "t5":
        config = transformers.T5Config(**sizes, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False)
        model = transformers.T5Model(config).eval()
    elif kind == "bart":
        sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sides |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "use_cache": False, "max_position_embeddings": 40}
        model = transformers.BartModel(transformers.BartConfig(**sizes, **sides)).eval()
    else:
        sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sides |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "use_cache": False, "max_source_positions": 10}
        model = transformers.WhisperModel(transformers.WhisperConfig(**sizes, **sides, pad_token_id=1)).eval()
    source = {"input_features": torch.randn(2, 80, 20)} if kind == "whisper" else {}
    source = source or {"input_ids": torch.randint(3, 40, (2, 7))}
    inputs = {**source, "decoder_input_ids": torch.randint(3, 40, (2, 4))}
    gm = rg.trace(model, (), inputs, dynamic_shapes="auto")
    code = gm.code
    rg.MergeLinears()(gm)
    across = [site for site in rg.history(gm)[-1].applied if site.sentence.count("+") == 3]
    assert len(across) == 1
    others = {"input_ids": torch.randint(3, 40, (3, 9)), "decoder_input_ids": torch.randint(3, 40, (3, 5))}
    if kind == "whisper":
        others = {"input_features": torch.randn(3, 80, 20), "decoder_input_ids": others["decoder_input_ids"]}
    for given in (inputs, others):
        with torch.no_grad():
            torch.testing.assert_close(gm(**given)[0], model(**given)[0])
    rg.undo(gm)
    assert gm.code == code
