"""`lift`: an `ExportedProgram` that somebody has already becomes a graph module."""

from __future__ import annotations

import torch

from regraft.core.graph_module import GraphModule


def lift(exported_program: torch.export.ExportedProgram) -> GraphModule:
    raise NotImplementedError
