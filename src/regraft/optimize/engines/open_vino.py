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

    model = openvino.convert_model(flat.exported())
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
