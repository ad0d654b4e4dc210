"""A long program as several short ones, one after the other: oneDNN Graph fuses those far sooner.

It looks for cycles from each operation through all others, so that its time grows with the square of a program's
length. The cuts are made where few tensors are alive, as between the layers of a transformer. torch has no public
function to cut a TorchScript graph: where what is used here is missing, a program stays whole and takes longer to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from regraft.optimize.engines.onednn_function import Program

LONGEST = 1000
"""So many operations are fused at once, which takes about as long as to trace them."""

_NO_PLACE = 1 << 30
"""More than any number of tensors: a value is alive that is none, and that only a whole program can hand on."""


@dataclass(frozen=True)
class _Piece:
    """Some operations in a row, and which values they take, give, and are the last to read, by number."""

    program: Program
    takes: Sequence[int]
    gives: Sequence[int]
    ends: Sequence[int]


def in_pieces(program: torch.jit.ScriptModule, longest: int = LONGEST) -> Program:
    """What computes the same as a frozen program, in pieces if that is long.

    Args:
        program: The program, which gives a tuple of tensors.
        longest: How many operations a piece may have.

    Returns:
        What takes the program's arguments and gives its results; the program itself where it is short or cannot be cut.
    """
    graph: Any = program.graph
    result = graph.return_node().input().node()
    nodes = [node for node in graph.nodes() if node.kind() != "prim::Constant" and node != result]
    if not _can_be_cut(graph, nodes, result):
        return program
    last = {value.unique(): index for index, node in enumerate([*nodes, result]) for value in _read(node)}
    bounds = _bounds(nodes, last, longest)
    if len(bounds) == 2:
        return program
    pieces = [_piece(nodes[begin:end], end, last) for begin, end in pairwise(bounds)]
    arguments = [value.unique() for value in graph.inputs()][1:]  # the first is the module
    results = [value.unique() for value in _read(result)]

    def run(*given: Any) -> tuple[Any, ...]:
        alive = dict(zip(arguments, given, strict=True))
        for piece in pieces:
            found = piece.program(*(alive[name] for name in piece.takes))
            for name in piece.ends:
                del alive[name]
            alive.update(zip(piece.gives, found, strict=True))
        return tuple(alive[name] for name in results)

    return run


def _can_be_cut(graph: Any, nodes: Sequence[Any], result: Any) -> bool:
    if not hasattr(torch._C, "_create_function_from_graph") or not hasattr(graph, "createClone"):
        return False
    of_tensors = result.kind() == "prim::TupleConstruct" and len(_read(result)) == result.inputsSize()
    # what is alike, or the same in each call, is made once in a piece that does not see that another writes into it
    writes = any("!" in node.schema() for node in nodes)
    reads_module = bool(next(iter(graph.inputs())).uses())
    return of_tensors and not writes and not reads_module and not any(list(node.blocks()) for node in nodes)


def _read(node: Any) -> list[Any]:
    """The values that an operation reads, but for constants, of which each piece has its own, in the same memory."""
    return [value for value in node.inputs() if value.node().kind() != "prim::Constant"]


def _bounds(nodes: Sequence[Any], last: Mapping[int, int], longest: int) -> list[int]:
    """Where pieces begin and end: cuts are where the fewest values are handed on, in the later half of a piece."""
    changes = [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        for value in node.outputs():
            weight = 1 if value.type().kind() == "TensorType" else _NO_PLACE
            changes[index + 1] += weight
            changes[last.get(value.unique(), index) + 1] -= weight
    handed_on = list(accumulate(changes))
    bounds = [0]
    while len(nodes) - bounds[-1] > longest:
        window = range(bounds[-1] + (longest + 1) // 2, bounds[-1] + longest + 1)
        place = min(window, key=lambda place: (handed_on[place], -place))
        if handed_on[place] >= _NO_PLACE:
            break
        bounds.append(place)
    return [*bounds, len(nodes)]


def _piece(nodes: Sequence[Any], end: int, last: Mapping[int, int]) -> _Piece:
    made = {value.unique(): value for node in nodes for value in node.outputs()}
    taken = dict.fromkeys(value.unique() for node in nodes for value in _read(node) if value.unique() not in made)
    given = {name: value for name, value in made.items() if last.get(name, -1) >= end}
    graph: Any = torch._C.Graph()
    here: dict[int, Any] = {}

    def local(value: Any) -> Any:
        if value.unique() not in here:  # a constant
            copy(value.node())
        return here[value.unique()]

    def copy(node: Any) -> None:
        clone = graph.appendNode(graph.createClone(node, local))
        here.update({value.unique(): its for value, its in zip(node.outputs(), clone.outputs(), strict=True)})

    for name in taken:
        here[name] = graph.addInput()
    for node in nodes:
        copy(node)
    results = graph.appendNode(graph.create("prim::TupleConstruct", [here[name] for name in given], 1)).output()
    results.setType(torch._C.TupleType([value.type() for value in given.values()]))
    graph.registerOutput(results)
    program = torch._C._create_function_from_graph("piece", graph)
    return _Piece(program, [*taken], [*given], [name for name in taken if last[name] < end])
