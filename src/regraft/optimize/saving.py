"""A rewritten graph as an exported program: in a file that plain torch loads and runs, and back."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from regraft.capture import lift
from regraft.capture.loading import load_program
from regraft.core.errors import CaptureError
from regraft.core.values import varying_axes

logger = logging.getLogger("regraft")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def exported(gm: GraphModule, inputs: Inputs, first: bool = False) -> ExportedProgram:
    """The graph as an exported program, with the sizes that vary in the graph.

    Args:
        gm: The graph module.
        inputs: A call of it.
        first: Whether the program is to return the first of what the graph returns.

    Raises:
        Exception: What torch raises that cannot export it.
    """
    args, kwargs = inputs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shapes = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    values = [value for value in shapes if isinstance(value, Tensor)]
    known = values if len(values) == len(tensors) else [None] * len(tensors)
    axes = [dict.fromkeys(varying_axes(value), Dim.AUTO) for value in known]
    larger = iter([_doubled(tensor, varying) for tensor, varying in zip(tensors, axes)])
    dims = iter(axes)
    given = pytree.tree_unflatten([next(larger) if isinstance(x, Tensor) else x for x in leaves], spec)
    dynamic = pytree.tree_unflatten([next(dims) if isinstance(x, Tensor) else None for x in leaves], spec)
    program = _first_of(gm) if first else gm
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(program, *given, dynamic_shapes=_plain(dynamic), strict=False)
        except Exception:  # sizes that cannot all be doubled, or that export ties to each other
            if not any(axes):
                raise
            logger.warning("the program was exported for the sizes of the example only")
            return torch.export.export(program, args, kwargs, strict=False)


def _first_of(gm: GraphModule) -> nn.Module:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph_module = gm

        @functools.wraps(type(gm).forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return self.graph_module(*args, **kwargs)[0]

    return First()


def _doubled(tensor: Tensor, axes: dict[int, Any]) -> Tensor:
    """Export takes an axis of size one for a fixed one."""
    for axis in axes:
        if tensor.shape[axis] == 1:
            tensor = torch.cat([tensor, tensor], dim=axis)
    return tensor


def _plain(dynamic: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The form of `torch.export`: positional ones in a tuple, or named ones in a dictionary."""
    args, kwargs = dynamic
    if not args:
        return kwargs or None
    return (*args, *kwargs.values())


def save(gm: GraphModule, inputs: Inputs, path: str | Path, first: bool = False) -> None:
    """Write the graph to a `.pt2` file.

    Args:
        gm: The graph module.
        inputs: A call of it.
        path: The file.
        first: As for `exported`.

    Raises:
        CaptureError: It returns a string, which torch would write into the file and then not read.
    """
    program = exported(gm, inputs, first)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument) and isinstance(spec.arg.value, str):
            raise CaptureError(
                f"the model returns the string {spec.arg.value!r}, which torch cannot read back from the file of a "
                'program; return tensors and numbers, or keep the whole model: torch.save(result.model, "model.pt")'
            )
    torch.export.save(program, path)


def load(path: str | Path) -> GraphModule:
    """Read a graph that `Optimized.save` or `torch.export.save` has written.

    Args:
        path: The file. Where it returns classes of a library other than transformers, that one is imported first.

    Raises:
        TypeError: It is no path.
        FileNotFoundError: There is no such file.
        CaptureError: It is no program, or one that this torch cannot load.
    """
    return lift(load_program(path))
