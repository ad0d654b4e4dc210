"""What a graph was captured to decide by the values of its inputs, and the question whether a call decides the same."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from regraft.capture.module_tree import place_tensor
from regraft.core.errors import NotCovered
from regraft.core.flow import draws, known
from regraft.core.graph_module import GraphModule, adopt

_SAID = 3
"""How many of them to write out."""


Number = bool | int | list[Any]
"""What a model reads: whether a number is zero, which it is, or all of a tensor, as `Tensor.tolist` gives them."""


@dataclass(frozen=True)
class Asked:
    """A number that a model has read of what it was given.

    Args:
        tensor: what it was read from.
        number: what was read.
        line: the line of the model's source that read it.
    """

    tensor: Tensor
    number: Number
    line: str


@dataclass(frozen=True, eq=False)
class Decisions:
    """Numbers that a model has read of its inputs, and what it reads them of.

    Args:
        program: from the inputs to what each number is read of, as the model computes it.
        numbers: what was read.
        lines: the line of the model's source that reads it.
    """

    program: GraphModule
    numbers: tuple[Number, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        said = [f"{_shown(number)} at {line}" for number, line in zip(self.numbers, self.lines, strict=True)]
        return ", ".join(said[:_SAID]) + (f", and {len(said) - _SAID} more" if len(said) > _SAID else "")

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the model would read the same of these inputs.

        Args:
            tensors: the inputs, in the order of the graph's.
        """
        return self._other(tensors) is None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Ask a call for what the graph was captured with.

        Args:
            tensors: the inputs, in the order of the graph's.

        Raises:
            NotCovered: the model would read something else, and the message names the line that does, or nobody can
                tell of these inputs.
        """
        try:
            other = self._other(tensors)
        except Exception as error:  # whatever torch raises of tensors that have no values, say
            raise NotCovered(f"what the model reads of its inputs cannot be told of these: {error}") from error
        if other is not None:
            place, number = other
            expected, line = _shown(self.numbers[place]), self.lines[place]
            raise NotCovered(
                f"the captured graph holds only where the model reads {expected} of its inputs, and of these it reads "
                f"{_shown(number)}, at {line}; capture the model with an example of this kind"
            )

    def record(self, tensors: Sequence[Tensor]) -> None:
        """Put the questions into the graph that `torch.export` makes, which raises where the answer is another.

        Args:
            tensors: what stands for the inputs in it.
        """
        for value, number, line in zip(self.program(*tensors), self.numbers, self.lines, strict=True):
            expected = torch.tensor(number)  # of whole numbers, or of bools
            alike = (value.reshape(expected.shape).to(expected.dtype) == expected.to(value.device)).all()
            torch._assert_async(alike, f"the program holds only where the model reads {_shown(number)} at {line}")

    def _other(self, tensors: Sequence[Tensor]) -> tuple[int, Number] | None:
        """The first place where the model would read something else, and what."""
        for place, (value, number) in enumerate(zip(self.program(*tensors), self.numbers, strict=True)):
            read: Number = value.tolist() if type(number) is list else type(number)(value)
            if read != number:
                return place, read
        return None


def _shown(number: Number) -> str:
    return str(number) if type(number) is not list else reprlib.repr(number)


def decisions_of(program: torch.export.ExportedProgram, asked: Sequence[Asked]) -> Decisions | None:
    """What a program decides by the values of its inputs.

    Args:
        program: the program, which returns what the numbers are read of last.
        asked: what was read.

    Raises:
        NotImplementedError: what decides is computed by something else than the inputs alone, or at random.
    """
    if not asked:
        return None
    if any(_writes(node) for node in program.graph.nodes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at what torch itself does
            program = program.run_decompositions({})  # what is written to is another node then
    results = [spec.arg.name for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    nodes = {node.name: node for node in program.graph.nodes}
    read = [nodes[name] for name in results[-len(asked) :]]
    _expect_plain(program, _needed(read))
    varying = _computed_of_inputs(program)
    pairs = [(node, one) for node, one in zip(read, asked, strict=True) if node in varying]
    if not pairs:
        return None
    graph, gm = Graph(), GraphModule(nn.Module(), Graph(), "Decisions")
    copies = _computed(program, [node for node, _ in pairs], graph, gm)
    once: dict[tuple[Node, type], Asked] = {}
    for node, one in pairs:
        once.setdefault((copies[node], type(one.number)), one)
    graph.output(tuple(node for node, _ in once))
    gm.graph = graph
    return Decisions(adopt(gm), tuple(one.number for one in once.values()), tuple(one.line for one in once.values()))


def _expect_plain(program: torch.export.ExportedProgram, nodes: set[Node]) -> None:
    """Refuse what is computed of more than the inputs and constants, at random, or by changing something."""
    signature = program.graph_signature
    names = {*signature.user_inputs, *signature.inputs_to_lifted_tensor_constants}
    for node in nodes:
        computes = node.op == "call_function" and known(node) and not draws(node, program.graph_module)
        if node.name not in names if node.op == "placeholder" else not computes:
            raise NotImplementedError(f"the model decides by {node.name}, which is not computed of its inputs alone")


def _computed(
    program: torch.export.ExportedProgram, results: list[Node], graph: Graph, gm: GraphModule
) -> dict[Node, Node]:
    """Write into a graph what some nodes of a program are computed by, everything once, and its constants into `gm`."""
    inputs = set(program.graph_signature.user_inputs)
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    needed = _needed(results)
    copies: dict[Node, Node] = {}
    made: dict[str, Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            copies[node] = graph.placeholder(node.name)
        elif node.op == "placeholder" and node in needed:
            place_tensor(gm, node.name, program.constants[constants[node.name]])
            copies[node] = graph.create_node("get_attr", node.name)
        elif node in needed:
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            call = f"{node.target} {args} {kwargs}"
            if node.target is torch.ops.aten.clone.default:  # nothing is written to here
                made[call] = args[0]
            if call not in made:
                made[call] = graph.call_function(node.target, args, kwargs)
            copies[node] = made[call]
    return copies


def _computed_of_inputs(program: torch.export.ExportedProgram) -> set[Node]:
    inputs = set(program.graph_signature.user_inputs)
    found: set[Node] = set()
    for node in program.graph.nodes:
        if (node.op == "placeholder" and node.name in inputs) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _needed(results: list[Node]) -> set[Node]:
    needed: set[Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _writes(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
