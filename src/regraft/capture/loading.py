"""Reading a `.pt2` file: a program names the classes that it takes and returns, which have to be known beforehand."""

from __future__ import annotations

import importlib
import logging
import os
import re
import zipfile
from pathlib import Path

import torch

from regraft.capture import transformers_adapter, user_dicts
from regraft.core.errors import CaptureError

_KIND = re.compile(r'\\"type\\": \\"(transformers\.[\w.]+)\\"')


def load_program(path: str | Path) -> torch.export.ExportedProgram:
    """`torch.export.load`, after the classes of transformers among its inputs and results have been made known.

    Args:
        path: the file.

    Raises:
        TypeError: it is no path.
        FileNotFoundError: there is no such file.
        ImportError: the program returns a class of transformers, which is not installed.
        CaptureError: it is no program, or one that this torch cannot load.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'path is a {type(path).__name__}, but takes that of a file: regraft.load("model.pt2")')
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}; result.save({str(path)!r}) writes one")
    _make_known(path)
    said: list[str] = []

    def heard(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            said.append(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}".splitlines()[0])
        return False  # torch logs the cause with its traceback, and raises an error that says nothing of it

    logger = logging.getLogger("torch.export")
    logger.addFilter(heard)
    try:
        return torch.export.load(path)
    except Exception as error:  # whatever stands in the file
        cause = (said or str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise CaptureError(f"{path} cannot be loaded as a program of torch.export: {cause}") from error
    finally:
        logger.removeFilter(heard)


def _make_known(path: str | Path) -> None:
    user_dicts.make_known()
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(name).decode() for name in archive.namelist() if re.search(r"models/[^/]*\.json$", name)]
    for kind in {kind for text in texts for kind in _KIND.findall(text)}:
        module, _, name = kind.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise ImportError(f"{path} holds a {kind}: pip install 'regraft[hf]' ({error})") from error
        user_dicts.make_known()
        if isinstance(found, type):
            transformers_adapter.register_container(found)
