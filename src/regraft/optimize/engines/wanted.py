"""The engines there are, and which of them are tried where some are asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram

#: the engines by name: the file here that knows each, and the packages that it needs
ENGINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "onednn": ("onednn_graph", ()),
    "inductor": ("inductor", ()),
    "onnxruntime": ("onnx_runtime", ("onnx", "onnxscript", "onnxruntime")),
    "openvino": ("open_vino", ("openvino",)),
}
#: what is tried where torch itself is to run the graph: what comes with it, and needs neither a compiler nor a package
OF_TORCH = ("onednn",)
#: what can be asked for; the last two not among others: there would be nothing to choose, or no others to name
_NAMES = ("torch", *ENGINES, "eager", "auto")
_ALONE = _NAMES[-2:]


def missing_packages(name: str) -> tuple[str, ...]:
    """The packages that an engine needs and that are not installed.

    Args:
        name: The engine.
    """
    return tuple(package for package in ENGINES[name][1] if importlib.util.find_spec(package) is None)


def expect_installed(names: Sequence[str]) -> None:
    """Make sure that the engines that were asked for by name are there.

    Args:
        names: What was asked for.

    Raises:
        ImportError: One is not; the message shows how to install it.
    """
    for name in names:
        missing = missing_packages(name) if name in ENGINES else ()
        if missing:
            raise ImportError(f"engine={name!r} needs {', '.join(missing)}: pip install 'regraft[{name}]'")


def need_a_module(names: Sequence[str]) -> bool:
    """Whether there may be an engine, which runs in the drop-in of a module: a graph module has none.

    Args:
        names: What was asked for.
    """
    return tuple(names) not in (("torch",), ("eager",))


def expect_engines(engine: Any, model: Any) -> tuple[str, ...]:
    """What a caller asks for, each once, in the order given.

    Args:
        engine: The name of an engine, or several.
        model: What it is to run.

    Raises:
        TypeError: It is no name, and no list of names.
        ValueError: There is no such engine, it cannot be among others, or it cannot run what the model is.
        ImportError: It is not installed.
    """
    call = 'regraft.optimize(model, args, engine=["torch", "openvino"])'
    if not isinstance(engine, (str, list, tuple)) or not all(isinstance(name, str) for name in engine):
        raise TypeError(f"engine={engine!r}, but takes a name, or a list of names: {call}")
    names = (engine,) if isinstance(engine, str) else tuple(dict.fromkeys(engine))
    for name in names:
        if name not in _NAMES:
            raise ValueError(f"engine={name!r}, but takes one of {', '.join(map(repr, _NAMES))}, or a list of some")
        if name in _ALONE and len(names) > 1:
            raise ValueError(f"engine={engine!r}, but {name!r} is not one of several: engine={name!r}, or {call}")
    if not names:
        raise ValueError(f"engine={engine!r} names none: {call}")
    expect_installed(names)
    if need_a_module(names) and isinstance(model, (fx.GraphModule, ExportedProgram)):
        raise ValueError(
            f"engine={engine!r} needs a module, whose drop-in can call it, and a {type(model).__name__} comes back as "
            f"one: regraft.optimize(module, args, engine={engine!r})"
        )
    return names


def engines_of(names: Sequence[str]) -> list[str]:
    """The engines to try, in order, each once.

    Args:
        names: What was asked for.

    Example:
        >>> engines_of(["torch", "openvino"])
        ['onednn', 'openvino']
    """
    if tuple(names) == ("auto",):
        return [name for name in ENGINES if not missing_packages(name)]
    each = (OF_TORCH if name == "torch" else (name,) for name in names)
    return list(dict.fromkeys(name for some in each for name in some))
