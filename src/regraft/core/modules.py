"""The tree of modules, straight through its tables: torch's own ways there are several times slower."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule


def module_at(root: nn.Module, path: str) -> nn.Module:
    """`root.get_submodule(path)`; it is asked for at every edit.

    Raises:
        AttributeError: if there is no such module.
    """
    module: nn.Module | None = root
    for part in path.split(".") if path else ():
        module = module.__dict__["_modules"].get(part) if module is not None else None
    if module is None:
        raise AttributeError(f"there is no module {path!r}")
    return module


def walk(module: nn.Module, path: str = "", once: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """`module` and all modules below it, with their paths, in the order of `named_modules`.

    Args:
        module: Where to begin.
        path: Its own path.
        once: Pass each module once, under the first of its paths.
    """
    stack, seen = [(path, module)], set[int]()
    while stack:
        path, module = stack.pop()
        if once:
            if id(module) in seen:
                continue
            seen.add(id(module))
        yield path, module
        children = module.__dict__["_modules"]
        if children:
            prefix = f"{path}." if path else ""
            stack += [(prefix + name, child) for name, child in reversed(list(children.items())) if child is not None]


def graph_modules(root: nn.Module) -> dict[str, GraphModule]:
    """Every graph module in `root`, itself included, under the first of its paths."""
    found: dict[str, GraphModule] = {}
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        seen.add(id(module))
        if isinstance(module, GraphModule):
            found[path] = module
        for name, child in module._modules.items():
            if child is not None and (child._modules or isinstance(child, GraphModule)) and id(child) not in seen:
                visit(f"{path}.{name}" if path else name, child)

    visit("", root)
    return found


def is_layer(module: object) -> bool:
    """Whether it is a layer, which the caller's model holds too; graph modules and bare containers are our own."""
    return type(module) is not nn.Module and not isinstance(module, GraphModule)
