"""What the arguments of a public function have to be: else an error that names one and shows the corrected call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch.fx import GraphModule


def expect_graph(given: object, name: str, call: str) -> None:
    """Refuse what is no graph module, and so has no history and no graph to change.

    Args:
        given: What was given.
        name: What was called.
        call: The corrected call, with `{}` in the place of the graph module.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(given, GraphModule):
        return
    kind = type(given).__name__
    cure = f"capture it first: {call.replace('{}', 'regraft.trace(model, args)')}"
    if kind == "ExportedProgram":
        cure = f"capture it first: {call.replace('{}', 'regraft.lift(program)')}"
    elif kind in ("Optimized", "GraphResult") or hasattr(given, "_regraft"):  # the latter is the model in a result
        cure = f"what optimize has rewritten is the result's graph: {call.replace('{}', 'result.graph_module')}"
    raise TypeError(f"{name} takes a torch.fx.GraphModule, and got {kind}; {cure}")


def expect_call(args: Any, kwargs: Any, call: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an example call of a model, in one form.

    Args:
        args: The positional ones.
        kwargs: The named ones; None for none.
        call: The corrected call, with `{}` in the place of both.

    Raises:
        TypeError: They are something else.
    """
    if isinstance(args, Mapping):
        raise TypeError(
            f"args is a {type(args).__name__}, but takes a tuple of the positional arguments; named ones go to kwargs: "
            f"{call.replace('{}', 'kwargs=inputs')}"
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args is a {type(args).__name__}, but takes a tuple of the positional arguments: "
            f"{call.replace('{}', 'args=(x,)')}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        shown = call.replace("{}", "args=(x,), kwargs={'mask': m}")
        raise TypeError(f"kwargs is a {type(kwargs).__name__}, but takes a dictionary: {shown}")
    return tuple(args), dict(kwargs or {})


def expect_number(given: Any, name: str, call: str, *, zero: bool = True) -> None:
    """Refuse what is no number, or a negative one; so are NaN, which compares with nothing, and infinity.

    Args:
        given: What was given.
        name: The argument.
        call: The corrected call.
        zero: Whether it may be zero.

    Raises:
        TypeError: It is no number.
        ValueError: It is too small, or not finite.
    """
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number:
        raise TypeError(f"{name}={given!r}, but takes a number: {call}")
    if not (0 <= given < math.inf if zero else 0 < given < math.inf):
        raise ValueError(f"{name}={given!r}, but has to be {'zero or more' if zero else 'positive'} and finite: {call}")


def expect_flag(given: object, name: str, call: str) -> None:
    """Refuse what is neither True nor False: any word, "false" too, would count as true.

    Args:
        given: What was given.
        name: The argument.
        call: The corrected call.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(given, bool):
        raise TypeError(f"{name}={given!r}, but takes True or False: {call}")
