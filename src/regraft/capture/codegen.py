"""The code generator of captured graphs: a `forward` with the model's own signature."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from regraft.capture import torch_private
from regraft.capture.calling import Calling
from regraft.core.fx_private import codegen_of

#: the name of the `Calling` in the generated code
_NAME = "_regraft_calling"
#: what fx writes for a target: `getattr(self.encoder.layer, "0").norm`, which is called, or read
_TARGET = re.compile(r"(\w+(?: ?:[^=]*)? = )(?:getattr\()*self((?:\.\w+|, \"[^\"]*\"\))+)(\(?)")
_STEP = re.compile(r"\.(\w+)|, \"([^\"]*)\"\)")


class CallingCodeGen(CodeGen):
    """Writes `forward` so that it is called as the model is.

    Args:
        calling: the signature and the way in and out.
        leaves: the name of each of the graph's inputs, in the order in which `Calling.bind` gives them.

    Inputs that a transformation adds to the graph become keyword parameters at the end; one that it erases is still
    accepted, and ignored.
    """

    def __init__(self, calling: Calling, leaves: list[str]) -> None:
        super().__init__()
        self.calling = calling
        self.leaves = leaves

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        """The `def` line, and the line that takes the arguments apart.

        Args:
            free_vars: the graph's inputs, as fx writes them.
            maybe_return_annotation: what follows the parameters.
            expanded_def: whether fx wants one parameter in a line.
        """
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        added = [variable for variable, name in zip(free_vars, names) if name not in self.leaves and name != "self"]
        parameters = ["self"]
        for index, argument in enumerate(self.calling.arguments):
            if index == self.calling.positional:
                parameters.append("*")
            default = argument.constant
            written = repr(default) if _writable(default) else f"{_NAME}.arguments[{index}].constant"
            parameters.append(f"{argument.name} = {written}")
        if added and "*" not in parameters:
            parameters.append("*")
        definition = super().gen_fn_def(parameters + added, maybe_return_annotation, expanded_def=expanded_def)
        if not self.leaves:
            return f"{definition}\n    {_NAME}.bind(({self._given()}))"
        present = set(names)
        targets = ", ".join(leaf if leaf in present else "_" for leaf in self.leaves)
        return f"{definition}\n    {targets}, = {_NAME}.bind(({self._given()}))"

    def _given(self) -> str:
        return "".join(f"{argument.name}, " for argument in self.calling.arguments)

    def generate_output(self, output_args: Any, *, descs: Any = None, repr_fn: Any = None) -> str:
        """The `return` line.

        Args:
            output_args: the argument of the graph's output node.
            descs: see `torch.fx`.
            repr_fn: how fx writes a value.
        """
        write = repr_fn or repr
        if self.calling.out_spec is None:
            return f"return {write(output_args)}"
        return f"return {_NAME}.result({write(output_args)})"

    def additional_globals(self) -> list[tuple[str, Any]]:
        """What the generated code refers to by name."""
        return [(_NAME, self.calling)]

    def process_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The inputs of the graph from those of `forward`, for `torch.fx.Interpreter`."""
        names = torch_private.keywords_in_export()
        if names and not kwargs:
            args, kwargs = args[: -len(names)], dict(zip(names, args[-len(names) :]))
        bound = self.calling.signature().bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(self.calling.bind(tuple(bound.arguments.values())))

    def process_outputs(self, outputs: Any) -> Any:
        """The result of `forward` from that of the graph, for `torch.fx.Interpreter`."""
        return outputs if self.calling.out_spec is None else self.calling.result(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallingCodeGen:
        # nothing in it changes once it is made; a tree's context may hold classes, which must not be copied
        return copy.copy(self)


def decided_in(gm: GraphModule) -> str:
    """What a graph was captured to decide by the values of its inputs: what was read, and the line that reads it.

    Args:
        gm: the graph module.
    """
    codegen = codegen_of(gm.graph)
    decisions = codegen.calling.decisions if isinstance(codegen, CallingCodeGen) else None
    return "" if decisions is None else str(decisions)


def direct(lines: list[str]) -> list[str]:
    """The lines of a body, in which nested layers are taken from `_modules`.

    `nn.Module.__getattr__` is Python, and runs once for each name on the way: for a layer six levels down that takes
    longer than many a small layer itself. `_modules` is where it looks, so the code finds the same layer.

    >>> direct(['query = getattr(self.layer, "0").query(x)', "weight = self.norm.weight", "y = self.norm(x)"])
    ['query = self._modules["layer"]._modules["0"]._modules["query"](x)', 'weight = self._modules["norm"].weight', \
'y = self.norm(x)']
    """
    return [_directly(line, found) if (found := _TARGET.match(line)) else line for line in lines]


def _directly(line: str, found: re.Match[str]) -> str:
    assigned, way, called = found.groups()
    names = [name or quoted for name, quoted in _STEP.findall(way)]
    if len(names) == 1:
        return line
    if not called and not names[-1].isidentifier():  # a weight in a list, which is no attribute that can be written
        return line
    last = "" if called else f".{names.pop()}"
    modules = "".join(f'._modules["{name}"]' for name in names)
    return f"{assigned}self{modules}{last}{called}{line[found.end() :]}"


def _writable(value: Any) -> bool:
    return value is None or type(value) in (bool, int, str) or (type(value) is float and value == value)
