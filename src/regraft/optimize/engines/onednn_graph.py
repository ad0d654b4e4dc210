"""oneDNN Graph, which comes with torch, through a frozen TorchScript program.

It plans layouts and fuses across a whole network, where `PrepackForCpu` goes one layer at a time. TorchScript is the
only public way to it and is deprecated, so a torch without it says so here, and the graph runs as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from regraft.core.errors import NotCovered
from regraft.core.flow import draws, known
from regraft.core.modules import graph_modules
from regraft.core.mutation import Mutations, may_alias, writes
from regraft.core.values import made_of_sizes
from regraft.core.vocabulary import ATTENTION, read
from regraft.optimize.engines.flat import Flat, Run, Tensors
from regraft.optimize.engines.written_attention import Mask, WrittenAttention
from regraft.verify.measure import compare_speed

_BROADCASTING = {
    *(name + end for name in ("add", "sub", "mul", "div", "masked_fill") for end in ("", "_")),
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv")),
    *("truediv", "true_divide", "multiply", "subtract", "divide", "rsub", "pow"),
    *("maximum", "minimum", "max", "min", "where"),
}
"""Operations whose tensors may be of several sizes, by the names of their functions and methods."""
_IN_PLACE = {name for name in _BROADCASTING if name.endswith("_")} | {"iadd", "isub", "imul", "itruediv"}
_ADDING = {"addmm", "baddbmm", "addmv", "addbmm"}
_PRODUCTS = {"linear", "bilinear", "matmul", "mm", "bmm", "mv", "einsum", *_ADDING}
"""Matrix products; those that add to them have what they add as their first tensor."""
_CALLS = 3
"""So many calls until a program is what it stays: one is observed, the next is compiled for what was seen."""


def build(flat: Flat) -> Run:
    """Make a program of a graph, for inputs of the sizes of the sample.

    Args:
        flat: The graph.

    Raises:
        Exception: What TorchScript and oneDNN raise where they have no form for the graph.
    """
    sample = tuple(_usual(flat.sample))
    sizes = [tensor.shape for tensor in sample]
    program = _fastest(_Apart(flat.module, sample), sample)

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if [tensor.shape for tensor in inputs] != sizes:
            raise NotCovered(f"the program was made for inputs of the sizes {[tuple(size) for size in sizes]}")
        with torch.no_grad():
            results: Sequence[Tensor] = program(*_usual(inputs))
        return results

    return run


def _fastest(apart: _Apart, sample: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    """The program of a graph with its attention as torch's fused call, or written out where that is faster here."""
    program = _program(apart, sample)
    if not apart.attentions:
        return program
    apart.writes_attention = True
    try:
        other = _program(apart, sample)
    except RuntimeError:  # it cannot fuse what lies in memory as it does here
        return program
    found = compare_speed(lambda: program(*sample), lambda: other(*sample), min_seconds=0.3)
    return other if found.ratio < 1 else program


def _program(apart: _Apart, sample: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    with warnings.catch_warnings(), torch.no_grad(), _fusing():
        for remark in (DeprecationWarning, torch.jit.TracerWarning):  # sizes are fixed, so what is traced of them holds
            warnings.simplefilter("ignore", remark)
        program: torch.jit.ScriptModule = torch.jit.freeze(torch.jit.trace(Tensors(apart), sample, check_trace=False))
        _expect_understood(program)
        for _ in range(_CALLS):
            program(*sample)
    return program


class _Apart(nn.Module):
    """A graph without what oneDNN Graph goes wrong at when it fuses an addition, a product or the like.

    That is tensors that are not of one size, or that have several elements in one place: it reads and writes beyond
    some of them, and `x * c * c` with a `c` of fewer axes ends the process. Then tensors with an axis of one element
    whose step is not what it would be by itself, as between the heads of a transposed single token. And a layer norm
    that nothing else reads: the other tensor is taken for one of its own. Such tensors become dense ones of their own,
    constants once and for all when the program is frozen. So does a product of a single row: one of 2048 numbers, with
    another tensor added by the same kernel, writes beyond the end of its result.

    Args:
        gm: The graph.
        sample: Its inputs.
    """

    def __init__(self, gm: GraphModule, sample: Sequence[Tensor]) -> None:
        super().__init__()
        if len(graph_modules(gm)) > 1:
            raise ValueError("the graph has graphs inside of it")
        self.gm = gm
        values = _Values(gm)
        values.run(*sample)
        self.larger = {node: values.to_enlarge(node) for node in gm.graph.nodes if _name(node, gm) in _BROADCASTING}
        self.constants = values.constants
        self.rows = values.rows
        self.attentions, self.masks = values.attentions, values.masks
        self.writes_attention = False

    def forward(self, *inputs: Tensor) -> Any:
        """What the graph gives."""
        return _Prepared(self).run(*inputs)


class _Values(Interpreter):
    """Runs a graph and notes of every tensor its size, and whether oneDNN Graph goes wrong at where it lies.

    Attributes:
        odd: The tensors that lie oddly.
        rows: The products of a single row.
        constants: The tensors that depend on sizes and weights alone, as they are in the sample. TorchScript computes
            them otherwise than torch, and where that decides a branch, by much: a distance of 16 falls into T5's bucket
            for 15, because a logarithm that should be 2 is a little less.
        attentions: The calls of fused attention that can be written out, and
        masks: the masks of those that are the same in each call.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.gm = gm
        self.sizes: dict[Node, torch.Size] = {}
        self.odd: set[Node] = set()
        self.rows: set[Node] = set()
        self.constants: dict[Node, Tensor] = {}
        self.attentions: dict[Node, WrittenAttention] = {}
        self.masks: dict[Any, Mask] = {}
        self._steady = _steady(gm)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.sizes[n] = result.shape
            if n in self._steady and n.op != "get_attr":
                self.constants[n] = result
            if _lies_oddly(result):
                self.odd.add(n)
            if _name(n, self.module) in _PRODUCTS and result.shape[-2:-1].numel() == 1:
                self.rows.add(n)
                if _name(n, self.module) in _ADDING and n.all_input_nodes[0] not in self._steady:
                    raise ValueError(f"{n.name} adds a product of one row to what is computed")
            self._note_attention(n)
        return result

    def _note_attention(self, n: Node) -> None:
        call = read(n, self.gm)
        written = WrittenAttention.of(call, self.env) if call is not None and call.operation is ATTENTION else None
        if written is None:
            return
        self.attentions[n] = written
        mask = written.call["attn_mask"]
        if written.mask is not None and written.mask not in self.masks and (mask is None or mask in self._steady):
            self.masks[written.mask] = written.prepared(self.env).known()

    def to_enlarge(self, node: Node) -> dict[Node, torch.Size]:
        """The tensors that a call is not to be given as they are, with the size that they become."""
        given = [argument for argument in node.all_input_nodes if argument in self.sizes]
        size = self.sizes.get(node)
        if size is None or not given:
            return {}
        several = len(given) > 1
        if _name(node, self.module) in _IN_PLACE:  # what is written to has to stay what it is
            del given[0]
        return {
            a: size for a in given if a in self.odd or (several and (self.sizes[a] != size or self._lonely_norm(a)))
        }

    def _lonely_norm(self, node: Node) -> bool:
        return len(node.users) == 1 and _name(node, self.module) == "layer_norm"


class _Prepared(Interpreter):
    """Runs a graph with some tensors larger than its calls are given them, some results known and some copied."""

    def __init__(self, apart: _Apart) -> None:
        super().__init__(apart.gm)
        self._apart = apart
        self._masks = dict(apart.masks)

    def run_node(self, n: Node) -> Any:
        if n in self._apart.constants:
            return self._apart.constants[n]
        if self._apart.writes_attention and n in self._apart.attentions:
            return self._written_out(self._apart.attentions[n])
        result = super().run_node(n)
        return result.clone() if n in self._apart.rows else result

    def _written_out(self, attention: WrittenAttention) -> Tensor:
        mask = attention.mask
        if mask is not None and mask not in self._masks:
            self._masks[mask] = attention.prepared(self.env)
        return attention.compute(self.env, self._masks[mask] if mask is not None else None)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        larger = self._apart.larger.get(n, {})

        def load(argument: Node) -> Any:
            value, size = self.env[argument], larger.get(argument)
            return value if size is None else value.expand(size).clone(memory_format=torch.contiguous_format)

        return map_arg((n.args, n.kwargs), load)


def _steady(gm: GraphModule) -> set[Node]:
    """The values that depend on the sizes of the inputs and on weights alone."""
    found, mutations = made_of_sizes(gm.graph), Mutations(gm)
    written = {node: writes(node, gm) for node in gm.graph.nodes}
    # what writes into a new value that nothing else reads might as well make another
    renewing = {node for node, values in written.items() if values and all(_only_read_by(v, node, gm) for v in values)}
    for node in gm.graph.nodes:
        pure = node.op in ("call_function", "call_method") and (node in renewing or (known(node) and not written[node]))
        steady = pure and not draws(node, gm) and found.issuperset(node.all_input_nodes)
        if (node.op == "get_attr" or steady) and renewing.issuperset(mutations.of(node)):
            found.add(node)
    for node in renewing - found:
        found.difference_update(written[node])
    return found


def _only_read_by(value: Node, reader: Node, gm: GraphModule) -> bool:
    return list(value.users) == [reader] and value.op == "call_function" and not may_alias(value, gm)


def _lies_oddly(tensor: Tensor) -> bool:
    """Whether several elements are in one place, or an axis of one element has a step that it would not have by itself.

    The first axes of one element are taken for what they are, whatever their step.
    """
    within = False
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride())):
        own = tensor.shape[axis + 1] * tensor.stride(axis + 1) if axis + 1 < tensor.ndim else 1
        if (size > 1 and step == 0) or (size == 1 and within and step != own):
            return True
        within = within or size > 1
    return False


def _name(node: Node, gm: nn.Module) -> str:
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        return "layer_norm" if isinstance(module, nn.LayerNorm) else "linear" if isinstance(module, nn.Linear) else ""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _expect_understood(program: torch.jit.ScriptModule) -> None:
    """Refuse what oneDNN Graph takes for something else: GELU by tanh for the exact one, off by up to 5e-4."""
    graph: Any = program.graph
    for node in graph.findAllNodes("aten::gelu"):
        if list(node.inputs())[1].toIValue() != "none":
            raise ValueError("oneDNN Graph takes GELU by tanh for the exact one")


def _usual(inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The inputs, dense: a program looks at their sizes, but takes their strides to be those that it has seen."""
    return (tensor.contiguous() for tensor in inputs)


@contextmanager
def _fusing() -> Iterator[None]:
    before = torch.jit.onednn_fusion_enabled()
    torch.jit.enable_onednn_fusion(True)
    try:
        yield
    finally:
        torch.jit.enable_onednn_fusion(before)
