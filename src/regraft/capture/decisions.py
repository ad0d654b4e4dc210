"""What a graph was captured to decide by values that it is given, and the question whether a call decides the same.

They are those of its inputs, and the flags of the model: `if self.initialized`, of a buffer.
"""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from regraft.capture.module_tree import place_tensor
from regraft.core.errors import NotCovered
from regraft.core.flow import draws, known
from regraft.core.graph_module import GraphModule, adopt
from regraft.core.inlining import inline_regions

_SAID = 3
"""How many of them to write out."""


_WEIGHTS = ("inputs_to_parameters", "inputs_to_buffers")

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
    """Numbers that a model has read of its inputs and flags, and what it reads them of.

    Args:
        program: from the inputs to what each number is read of, as the model computes it. It holds the flags of the
            model itself.
        numbers: what was read.
        lines: the line of the model's source that reads it.
        inlined: whether the model computes some of it where it has switched autocast off, which nothing does here.
    """

    program: GraphModule
    numbers: tuple[Number, ...]
    lines: tuple[str, ...]
    inlined: bool = False

    def __str__(self) -> str:
        said = [f"{_shown(number)} at {line}" for number, line in zip(self.numbers, self.lines, strict=True)]
        return ", ".join(said[:_SAID]) + (f", and {len(said) - _SAID} more" if len(said) > _SAID else "")

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the model would read the same of these inputs.

        Args:
            tensors: the inputs, in the order of the graph's.
        """
        return not self._is_beside(tensors) and self._other(tensors) is None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Ask a call for what the graph was captured with.

        Args:
            tensors: the inputs, in the order of the graph's.

        Raises:
            NotCovered: the model would read something else, and the message names the line that does, or nobody can
                tell of these inputs.
        """
        if self._is_beside(tensors):
            raise NotCovered("under autocast, which the model switches off, nobody can tell what it reads")
        try:
            other = self._other(tensors)
        except Exception as error:  # whatever torch raises of tensors that have no values, say
            raise NotCovered(f"what the model reads of its inputs cannot be told of these: {error}") from error
        if other is not None:
            place, number = other
            expected, line = _shown(self.numbers[place]), self.lines[place]
            raise NotCovered(
                f"the captured graph holds only where the model reads {expected} of its inputs and flags, and now it "
                f"reads {_shown(number)}, at {line}; capture the model as it is, with an example of this kind"
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

    def _is_beside(self, tensors: Sequence[Tensor]) -> bool:
        return self.inlined and any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors)

    def _other(self, tensors: Sequence[Tensor]) -> tuple[int, Number] | None:
        """The first place where the model would read something else, and what."""
        for place, (value, number) in enumerate(zip(self.program(*tensors), self.numbers, strict=True)):
            read: Number = value.tolist() if type(number) is list else type(number)(value)
            if read != number:
                return place, read
        return None


def _shown(number: Number) -> str:
    return str(number) if type(number) is not list else reprlib.repr(number)


def flags_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Weights and buffers of one number, of which each is given as its module, its name and itself.

    Args:
        model: the model.
    """
    return [
        (module, name, tensor)
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and _is_flag(tensor)
    ]


def _is_flag(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.numel() == 1 and not tensor.is_meta


def decisions_of(
    program: torch.export.ExportedProgram, asked: Sequence[Asked], weight: Callable[[str], Tensor]
) -> Decisions | None:
    """What a program decides by the values of its inputs, and by flags.

    Args:
        program: the program, which returns what the numbers are read of last.
        asked: what was read.
        weight: the weight or buffer of the model by its name in the program.

    Raises:
        NotImplementedError: what decides is computed by something else than those, or at random.
    """
    if not asked:
        return None
    if any(_writes(node) for node in program.graph.nodes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at what torch itself does
            program = program.run_decompositions({})  # what is written to is another node then
    whole = GraphModule(program.graph_module, copy.deepcopy(program.graph))
    inlined = inline_regions(whole)
    results: Any = whole.graph.output_node().args[0]
    read = list(results[-len(asked) :])
    # a copy may have other names: those of an exported graph are none that one may write in Python
    given = zip(program.graph.find_nodes(op="placeholder"), whole.graph.find_nodes(op="placeholder"), strict=True)
    nodes = {was.name: node for was, node in given}
    flags = {nodes[name]: tensor for name, tensor in _flags(program, weight).items()}
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    held = {**flags, **{nodes[name]: program.constants[path] for name, path in constants.items()}}
    inputs = {nodes[name] for name in program.graph_signature.user_inputs if isinstance(name, str)}
    _expect_plain(whole, _needed(read), {*inputs, *held})
    varying = _computed_of({*inputs, *flags}, whole.graph)
    pairs = [(node, one) for node, one in zip(read, asked, strict=True) if node in varying]
    if not pairs:
        return None
    graph, gm = Graph(), GraphModule(nn.Module(), Graph(), "Decisions")
    copies = _computed(whole.graph, [node for node, _ in pairs], inputs, held, graph, gm)
    once: dict[tuple[Node, type], Asked] = {}
    for node, one in pairs:
        once.setdefault((copies[node], type(one.number)), one)
    graph.output(tuple(node for node, _ in once))
    gm.graph = graph
    numbers, lines = tuple(one.number for one in once.values()), tuple(one.line for one in once.values())
    return Decisions(adopt(gm), numbers, lines, inlined)


def _flags(program: torch.export.ExportedProgram, weight: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The flags of the model by the names of the nodes that stand for them."""
    paths = [pair for kind in _WEIGHTS for pair in getattr(program.graph_signature, kind).items()]
    return {name: weight(path) for name, path in paths if _is_flag(weight(path))}


def _expect_plain(whole: GraphModule, nodes: set[Node], given: set[Node]) -> None:
    """Refuse what is computed of more than the inputs, flags and constants, at random, or by changing something."""
    for node in nodes:
        computes = node.op == "call_function" and known(node) and not draws(node, whole)
        if node not in given if node.op == "placeholder" else not computes:
            raise NotImplementedError(f"the model decides by {node.name}, which is not computed of its inputs alone")


def _computed(
    whole: Graph, results: list[Node], inputs: set[Node], held: dict[Node, Tensor], graph: Graph, gm: GraphModule
) -> dict[Node, Node]:
    """Write into a graph what some nodes of another are computed by, everything once; what it holds goes into `gm`.

    Flags are held as they are, so that what is written to them is seen.
    """
    needed = _needed(results)
    copies: dict[Node, Node] = {}
    made: dict[str, Node] = {}
    for node in whole.nodes:
        if node in inputs:
            copies[node] = graph.placeholder(node.name)
        elif node.op == "placeholder" and node in needed:
            place_tensor(gm, node.name, held[node])
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


def _computed_of(given: set[Node], graph: Graph) -> set[Node]:
    """Some inputs of a graph, and all that is computed of any of them."""
    found = set(given)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
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
