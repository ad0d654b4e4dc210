"""A graph as a function of a flat list of tensors, with a flat list of results: what every engine takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from regraft.capture import caches, torch_private, transformers_adapter
from regraft.capture.codegen import CallingCodeGen
from regraft.core.errors import NotCovered
from regraft.core.fx_private import codegen_of
from regraft.core.graph_module import GraphModule as OwnGraphModule
from regraft.core.inlining import inline_regions
from regraft.core.ordinary import ORDINARY, ordinary_call
from regraft.core.values import layout_of, made_of_sizes, varying_axes
from regraft.dropin.watch import Watch
from regraft.optimize.engines.within import Within, ask_within
from regraft.optimize.sharing import weights_made

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Flat:
    """A graph module, taken apart into its tensors.

    Args:
        gm: The graph module; it is not changed.
        call: A call of it, by name.

    Raises:
        ValueError: Some of the results are numbers that differ from call to call.

    Attributes:
        sample: The tensors of the call.
        dtypes: The types of the tensors among the results.
    """

    def __init__(self, gm: GraphModule, call: Mapping[str, Any]) -> None:
        self.module = OwnGraphModule.__copy__(gm)  # type: ignore[arg-type]
        self.module.graph.set_codegen(CodeGen())
        inline_regions(self.module)
        self.module.recompile()
        codegen = codegen_of(gm.graph)
        holders = self.module.graph.find_nodes(op="placeholder")
        self._names = [str(node.target) for node in holders]
        self._calling = codegen.calling if isinstance(codegen, CallingCodeGen) else None
        if isinstance(codegen, CallingCodeGen):  # what a call asks is small: a network has just emptied the caches
            arguments = codegen.calling.arguments
            self._given = [(argument.name, argument.constant) for argument in arguments]
            places = {name: place for place, name in enumerate(codegen.leaves)}
            self._places = [places[name] for name in self._names]
            self._tensors = dict.fromkeys(argument.name for argument in arguments if argument.is_tensor)
        self.values = [node.meta.get("val") for node in holders]
        self.sample = self.take(call)
        with torch.no_grad():
            results, spec = pytree.tree_flatten(caches.unfold(gm.forward(**call)))
        self._build = torch_private.unflattener(spec, transformers_adapter.output_maker)
        if any(isinstance(result, (int, float, complex)) for result in results) and _computes_numbers(gm):
            raise ValueError("a number among its results is made of what a tensor holds")
        self._constants = [None if isinstance(result, Tensor) else (result,) for result in results]
        tensors = [result for result in results if isinstance(result, Tensor)]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self._layouts = [_layout(tensor) for tensor in tensors]

    def take(self, call: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of the graph's inputs.

        Args:
            call: The call, by name.

        Raises:
            TypeError: The graph does not hold for these sizes or constants.
        """
        if self._calling is None:
            return [call[name] for name in self._names]
        if call.keys() == self._tensors.keys():  # tensors alone: there is nothing to ask of each argument
            leaves = list(map(call.__getitem__, self._tensors))
            self._calling.check(leaves)
        else:
            leaves = self._calling.bind(tuple([call.get(name, constant) for name, constant in self._given]))
        return [leaves[place] for place in self._places]

    def give(self, results: Sequence[Tensor]) -> Any:
        """What the model returns, from the tensors among it.

        Args:
            results: The tensors, in order.
        """
        tensors = map(_laid, results, self._layouts)
        leaves = [next(tensors) if constant is None else constant[0] for constant in self._constants]
        return self._build(leaves)

    @property
    def varying(self) -> list[dict[int, Any]]:
        """For each input the axes whose size varies."""
        return [dict.fromkeys(varying_axes(value), Dim.AUTO) for value in self.values]

    def exported(self) -> ExportedProgram:
        """The graph as an exported program that takes and gives tensors alone, the last one for `covering`."""
        axes = self.varying
        sample = []
        for tensor, varying in zip(self.sample, axes):
            for axis in varying:  # export takes an axis of size one for a fixed one
                tensor = torch.cat([tensor, tensor], dim=axis) if tensor.shape[axis] == 1 else tensor
            sample.append(tensor)
        with torch.no_grad():
            within = Within(Tensors(self.module))
            program = torch.export.export(within, tuple(sample), dynamic_shapes=(tuple(axes),), strict=False)
        ask_within(program)
        return program

    def covering(self, run: Run) -> Run:
        """An engine that was made of `exported()`, for the calls that it covers.

        Export takes each size that varies to be two or more, and an engine may stand on that: what ONNX Runtime gives
        for a padded text of one token was off. And what an index beyond all there is gives is up to the engine, as is
        what a row of attention gives that sees no key.

        Args:
            run: The engine.

        Raises:
            NotCovered: It does not cover the sample.
        """
        several = [
            (place, axis)
            for place, (tensor, varying) in enumerate(zip(self.sample, self.varying))
            for axis in varying
            if tensor.shape[axis] > 1
        ]

        def run_covered(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            if any(inputs[place].shape[axis] == 1 for place, axis in several):
                raise NotCovered("the engine was made for sizes of two or more")
            *results, within = run(inputs)
            if not within:
                raise NotCovered("an index is beyond what it indexes, or a row of attention sees no key")
            return results

        run_covered(self.sample)
        return run_covered


class Tensors(nn.Module):
    """A graph module, or what stands for one, that returns its tensors in a tuple, for inference."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = False
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors among the results."""
        return tuple(leaf for leaf in pytree.tree_leaves(self.module(*inputs)) if isinstance(leaf, Tensor))


class Engine:
    """A graph that an engine runs wherever that gives what the graph itself would; elsewhere the graph runs.

    An engine has the values of the weights in it. So it is left alone once a weight was written to, a layer was given a
    hook or the graph was rewritten, and in calls in which torch would do more than compute: autocast, tracing, modes,
    functional transforms.

    Args:
        flat: The graph that the engine was given.
        run: The engine: from that graph's inputs to its results. It raises `NotCovered` for sizes that are not its own.
        gm: The graph that runs elsewhere.
        own_threads: Whether the engine computes with threads of its own. Those of torch spin for milliseconds after
            they have been woken, and slow them: nothing beside a call may wake them.

    Attributes:
        lent: Whether somebody else has the graph, and so may write to the weights that regraft made for it.

    Raises:
        ValueError: A weight was made in inference mode, where nobody could tell whether it is written to later.
    """

    def __init__(self, flat: Flat, run: Run, gm: GraphModule, own_threads: bool = False) -> None:
        self.own_threads = own_threads
        self._flat = flat
        self._run = run
        self._gm = gm
        self._forward = type(gm).forward
        both = (flat.module, gm)  # the graph that an engine was given may be another
        if any(t.is_inference() for module in both for t in chain(module.parameters(), module.buffers())):
            raise ValueError("its weights were made in inference mode, where torch does not count what is written")
        self.lent = False
        self._all = Watch(gm)
        self._of_others = Watch(_of_others(gm))

    @property
    def watch(self) -> Watch:
        """What to ask at each call: nothing of the graph's own layers and weights, as long as nobody else has them."""
        return self._all if self.lent else self._of_others

    def __call__(self, call: Mapping[str, Any], unchanged: bool = False) -> Any:
        """Run a call.

        Args:
            call: The call, by name.
            unchanged: Whether the caller has asked `watch`, as one who has more to ask does.

        Raises:
            NotCovered: The graph does not hold for these sizes.
        """
        inputs = self._flat.take(call)
        if self._may_run(inputs) and (unchanged or self.watch.untouched):
            try:
                return self._flat.give(self._run(inputs))
            except NotCovered:
                pass
        return self._gm.forward(**call)

    def _may_run(self, inputs: Sequence[Tensor]) -> bool:
        if not ordinary_call() or not all(map(ORDINARY.__contains__, map(type, inputs))):
            return False
        if any(map(Tensor.is_neg, inputs)) or any(map(Tensor.is_conj, inputs)):  # not what their memory holds
            return False
        return type(self._gm).forward is self._forward


def _computes_numbers(gm: GraphModule) -> bool:
    sizes = made_of_sizes(gm.graph)
    results = gm.graph.output_node().all_input_nodes
    return any(node not in sizes and not isinstance(node.meta.get("val"), Tensor) for node in results)


def _layout(tensor: Tensor) -> torch.memory_format | tuple[int, ...] | None:
    """How a tensor lies: contiguous, in that order of its axes if torch has no name for it, or None for neither."""
    layout = layout_of(tensor)
    if tensor.is_contiguous(memory_format=layout):
        return layout
    axes = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return axes if tensor.permute(axes).is_contiguous() else None


def _laid(result: Tensor, layout: torch.memory_format | tuple[int, ...] | None) -> Tensor:
    """A result that lies as the graph's own did, and is copied only if it does not."""
    if not isinstance(layout, tuple):
        return result if layout is None else result.contiguous(memory_format=layout)
    return result.permute(layout).contiguous().permute(sorted(layout, key=layout.__getitem__))


def _of_others(gm: GraphModule) -> nn.Module:
    """The weights of a graph that no step has made: those of the model, and constants that its code holds."""
    own = {id(tensor) for tensor in weights_made(gm)}
    holder = nn.Module().eval()
    for index, tensor in enumerate(chain(gm.parameters(), gm.buffers())):
        if id(tensor) not in own:
            holder.register_buffer(str(index), tensor)
    return holder
