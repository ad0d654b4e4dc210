"""`list`, `show`, `env`: the commands that need no model."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import os
import platform
from typing import Any

import torch

from regraft.cli.choosing import class_named, command_line_name, known, parameters
from regraft.cli.preparing import print_json
from regraft.core.transformation import ReversibleTransformation, Transformation
from regraft.report import text


def list(arguments: argparse.Namespace) -> int:  # noqa: A001
    """Print the transformations."""
    described = [_described(name, cls) for name, cls in known().items()]
    if arguments.json:
        print_json(described)
        return 0
    rows = tuple((d["name"], "yes" if d["preserves_computation"] else "no", d["summary"]) for d in described)
    columns = ("name", "preserves", "what it does")
    text.show(text.Table(f"{len(rows)} transformations", columns, rows, notes=("more of one: regraft show NAME",)))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print all about one transformation."""
    cls = class_named(arguments.name)
    described = _described(command_line_name(cls), cls)
    if arguments.json:
        print_json({**described, "docstring": _docstring(cls)})
        return 0
    text.show(f"{described['name']} ({cls.__module__}.{cls.__name__})\n\n{_docstring(cls) or 'no docstring'}\n")
    facts = (
        ("preserves the computation", "yes" if described["preserves_computation"] else "no"),
        ("can be taken back", "yes" if described["reversible"] else "by undo only"),
        *((f"option {name}", "required" if d is None else f"default {d}") for name, d in described["options"].items()),
    )
    text.show(text.Table("in short", ("", ""), facts))
    return 0


def _docstring(cls: type) -> str | None:
    """Its own: `inspect.getdoc` would take that of `Rewrite` where it has none."""
    return inspect.cleandoc(cls.__doc__) if cls.__doc__ else None


def _described(name: str, cls: type[Transformation]) -> dict[str, Any]:
    options = {n: None if p.default is p.empty else repr(p.default) for n, p in parameters(cls).items()}
    return {
        "name": name,
        "class": f"{cls.__module__}.{cls.__name__}",
        "summary": " ".join((_docstring(cls) or "").split("\n\n")[0].split()),
        "preserves_computation": bool(cls.preserves_computation),
        "reversible": issubclass(cls, ReversibleTransformation),
        "options": options,
    }


def env(arguments: argparse.Namespace) -> int:
    """Print versions and machine."""
    found = environment()
    if arguments.json:
        print_json(found)
    else:
        text.show(text.Table("environment", ("", ""), tuple((key, str(value)) for key, value in found.items())))
    return 0


_PACKAGES = ("regraft", "torch", "transformers", "torchao", "onnx", "onnxruntime", "openvino", "rich", "jinja2")


def versions() -> dict[str, str]:
    """The versions of regraft, Python and the packages that matter, as far as installed."""
    found = {"regraft": "run from its source", "python": platform.python_version()}
    for name in (*_PACKAGES, "matplotlib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """Versions, and what of the machine decides how fast things are."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        **versions(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
