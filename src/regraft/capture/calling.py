"""How a captured graph is called: as the model is, and with a sentence where the call is wrong."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from regraft.capture import caches, torch_private, transformers_adapter, user_dicts
from regraft.capture.constraints import Constraints
from regraft.capture.decisions import Decisions
from regraft.capture.layouts import Layouts
from regraft.core.errors import NotCovered


@dataclass(frozen=True, eq=False)
class Argument:
    """One parameter of the model's forward, as it was when the model was captured.

    Args:
        name: its name.
        spec: the structure of its value; None where the value is no container.
        leaves: for each leaf of the value: None for a tensor, else a tuple that holds the constant.
    """

    name: str
    spec: Any
    leaves: tuple[tuple[Any, ...] | None, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_argument, (self.name, torch_private.pack_spec(self.spec), self.leaves)

    @cached_property
    def is_tensor(self) -> bool:
        """Whether the whole value is one tensor."""
        return self.spec is None and self.leaves == (None,)

    @cached_property
    def constant(self) -> Any:
        """The value, where the whole of it is a constant."""
        return self.leaves[0][0] if self.spec is None and self.leaves[0] is not None else None


def _load_argument(name: str, packed: Any, leaves: tuple[tuple[Any, ...] | None, ...]) -> Argument:
    return Argument(name, _load_spec(packed), leaves)


def _load_spec(packed: Any) -> Any:
    """A structure from a file, whose classes this process may not have met: caches are made known on first sight."""
    if packed:
        kind, _, children = packed
        user_dicts.make_known()
        transformers_adapter.register_container(kind)
        for child in children:
            _load_spec(child)
    return torch_private.unpack_spec(packed)


def _load_calling(
    arguments: tuple[Argument, ...],
    positional: int,
    constraints: Constraints | None,
    packed: Any,
    decisions: Decisions | None = None,
    layouts: Layouts | None = None,
) -> Calling:
    return Calling(arguments, positional, constraints, _load_spec(packed), decisions, layouts)


class Calling:
    """The signature of a captured graph, and what goes in and comes out of it.

    Args:
        arguments: the parameters of the model's forward, in its order.
        positional: how many of them can be given by position; the others are keyword only.
        constraints: the shapes for which the graph holds; None where nothing is known of them.
        out_spec: the structure of the result; None where the graph returns it as it is.
        decisions: what the graph decides by values; None where it decides nothing.
        layouts: how the inputs have to be laid in memory; None where that makes no difference.
    """

    def __init__(
        self,
        arguments: Sequence[Argument],
        positional: int,
        constraints: Constraints | None,
        out_spec: Any,
        decisions: Decisions | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        self.arguments = tuple(arguments)
        self.positional = positional
        self.constraints = constraints
        self.out_spec = out_spec
        self.decisions = decisions
        self.layouts = layouts
        self._simple = [index for index, argument in enumerate(self.arguments) if argument.is_tensor]
        self._build = torch_private.unflattener(out_spec) if out_spec is not None else list
        self._flat = all(argument.spec is None for argument in self.arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        packed = torch_private.pack_spec(self.out_spec)
        held = (self.constraints, packed, self.decisions, self.layouts)
        return _load_calling, (self.arguments, self.positional, *held)

    def bind(self, values: tuple[Any, ...]) -> list[Any]:
        """The tensors of a call, in the order of the graph's inputs.

        Args:
            values: what was given for each of `arguments`.

        Raises:
            TypeError: an argument is missing, is not what it was at capture, or has a shape for which the graph does
                not hold; the message names it.
        """
        if torch.compiler.is_compiling():
            if not self._covers(values):
                raise NotCovered(
                    "the captured graph does not hold for the sizes, the constants or the values of this call, which "
                    "is being compiled; call the graph itself to be told which"
                )
            return self._unchecked(values)
        if any(isinstance(value, torch.fx.Proxy) for value in values):
            if self.decisions is not None:
                raise NotCovered(
                    "what the graph decides by the values of its inputs would be lost in a trace; take the graph itself"
                )
            return self._unchecked(values)
        leaves: list[Any] = []
        for argument, value in zip(self.arguments, values):
            if argument.is_tensor or argument.spec is not None or value is not argument.constant:
                leaves += _leaves(argument, value)
        self.check(leaves)
        return leaves

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Compare a call's tensors with those for which the graph holds: shapes, layouts, what is decided by values.

        Args:
            leaves: the tensors, in the order of the graph's inputs.

        Raises:
            TypeError: the graph does not hold for them; the message names the argument.
        """
        if self.constraints is not None:
            self.constraints.check(leaves)
        if self.layouts is not None:
            self.layouts.check(leaves)
        if self.decisions is not None:
            self.decisions.check(leaves)

    def _unchecked(self, values: tuple[Any, ...]) -> list[Any]:
        if self._flat:
            return [values[index] for index in self._simple]
        leaves: list[Any] = []
        for argument, value in zip(self.arguments, values):
            if argument.spec is None:
                flat = [value]
            else:
                flat = torch_private.tree_leaves(caches.unfold(value))
            leaves += [leaf for leaf, constant in zip(flat, argument.leaves) if constant is None]
        return leaves

    def covers(self, call: Mapping[str, Any]) -> bool:
        """Whether the graph holds for a call of its structure; what `bind` asks, in a form that a compiler can trace.

        Args:
            call: the arguments by name; tensors where the graph has tensors.
        """
        return self._covers(tuple(call.get(argument.name, argument.constant) for argument in self.arguments))

    def _covers(self, values: tuple[Any, ...]) -> bool:
        for argument, value in zip(self.arguments, values):
            if argument.spec is None and argument.leaves[0] is not None and not _is_constant(argument.constant, value):
                return False
        leaves = self._unchecked(values)
        if self.constraints is not None and not self.constraints.holds(leaves):
            return False
        if self.layouts is not None and not self.layouts.hold(leaves):
            return False
        if self.decisions is not None and torch.compiler.is_exporting():
            self.decisions.record(leaves)
            return True
        return self.decisions is None or self.decisions.hold(leaves)

    def result(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, from the outputs of the graph.

        Args:
            leaves: the outputs, in order.
        """
        return self._build(list(leaves))

    def signature(self) -> inspect.Signature:
        """The signature of the generated `forward`."""
        return inspect.Signature(
            [
                inspect.Parameter(
                    argument.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD
                    if index < self.positional
                    else inspect.Parameter.KEYWORD_ONLY,
                    default=argument.constant,
                )
                for index, argument in enumerate(self.arguments)
            ]
        )


def _leaves(argument: Argument, value: Any) -> list[Any]:
    """The tensors in one argument, after a look at everything else about it."""
    if argument.is_tensor:
        if isinstance(value, torch.Tensor):
            return [value]
        if value is None:
            raise TypeError(f"missing the argument {argument.name}: the graph was captured with a tensor there")
        raise TypeError(f"{argument.name} is a {type(value).__name__}, where the graph was captured with a tensor")
    if argument.spec is None:
        _check_constant(argument.name, argument.constant, value)
        return []
    flat, spec = _flat(argument, value)
    if spec != argument.spec:
        raise TypeError(_other_structure(argument, value, spec))
    tensors = []
    for leaf, constant in zip(flat, argument.leaves):
        if constant is not None:
            _check_constant(argument.name, constant[0], leaf)
        elif isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:
            raise TypeError(
                f"{argument.name} has a {type(leaf).__name__} inside, where the graph was captured with a tensor"
            )
    return tensors


def _flat(argument: Argument, value: Any) -> tuple[list[Any], Any]:
    state = value if type(value) is caches.State else caches.state_of(value)
    if state is None:
        return torch_private.tree_flatten(value)
    if torch_private.spec_type(argument.spec) is caches.State and state.form == torch_private.spec_context(
        argument.spec
    ):
        return state.leaves, argument.spec
    return torch_private.tree_flatten(state)


def _check_constant(name: str, captured: Any, given: Any) -> None:
    if given is captured:
        return
    if captured is None:
        raise TypeError(
            f"unexpected argument {name}: it was not given when the graph was captured, so the graph does not use it; "
            f"capture the model with {name} to have it"
        )
    if not _is_constant(captured, given):
        raise TypeError(
            f"{name} was {captured!r} when the graph was captured, which is now fixed, but {_said(given)} was given; "
            "capture the model once for each value"
        )


def _is_constant(captured: Any, given: Any) -> bool:
    if given is captured:
        return True
    if isinstance(given, torch.Tensor) or type(given) is not type(captured) or given != captured:
        return False
    return type(given) is not float or math.copysign(1.0, given) == math.copysign(1.0, captured)  # -0.0 is not 0.0


def _said(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _other_structure(argument: Argument, value: Any, spec: Any) -> str:
    if value is None:
        return (
            f"missing the argument {argument.name}: the graph was captured with a "
            f"{torch_private.spec_type(argument.spec).__name__} there"
        )
    return (
        f"{argument.name} has another structure than the one the graph was captured with: expected "
        f"{argument.spec}, got {spec}"
    )
