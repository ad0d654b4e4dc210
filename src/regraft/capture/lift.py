"""`lift`: an `ExportedProgram` that somebody has already becomes a graph module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.fx import Node

from regraft.capture import torch_private
from regraft.capture.assembling import assemble
from regraft.capture.calling import Argument
from regraft.capture.layer_table import BUILDERS, arguments_of
from regraft.capture.module_tree import attribute
from regraft.capture.signature import Interface
from regraft.core.errors import CaptureError
from regraft.core.graph_module import GraphModule
from regraft.core.portable import load_callable

aten = torch.ops.aten
_WEIGHTS = {InputKind.PARAMETER, InputKind.BUFFER}


def lift(exported_program: torch.export.ExportedProgram) -> GraphModule:
    """Turn an exported program into a graph of layers.

    The common layers of `torch.nn` are built again around the program's own weights, under the names that they had in
    the model; what cannot be built from the program alone stays the call that it is. Parameters that the model had and
    the program does not use are in neither.

    Args:
        exported_program: a program from `torch.export.export`, not decomposed; it is not changed.

    Raises:
        TypeError: it is no exported program.
        CaptureError: the program has inputs that a graph module has no form for.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> program = torch.export.export(model, (torch.ones(2, 4),))
        >>> [(node.target, type(gm.get_submodule(node.target)).__name__)
        ...  for gm in [lift(program)] for node in gm.graph.nodes if node.op == "call_module"]
        [('0', 'Linear'), ('1', 'ReLU')]
    """
    if not isinstance(exported_program, torch.export.ExportedProgram):
        raise TypeError(
            f"lift takes a torch.export.ExportedProgram, and got {type(exported_program).__name__}; "
            "a model is captured by regraft.trace(model, args)"
        )
    interface = _interface(exported_program)
    tree = _tree(exported_program)
    try:
        return assemble(tree, exported_program, interface, exported_program.call_spec.out_spec)
    except NotImplementedError as error:
        raise CaptureError(f"the program cannot be lifted: {error}") from error


def _interface(program: torch.export.ExportedProgram) -> Interface:
    """The signature of a program: its positional arguments, then its keyword arguments."""
    in_spec = program.call_spec.in_spec
    assert in_spec is not None
    positional, keyed = torch_private.spec_children(in_spec)
    names = _argument_names(program, torch_private.spec_children(positional))
    named = [*zip(names, torch_private.spec_children(positional))]
    named += [*zip(torch_private.spec_context(keyed), torch_private.spec_children(keyed))]
    inputs = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    given = iter(inputs)
    arguments, labels, sources = [], [], []
    for name, spec in named:
        flat: list[tuple[Any, ...] | None] = []
        for index in range(spec.num_leaves):
            leaf = next(given)
            if isinstance(leaf, TensorArgument):
                flat.append(None)
                labels.append(name if torch_private.is_leaf(spec) else f"{name}[{index}]")
                sources.append(f"L['{name}']" if torch_private.is_leaf(spec) else f"L['{name}'][{index}]")
            elif isinstance(leaf, ConstantArgument):
                flat.append((leaf.value,))
            else:
                raise CaptureError(
                    f"the program takes a {type(leaf).__name__} as {name}, and a graph takes tensors alone"
                )
        arguments.append(Argument(name, None if torch_private.is_leaf(spec) else spec, tuple(flat)))
    return Interface(arguments, len(arguments), labels, sources)


def _argument_names(program: torch.export.ExportedProgram, specs: list[Any]) -> list[str]:
    signature = program.module_call_graph[0].signature
    known = list(getattr(signature, "forward_arg_names", None) or ())
    return known[: len(specs)] if len(known) >= len(specs) else [f"arg_{index}" for index in range(len(specs))]


def _tree(program: torch.export.ExportedProgram) -> nn.Module:
    """The modules of the model, as far as the program tells of them."""
    root = nn.Module()
    tensors = _tensors(program)
    layers = _layers(program, {name: tensor for name, (tensor, _) in tensors.items()})
    persistent = list(program.state_dict)
    for name in persistent:  # first, because what is placed first comes first in the `state_dict`
        _container(root, name.split(".")[:-1])
    for path, layer in layers.items():
        _place(root, path, layer)
    for name in [*persistent, *(name for name in tensors if name not in program.state_dict)]:
        tensor, kept = tensors.get(name, (program.state_dict.get(name), True))
        if isinstance(tensor, torch.Tensor):
            _set_tensor(root, name, tensor, kept)
    root.training = any(layer.training for layer in layers.values() if isinstance(layer, nn.Dropout)) or any(
        layer.training for layer in layers.values() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    )
    for module in root.modules():
        if not isinstance(module, (nn.Dropout, nn.modules.batchnorm._BatchNorm)):
            module.training = root.training
    return root


def _tensors(program: torch.export.ExportedProgram) -> dict[str, tuple[torch.Tensor, bool]]:
    found: dict[str, tuple[torch.Tensor, bool]] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in _WEIGHTS:
            name = str(spec.target)
            kept = name in program.state_dict
            found[name] = (program.state_dict[name] if kept else program.constants[name], kept)
    return found


def _layers(program: torch.export.ExportedProgram, tensors: dict[str, torch.Tensor]) -> dict[str, nn.Module]:
    """The layers that can be built: each with one call to its name, or several that say the same."""
    placeholders = {
        spec.arg.name: tensors.get(str(spec.target))
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    }
    calls: dict[str, list[Node]] = {}
    kinds: dict[str, Any] = {}
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op == "call_function" and stack and not _is_note(node):
            path, kind = next(reversed(stack.values()))
            calls.setdefault(path, []).append(node)
            kinds[path] = kind
    layers: dict[str, nn.Module] = {}
    for path, nodes in calls.items():
        layer = _layer(_class_of(kinds[path]), nodes, placeholders)
        if layer is not None and path:  # not the model itself, which no graph can call
            layers[path] = layer
    return layers


def _is_note(node: Node) -> bool:
    """Calls inside of a layer that are not its computation: a check, and the counter of a batch norm."""
    return node.target in (aten._assert_tensor_metadata.default, aten.add_.Tensor, aten.sym_size.int)


def _layer(kind: Any, nodes: Iterable[Node], tensors: dict[str, Any]) -> nn.Module | None:
    described = []
    for node in nodes:
        build = BUILDERS.get((kind, node.target)) if isinstance(kind, type) else None
        if build is None:
            return None
        described.append(arguments_of(node, lambda used: tensors.get(used.name)))
    if any(not _alike(described[0], other) for other in described[1:]):
        return None
    with torch.device("meta"):
        return build(described[0]) if build is not None else None


def _alike(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(
        value is right[name] or (not isinstance(value, torch.Tensor) and value == right[name])
        for name, value in left.items()
    )


def _class_of(kind: Any) -> Any:
    if isinstance(kind, type):
        return kind
    module, _, name = str(kind).rpartition(".")
    try:
        return load_callable(f"{module}:{name}") if module.startswith("torch.nn.") else None
    except (ImportError, AttributeError):
        return None


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    *prefix, name = path.split(".")
    _container(root, prefix).add_module(name, module)


def _container(root: nn.Module, path: list[str]) -> nn.Module:
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = attribute(root, part)
        assert isinstance(child, nn.Module)
        root = child
    return root


def _set_tensor(root: nn.Module, path: str, tensor: torch.Tensor, kept: bool) -> None:
    *prefix, name = path.split(".")
    owner = _container(root, prefix)
    for table in (owner._parameters, owner._buffers):
        table.pop(name, None)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor, persistent=kept)
