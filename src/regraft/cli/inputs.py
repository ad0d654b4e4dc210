"""An example of the call: from a file, from a function, or made from the model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from regraft.capture import transformers_adapter
from regraft.capture.sample_inputs import Unmakeable, example_call
from regraft.cli.failure import Failure
from regraft.cli.importing import imported
from regraft.cli.loading import Model, blamed

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_HINT = "give an example of the call: --inputs FILE or --inputs module:function"
_BATCH, _LENGTH, _SIDE = 2, 16, 64


def make_inputs(model: Model, spec: str | None, seed: int = 0) -> Inputs:
    """The positional and keyword arguments of an example call.

    Args:
        model: whose call it is.
        spec: a file, `module:function`, or None to make them from the model.
        seed: of random numbers.

    Raises:
        Failure: the file cannot be read, or nothing can be made from the model.
    """
    torch.manual_seed(seed)
    if spec is None:
        return _from_model(model)
    path = Path(spec)
    reader = _READERS.get(path.suffix)
    if reader is not None and ":" not in spec.replace(":\\", ""):
        if not path.is_file():
            raise Failure(f"there is no file {spec}")
        with blamed(f"the inputs in {spec} cannot be read"):
            return call_of(reader(path))
    if ":" not in spec:
        raise Failure(f"{spec} is not module:function nor a file that ends with {', '.join(_READERS)}")
    found = imported(spec)
    with blamed(f"{spec} could not make the inputs"):
        return call_of(found() if callable(found) else found)


def call_of(value: Any) -> Inputs:
    """What a file or function gives as the arguments of a call.

    Args:
        value: a tensor, a tuple or list of positional arguments, a dictionary of keyword arguments, a pair of both, or
            a dictionary with the keys `args` and `kwargs`.

    >>> call_of({"x": 1})
    ((), {'x': 1})
    >>> call_of(((1, 2), {"x": 3}))
    ((1, 2), {'x': 3})
    >>> call_of({"args": [1], "kwargs": {"x": 2}})
    ((1,), {'x': 2})
    """
    if isinstance(value, Mapping):
        if value.keys() and value.keys() <= {"args", "kwargs"}:
            return tuple(value.get("args", ())), dict(value.get("kwargs", {}))
        return (), {str(key): item for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and isinstance(value[0], (tuple, list)) and isinstance(value[1], Mapping):
            return tuple(value[0]), dict(value[1])
        return tuple(value), {}
    return (value,), {}


def converted_inputs(inputs: Inputs, dtype: str | None, device: str | None) -> Inputs:
    """The tensors of a call in another place, and those that are floating-point in another type.

    Args:
        inputs: the call.
        dtype: the type's name, or None.
        device: the device, or None.
    """

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=getattr(torch, dtype) if dtype and value.is_floating_point() else None)

    moved: Inputs = torch.utils._pytree.tree_map(one, inputs)
    return moved


def _from_model(model: Model) -> Inputs:
    if isinstance(model, ExportedProgram):
        if model.example_inputs is None:
            raise Failure(f"the program was saved without its example inputs; {_HINT}")
        args, kwargs = model.example_inputs
        return tuple(args), dict(kwargs)
    if transformers_adapter.is_pretrained(model):
        try:
            return (), example_call(model)
        except Unmakeable as error:
            raise Failure(f"{error}; {_HINT}") from error
    for name in ("example_inputs", "example_input_array"):  # ours, and that of Lightning
        made = getattr(model, name, None)
        if made is not None:
            with blamed(f"{type(model).__name__}.{name} could not make the inputs"):
                return call_of(made() if callable(made) and not isinstance(made, torch.Tensor) else made)
    return _guessed(model)


def _guessed(model: nn.Module) -> Inputs:
    """One random tensor of the shape that the first layer takes, if the model takes one tensor and runs on it."""
    parameters = inspect.signature(model.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    layer = next((m for m in model.modules() if type(m) in _FIRST_LAYERS), None)
    if len(required) != 1 or layer is None:
        raise Failure(f"no inputs can be made for {type(model).__name__}({', '.join(required)}); {_HINT}")
    weight = next(model.parameters(), torch.empty(0))
    value = _FIRST_LAYERS[type(layer)](layer)
    value = value.to(weight.device, weight.dtype if value.is_floating_point() else value.dtype)
    try:
        with torch.no_grad():
            model(value)
    except Exception as error:  # whatever a model raises on a guess that is wrong
        raise Failure(f"the inputs guessed for {type(model).__name__} do not fit; {_HINT}") from error
    return (value,), {}


def _image(axes: int) -> Callable[[Any], torch.Tensor]:
    return lambda layer: torch.randn(_BATCH, layer.in_channels, *[_SIDE if axes < 3 else _LENGTH] * axes)


_FIRST_LAYERS: dict[type, Callable[[Any], torch.Tensor]] = {
    nn.Linear: lambda layer: torch.randn(_BATCH, layer.in_features),
    nn.Embedding: lambda layer: torch.randint(0, layer.num_embeddings, (_BATCH, _LENGTH)),
    nn.Conv1d: _image(1),
    nn.Conv2d: _image(2),
    nn.Conv3d: _image(3),
    nn.LSTM: lambda layer: torch.randn(_BATCH, _LENGTH, layer.input_size),
    nn.GRU: lambda layer: torch.randn(_BATCH, _LENGTH, layer.input_size),
}


def _read_torch(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise Failure(f"{path} needs the package safetensors: pip install safetensors") from None
    return load_file(path)


def _read_numpy(path: Path) -> Any:
    try:
        import numpy
    except ImportError:
        raise Failure(f"{path} needs the package numpy: pip install numpy") from None
    with numpy.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _read_json(path: Path) -> Any:
    """Nested lists of numbers become tensors: `{"input_ids": [[1, 2]]}`; scalars stay what they are."""

    def tensors(value: Any, argument: bool) -> Any:
        if isinstance(value, dict):
            return {key: tensors(item, key != "args") for key, item in value.items()}
        if isinstance(value, list) and argument:
            return torch.tensor(value)
        return [tensors(item, True) for item in value] if isinstance(value, list) else value

    return tensors(json.loads(path.read_text(encoding="utf-8")), False)


_READERS: dict[str, Callable[[Path], Any]] = {
    ".pt": _read_torch,
    ".safetensors": _read_safetensors,
    ".json": _read_json,
    ".npz": _read_numpy,
}
