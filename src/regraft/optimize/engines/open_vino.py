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
    rounded = [result.element_type == openvino.Type.bf16 for result in model.outputs]
    half = any(weight.dtype is torch.bfloat16 for weight in flat.module.state_dict().values())
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        # its default is bfloat16 where the machine has it, whatever the model is in
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
    }
    compiled = openvino.Core().compile_model(_in_numpy(model), "CPU", settings)
    local = threading.local()  # a request serves one thread

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        found = local.request.infer([_numpy(tensor) for tensor in inputs], share_inputs=True)
        results = [torch.from_numpy(found[index].copy()) for index in range(len(rounded))]
        return [result.bfloat16() if was else result for result, was in zip(results, rounded, strict=True)]

    return run


def _in_numpy(model: Any) -> Any:
    """The model with float32 for each bfloat16 that it takes or gives, which NumPy does not know."""
    from openvino import Type
    from openvino.preprocess import PrePostProcessor

    outside = PrePostProcessor(model)
    for ports, at in ((model.inputs, outside.input), (model.outputs, outside.output)):
        for index, port in enumerate(ports):
            if port.element_type == Type.bf16:
                at(index).tensor().set_element_type(Type.f32)
    return outside.build()


def _numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _with_repeated_keys(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **settings: Any) -> Any:
    """Attention of groups of queries with one key for each query: OpenVINO has no other."""
    if not settings.pop("enable_gqa", False):
        return NotImplemented
    each = query.shape[-3] // key.shape[-3]
    repeated = (tensor.repeat_interleave(each, -3) for tensor in (key, value))
    return torch.ops.aten.scaled_dot_product_attention.default(query, *repeated, *rest, **settings)
