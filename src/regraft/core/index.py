"""Who holds a module or a tensor, and who reads it: an index of a graph module, kept up to date while rules edit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from regraft.core.modules import graph_modules, walk
from regraft.core.vocabulary import attribute


class Index:
    """The part of `Facts` that knows the names and the readers of every module and every tensor.

    Args:
        root: The graph module, its nested graph modules included.
    """

    def __init__(self, root: GraphModule) -> None:
        self.root = root
        self.graphs = graph_modules(root)
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        self._readers: defaultdict[int, set[Node]] = defaultdict(set)
        self._reads: dict[Node, list[int]] = {}
        self.add("", root)
        for owner in self.graphs.values():
            for node in owner.graph.nodes:
                self.note(node, owner)

    # What changes while rules edit: the editor keeps these up to date.

    def note(self, node: Node, owner: GraphModule) -> None:
        """`node` reads a module with its weights, or one weight."""
        if node.op in ("call_module", "get_attr"):
            value = attribute(owner, str(node.target))
            whole = isinstance(value, nn.Module) and not isinstance(value, GraphModule)  # its own nodes read its parts
            self._reads[node] = reads = [id(value), *map(id, _weights(value) if whole else ())]
            for part in reads:
                self._readers[part].add(node)

    def forget(self, node: Node) -> None:
        """`node` no longer reads what it read."""
        for part in self._reads.pop(node, ()):
            self._readers[part].discard(node)

    def add(self, name: str, value: Any) -> None:
        """The module or tensor `value` now stands under the qualified `name`."""
        for path, held in _held(name, value):
            self._names[id(held)].append(path)

    def remove(self, name: str, value: Any) -> None:
        """The module or tensor `value` no longer stands under `name`."""
        for path, held in _held(name, value):
            names = self._names.get(id(held), [])
            if path in names:
                names.remove(path)

    # The questions.

    def names_of(self, value: Any) -> list[str]:
        """Every name under which this module or tensor stands."""
        return self._names.get(id(value), [])

    def readers_of(self, value: Any) -> set[Node]:
        """The nodes that read this module or tensor."""
        return self._readers.get(id(value), set())

    def unread(self, value: Any) -> bool:
        """No node reads this module or tensor."""
        return not self.readers_of(value)


def _held(name: str, value: Any) -> list[tuple[str, Any]]:
    """The module or tensor and everything in it, each under every one of its names."""
    if not isinstance(value, nn.Module):
        return [(name, value)] if value is not None else []
    found: list[tuple[str, Any]] = []
    for path, module in walk(value, name):
        found.append((path, module))
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            found += [(prefix + key, tensor) for key, tensor in table.items() if tensor is not None]
    return found


def _weights(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module and of those in it."""
    parts = [part for _, part in walk(module)] if module._modules else [module]
    tables = (table for part in parts for table in (part._parameters, part._buffers))
    return [tensor for table in tables for tensor in table.values() if tensor is not None]
