"""OpenVINO, through `openvino.convert_model` and a compiled model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regraft.optimize.engines.flat import Flat, Run


def build(flat: Flat) -> Run:
    """Compile a graph.

    Args:
        flat: The graph.

    Raises:
        ImportError: openvino is missing.
        Exception: What it raises where it has no form for the graph.
    """
    import openvino

    attention = torch.ops.aten.scaled_dot_product_attention.default
    model = openvino.convert_model(flat.exported().run_decompositions({attention: _with_repeated_keys}))
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",  # its default is bfloat16 where the machine has it, whatever the model is in
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    local = threading.local()  # a request serves one thread

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        found = local.request.infer([tensor.detach().contiguous().numpy() for tensor in inputs], share_inputs=True)
        return [torch.from_numpy(found[index].copy()) for index in range(len(compiled.outputs))]

    return run


def _with_repeated_keys(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **settings: Any) -> Any:
    """Attention of groups of queries with one key for each query: OpenVINO has no other."""
    if not settings.pop("enable_gqa", False):
        return NotImplemented
    each = query.shape[-3] // key.shape[-3]
    repeated = (tensor.repeat_interleave(each, -3) for tensor in (key, value))
    return torch.ops.aten.scaled_dot_product_attention.default(query, *repeated, *rest, **settings)
