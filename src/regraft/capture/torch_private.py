"""The private corners of torch that capture stands on, all in one place, each with what happens without it.

`tests/capture/test_private_apis.py` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten
tree_leaves = pytree.tree_leaves


pack_padded_sequence: Any = getattr(torch._VF, "_pack_padded_sequence", None)
"""What `torch.nn.utils.rnn.pack_padded_sequence` calls; where it is not known, export says what it trips over."""


def outside_of_modes() -> AbstractContextManager[Any]:
    """Where tensors have values though export runs; without it they have none, and export refuses to read them."""
    return getattr(dispatch, "_disable_current_modes", contextlib.nullcontext)()


def is_leaf(spec: TreeSpec) -> bool:
    """Whether a tree is a single value."""
    return bool(spec.is_leaf())


def spec_type(spec: TreeSpec) -> Any:
    """The container class at the top of a tree."""
    return spec.type


def spec_children(spec: TreeSpec) -> list[TreeSpec]:
    """The trees below the top of a tree."""
    return list(spec.children())


def spec_context(spec: TreeSpec) -> Any:
    """What a container is beside its children: the keys of a dictionary, the class of a named tuple."""
    return spec.context


def is_container(cls: type) -> bool:
    """Whether pytree knows how to take an instance of a class apart."""
    return cls in pytree.SUPPORTED_NODES


def tensor_paths(value: Any) -> list[tuple[str, Any]]:
    """Every leaf of a nested value with the Python expression that reaches it, such as `['a'][0]`."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(value)[0]]


def guards_of(program: torch.export.ExportedProgram) -> list[str]:
    """The conditions on its inputs' sizes under which a program holds, as Python source; none where torch moved them.

    Without them only static sizes, equal sizes and ranges are checked, which `range_constraints` says publicly.
    """
    return list(getattr(program, "_guards_code", None) or [])


def guard_functions() -> dict[str, Any]:
    """The names that the source of a guard may use."""
    try:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
    except ImportError:
        return {"math": math, "inf": math.inf}
    return {**SYMPY_INTERP, "math": math, "inf": math.inf}


def expression_source(expr: Any) -> str:
    """A symbolic size as Python source over the names of its symbols.

    Without torch's printer as sympy writes it, which is Python too, but for functions that `guard_functions` lacks.
    """
    try:
        from torch.utils._sympy.printers import PythonPrinter
    except ImportError:
        return str(expr)
    return str(PythonPrinter().doprint(expr))


def symbolic_expression(size: Any) -> Any:
    """The expression of a symbolic size, or the number itself where it is none."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def size_in_the_example(size: Any) -> Any:
    """The number that a symbolic size is in the example that export runs with; None where it is made of values."""
    hint = getattr(size.node, "hint", None)
    return hint if type(hint) in (bool, int, float) else None


def _counts(version: Callable[[dict[str, Any]], Any]) -> bool:
    """Whether a function tells the states of a dictionary apart, and finds one that nobody wrote to the same."""
    table = vars(SimpleNamespace(first=0))
    states = [version(table), version(table)]
    for change in (lambda: table.update(first=1), lambda: table.update(second=0), lambda: table.pop("first")):
        change()
        states.append(version(table))
    return len(set(states)) == 4


def _dict_version() -> Callable[[dict[Any, Any]], Any]:
    version = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "dict_version", None)
    return version if callable(version) and _counts(version) else lambda _: object()


dict_version = _dict_version()
"""A number that a dictionary has until something in it is set or removed, by which torch's compiler watches modules.

Without it each question gets another answer, as if the dictionary had been written to.
"""


def transforms_functions(target: Any) -> bool:
    """Whether a node's target is a part of `torch.vmap`, `torch.func.grad`, `torch.func.jvp` and the like.

    Their calls change a state of torch's, which says how what lies between them is computed. Where torch moves them
    they would stand in a graph as they did before they were known here: a rewrite could take one for unread.
    """
    return str(getattr(target, "__module__", "")).startswith("torch._functorch.")


@contextlib.contextmanager
def causal_as_told() -> Iterator[None]:
    """With torch's transformer encoder and decoder taking a mask for causal only where they are told so.

    Where they are told nothing they compare its numbers, to let the kernel make the same mask itself. A mask that they
    do not take for causal is applied as it is, to the same result. Where torch moves the function that compares, they
    can be captured with `is_causal` alone, and the error says that the model decides by the value of a tensor.
    """
    home, name = nn.modules.transformer, "_detect_is_causal_mask"
    compares = getattr(home, name, None)
    if compares is None:
        yield
        return

    def told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        del mask, size
        return is_causal is True

    setattr(home, name, told)
    try:
        yield
    finally:
        setattr(home, name, compares)


def remember_no_calls(value: torch.Tensor) -> None:
    """Let the stand-ins for tensors no longer be looked up in a cache of the calls that made them.

    Without torch's switch they are: that takes longer where sizes are long expressions, and gives the same.

    Args:
        value: One of them; of what is none, nothing happens.
    """
    mode: Any = getattr(value, "fake_mode", None)
    if getattr(mode, "cache_enabled", False):
        mode.cache_enabled = False


def keywords_in_export() -> list[str]:
    """The names of the keyword arguments, where `torch.export` runs a graph module; none elsewhere.

    It hands the values of keyword arguments to the interpreter by position, in the order in which they were given, and
    keeps the names to itself: a graph module exported with keywords in another order would silently mix them up. So
    they are read from the frame that has them. Without it keywords must be given in the order of the signature.
    """
    home = getattr(sys.modules.get("torch.export._trace"), "__file__", None)
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename == home:
            return list(frame.f_locals.get("kwargs") or ())
        frame = frame.f_back
    return []


def pack_spec(spec: TreeSpec | None) -> Any:
    """A tree's structure as plain data: torch's own class for a leaf is on its way out, and warns when it is loaded."""
    if spec is None or is_leaf(spec):
        return None if spec is None else ()
    return spec_type(spec), spec_context(spec), tuple(pack_spec(child) for child in spec_children(spec))


def unpack_spec(packed: Any) -> Any:
    """The inverse of `pack_spec`."""
    if packed is None:
        return None
    if packed == ():
        return pytree.tree_structure(0)
    kind, context, children = packed
    return TreeSpec(kind, context, [unpack_spec(child) for child in children])


Maker = Callable[[Sequence[Any]], Any]
"""What makes a container of its children."""


def unflattener(spec: TreeSpec, maker: Callable[[TreeSpec], Maker | None] | None = None) -> Maker:
    """`tree_unflatten` for one structure: its containers are looked up once, and its leaves are not looked at.

    Args:
        spec: the structure.
        maker: gives what makes a container faster than what pytree has for it, or None.
    """
    if is_leaf(spec):
        return lambda leaves: leaves[0]
    unflatten, context = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    make_one = (maker(spec) if maker is not None else None) or (lambda values: unflatten(values, context))
    children = spec_children(spec)
    if all(map(is_leaf, children)):
        return make_one
    ends = list(accumulate(child.num_leaves for child in children))
    parts = [
        (end - child.num_leaves, end, None if is_leaf(child) else unflattener(child, maker))
        for end, child in zip(ends, children)
    ]

    def build(leaves: Sequence[Any]) -> Any:
        return make_one([leaves[start] if make is None else make(leaves[start:end]) for start, end, make in parts])

    return build


def children_of(value: Any) -> tuple[list[Any], Any]:
    """One level of a container: its children, and what it is beside them."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None and isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), type(value)
    if node is None:
        return [value], None
    children, context = node.flatten_fn(value)
    return list(children), context


def made_by_hooks(module: nn.Module) -> set[str]:
    """The weights that hooks of torch's make anew at each call: those of weight norm, spectral norm and pruning.

    Args:
        module: any module.

    >>> import torch
    >>> made_by_hooks(torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)))
    {'weight'}
    """
    hooks = module._forward_pre_hooks.values()
    names = {hook.name for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))}
    return names | {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)}


def hooks_of_all() -> list[dict[int, Any]]:
    """The tables of the hooks that every module of the process calls around its forward.

    >>> import torch
    >>> hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    >>> [len(table) for table in hooks_of_all()]
    [0, 1]
    >>> hook.remove()
    """
    tables = (getattr(nn.modules.module, name, {}) for name in ("_global_forward_pre_hooks", "_global_forward_hooks"))
    return list(tables)


def storage_of(tensor: torch.Tensor) -> Any:
    """What stands for the storage of a tensor, without keeping its memory: equal for all tensors that have one.

    Without it each stands for another, as if a tensor that has moved had got another storage.

    Args:
        tensor: any strided tensor.

    >>> import torch
    >>> x = torch.ones(2)
    >>> storage_of(x) == storage_of(x[1:]), storage_of(x) == storage_of(x.clone())
    (True, False)
    """
    reference = getattr(reductions, "StorageWeakRef", None)
    return object() if reference is None else reference(tensor.untyped_storage())
