"""ONNX Runtime, through `torch.onnx.export` and an inference session."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from regraft.optimize.engines.flat import Flat, Run
from regraft.optimize.engines.stable import stably_spelled


def build(flat: Flat) -> Run:
    """Make a session for a graph.

    Args:
        flat: The graph.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        Exception: What they raise where they have no form for the graph.
    """
    import onnxruntime

    # With gradients the exporter takes the other kernel of attention, whose strides its own passes then refuse.
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(stably_spelled(flat.exported()), dynamo=True, verbose=False, optimize=True)
        assert program is not None
        path = Path(folder) / "model.onnx"
        program.save(str(path), external_data=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        feed = {name: tensor.detach().numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, feed)]

    return flat.covering(run)
