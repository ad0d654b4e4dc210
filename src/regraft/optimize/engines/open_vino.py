"""OpenVINO, through `openvino.convert_model` and a compiled model."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regraft.core.errors import NotCovered
from regraft.optimize.engines.flat import Flat, Run
from regraft.optimize.engines.stable import STABLE

aten = torch.ops.aten

_LONGEST = 1 << 24


def build(flat: Flat) -> Run:
    """Compile a graph.

    OpenVINO computes with the memory of the weights that it is given, and does not hold on to it where they are in
    bfloat16. They are copies, which `.data` or `share_memory_()` of the model's do not move, and live as long as
    what is returned.

    Args:
        flat: The graph.

    Raises:
        ImportError: openvino is missing.
        Exception: What it raises where it has no form for the graph.
    """
    import openvino

    with _unnoticed():
        model, tables = _converted(flat)
    # which lets every size vary, and that costs time; one that may is -1 to it
    model.reshape(dict(enumerate(map(_sizes, flat.sample, flat.varying))))
    rounded = [result.element_type == openvino.Type.bf16 for result in model.outputs]
    half = any(weight.dtype is torch.bfloat16 for weight in flat.module.state_dict().values())
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        # its default is bfloat16 where the machine has it, whatever the model is in
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    local = threading.local()  # a request serves one thread

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not hasattr(local, "request"):
            local.request, local.weights = compiled.create_infer_request(), tables  # and what it computes with
        request = local.request
        if not all(map(_is_short, inputs)):
            raise NotCovered("OpenVINO computes whole numbers with as few as 24 bits")
        local.given = [_shared(tensor.detach().contiguous()) for tensor in inputs]  # a request does not hold on to them
        # one by one: given to `infer`, they take longer, and so do the results in the dictionary that it makes
        for index, tensor in enumerate(local.given):
            request.set_input_tensor(index, tensor)
        request.infer(share_outputs=True)
        return [_copied(request.get_output_tensor(index).data, low) for index, low in enumerate(rounded)]

    return flat.covering(run)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Without what a conversion tells of its own code, and the level that one that fails leaves on the root logger."""
    root = logging.getLogger()
    level, handlers, filters = root.level, root.handlers[:], root.filters[:]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        root.setLevel(level)
        root.handlers, root.filters = handlers, filters


def _converted(flat: Flat) -> tuple[Any, Any]:
    """A graph as OpenVINO's model, and the weights that it computes with."""
    import openvino

    spelled = {
        **STABLE,
        aten.scaled_dot_product_attention.default: _with_repeated_keys,
        aten.cat.default: _without_nothing,
        aten.floor_divide.default: _floored,
        aten.floor_divide.Scalar: _floored,
        aten.div.Tensor_mode: _floored,
        aten.div.Scalar_mode: _floored,
    }
    program = flat.exported().run_decompositions(spelled)
    tables = program.state_dict, program.constants
    for table in tables:
        table.update(copy.deepcopy(table))
        for weight in table.values():
            if isinstance(weight, Tensor):  # or OpenVINO would make another copy, which nobody keeps
                weight.data = weight.detach().contiguous()
    return openvino.convert_model(program), tables


def _sizes(tensor: Tensor, varying: Mapping[int, Any]) -> list[int]:
    return [-1 if axis in varying else size for axis, size in enumerate(tensor.shape)]


def _is_short(tensor: Tensor) -> bool:
    """Whether whole numbers are such as OpenVINO is right with: it makes 32 bits of 64, and divides in float32.

    NumPy looks, since torch's threads would slow OpenVINO's.
    """
    if tensor.dtype not in (torch.int64, torch.int32) or not tensor.numel():
        return True
    numbers = tensor.detach().numpy()
    return bool(numbers.min() >= -_LONGEST and numbers.max() <= _LONGEST)


def _shared(tensor: Tensor) -> Any:
    """The tensor for OpenVINO, in the same memory.

    NumPy knows no bfloat16, and torch would convert it with threads that then slow OpenVINO's.
    """
    from openvino import Tensor as OpenVinoTensor
    from openvino import Type

    if tensor.dtype is torch.bfloat16:
        return OpenVinoTensor(tensor.view(torch.int16).numpy(), list(tensor.shape), Type.bf16)
    return OpenVinoTensor(tensor.numpy(), shared_memory=True)


def _copied(result: Any, low: bool) -> Tensor:
    """A result of OpenVINO, which uses the memory again; bfloat16 comes as an array of another type of two bytes."""
    copied = result.copy()
    return torch.from_numpy(copied.view("int16")).view(torch.bfloat16) if low else torch.from_numpy(copied)


def _with_repeated_keys(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **settings: Any) -> Any:
    """Attention of groups of queries with one key for each query: OpenVINO has no other."""
    if not settings.pop("enable_gqa", False):
        return NotImplemented
    each = query.shape[-3] // key.shape[-3]
    repeated = (tensor.repeat_interleave(each, -3) for tensor in (key, value))
    return aten.scaled_dot_product_attention.default(query, *repeated, *rest, **settings)


def _without_nothing(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """What is joined but what has one axis with nothing along it, as a cache begins with: OpenVINO does not skip it."""
    rest = [tensor for tensor in tensors if tensor.shape != (0,)]
    if len(rest) in (0, len(tensors)) or len({tensor.dtype for tensor in tensors}) > 1:
        return NotImplemented
    return aten.cat.default(rest, dim)


def _floored(number: Tensor, by: Any, *, rounding_mode: str | None = "floor") -> Any:
    """Whole numbers divided and rounded down, by a division without a rest: OpenVINO rounds some of them up."""
    if rounding_mode != "floor" or torch.result_type(number, by).is_floating_point:
        return NotImplemented
    return torch.div(number - number.remainder(by), by, rounding_mode="trunc")
