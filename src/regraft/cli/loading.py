"""From the words on the command line to a model: a factory, a folder of transformers, a saved program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from regraft.capture.loading import load_program
from regraft.cli.failure import Failure, first_line
from regraft.cli.importing import imported
from regraft.core.errors import CaptureError

Model = nn.Module | ExportedProgram

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")


def load_model(spec: str, seed: int = 0) -> tuple[Model, tuple[str, ...]]:
    """The model that the command line names, in evaluation mode, and what its user should know of it.

    Args:
        spec: `package.module:factory`, a folder or a file.
        seed: of random weights.

    Raises:
        Failure: there is no such model, or it cannot be loaded.
    """
    path = Path(spec)
    torch.manual_seed(seed)
    if path.is_dir() or path.name == "config.json":
        return _of_folder(path if path.is_dir() else path.parent)
    if path.suffix == ".pt2":
        return _program(path), ()
    if path.is_file():
        raise Failure(f"{spec} is not a .pt2 file, a transformers folder or package.module:factory")
    if ":" not in spec:
        kind = "folder or file" if path.suffix == "" else "file"
        raise Failure(f"there is no {kind} {spec}, and it is not package.module:factory either")
    return _made(spec), ()


def _made(spec: str) -> Model:
    found = imported(spec)
    if not isinstance(found, (nn.Module, ExportedProgram)):
        if not callable(found):
            raise Failure(f"{spec} is of the type {type(found).__name__}: no model, and no function that makes one")
        needed = _required(found)
        if needed:
            raise Failure(f"{spec} is called without arguments, but takes {', '.join(needed)}; write a function for it")
        with blamed(f"{spec} could not make a model"):
            found = found()
    if not isinstance(found, (nn.Module, ExportedProgram)):
        raise Failure(f"{spec} made a {type(found).__name__}, and not a torch.nn.Module or an ExportedProgram")
    return found.eval() if isinstance(found, nn.Module) and not isinstance(found, torch.fx.GraphModule) else found


def _required(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _program(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise Failure(f"there is no file {path}")
    try:
        return load_program(path)
    except (CaptureError, ImportError) as error:
        raise Failure(str(error)) from error


def _of_folder(folder: Path) -> tuple[nn.Module, tuple[str, ...]]:
    if not (folder / "config.json").is_file():
        raise Failure(f"the folder {folder} has no config.json, so it is not a transformers model")
    try:
        import transformers
    except ImportError:
        raise Failure(f"{folder} is a transformers model: pip install 'regraft[hf]'") from None
    with blamed(f"the model in {folder} cannot be made"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        cls = next((c for c in named if c is not None), None)
        if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
            loader = cls or transformers.AutoModel
            return loader.from_pretrained(folder, local_files_only=True).eval(), ()
        model = cls(config) if cls is not None else transformers.AutoModel.from_config(config)
    return model.eval(), (f"{folder} holds no weights, so they are random",)


def converted(model: Model, dtype: str | None, device: str | None) -> Model:
    """The model in another type or place.

    Args:
        model: the model.
        dtype: the type's name, or None.
        device: the device, or None.

    Raises:
        Failure: there is no such device, or it is a program, which cannot be converted.
    """
    if dtype is None and device is None:
        return model
    if isinstance(model, ExportedProgram):
        raise Failure("--dtype and --device are for models; a .pt2 file keeps what it was saved with")
    with blamed("the model cannot be converted"):
        return model.to(device=device, dtype=getattr(torch, dtype) if dtype else None)


@contextmanager
def blamed(sentence: str) -> Iterator[None]:
    """Whatever is raised inside, by somebody's model or file, becomes one line.

    Args:
        sentence: how the line begins.
    """
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"{sentence}: {first_line(error)}") from error
