"""What every transformation must obey, as assertions."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from regraft.capture import trace
from regraft.core.graph_module import adopt
from regraft.core.history import history, undo
from regraft.core.journal import Step
from regraft.core.report import Report
from regraft.core.transformation import Transformation
from regraft.testing.picture import assert_same_picture, picture
from regraft.verify import verify


def assert_round_trip(
    transformation: Transformation,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    idempotent: bool = True,
) -> Report:
    """Apply a transformation, hold it to every law, and take it back.

    The result computes the same as the model, measured against float64 (if the transformation says that it preserves
    the computation). The dry run says what is then done, and changes nothing. Applied twice it is as applied once.
    Undo gives everything back: names, order, code, the same parameter objects with the same bits; so it does for a deep
    copy, and for what was pickled. The model that was captured is never touched, nor the random state.

    Args:
        transformation: The transformation.
        model: A module, which is traced with the arguments; or a graph module, which is as before when this returns.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        idempotent: False for a transformation that may well find something to do when it is applied again.

    Returns:
        What was applied and what was refused.

    Raises:
        AssertionError: naming the law that does not hold, and what differs.

    Example:
        >>> import torch, regraft as rg
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> report = assert_round_trip(rg.FoldBatchNorm(), model, (torch.randn(2, 3, 5, 5),))
        >>> report.applied, report.refused
        (1, 0)
    """
    callers = picture(model)
    gm = adopt(model) if isinstance(model, GraphModule) else trace(model, args, dict(kwargs or {}))
    before, reference, steps = picture(gm), copy.deepcopy(gm), history(gm)
    signature, random = transformation.signature, torch.get_rng_state()

    report = transformation.explain(gm)
    assert_same_picture(before, picture(gm), "the dry run changed the graph module")
    result = transformation(gm)
    new = [step for step in history(result) if step not in steps]
    _expect(_rows(new) == report.rows() or result is not gm, f"the dry run said {report.rows()}, done was {_rows(new)}")
    if transformation.preserves_computation:
        _verified(reference, result, args, kwargs)
    after, known, objects = picture(result), history(result), result is gm
    if idempotent:
        once = picture(result, objects)
        twice = transformation(result)
        assert_same_picture(once, picture(twice, objects), "a second application changed what the first had left")
        _undone(twice, len(known))
        assert_same_picture(once, picture(twice, objects), "the second application, taken back, is not the first alone")

    bits, changed = picture(reference, objects=False), picture(result, objects=False)
    for how, other in _copies(reference, result):
        assert_same_picture(changed, picture(other, objects=False), f"{how} is not the original")
        if result is gm:
            assert_same_picture(bits, picture(_undone(other, len(steps)), objects=False), f"undo of {how}")
        assert_same_picture(after, picture(result), f"undo of {how} changed the original")
    _undone(result, len(steps))
    assert_same_picture(before, picture(gm), "undo did not give everything back")
    _expect(history(gm) == steps, "undo left something in the history")
    if model is not gm:
        assert_same_picture(callers, picture(model), "the model that was captured has changed")
    _expect(bool((random == torch.get_rng_state()).all()), "the random state of torch has moved")
    _expect(transformation.signature == signature, "the signature has changed")
    _expect(copy.deepcopy(transformation).signature == signature, "a copy of the transformation has another signature")
    return report


def assert_refused(transformation: Transformation, gm: GraphModule, match: str) -> Report:
    """A transformation refuses every site of a graph module, says why, and leaves no trace.

    Args:
        transformation: A `Rewrite`, or a composition of them.
        gm: A graph module; it is as before when this returns.
        match: A regular expression that the sentence of a refusal must contain, as in `pytest.raises`.

    Returns:
        The report with the refusals.

    Raises:
        AssertionError: if something was applied, nothing was a candidate, no sentence matches, or anything differs.

    Example:
        >>> import torch, regraft as rg
        >>> gm = rg.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)))
        >>> print(assert_refused(rg.FuseBiasInLinear(), gm, match="has no bias"))
        FuseBiasInLinear: 0 applied, 1 refused
          refused  0  0 has no bias
    """
    gm, name = adopt(gm), type(transformation).__name__
    before, steps = picture(gm), history(gm)
    result = transformation(gm)
    report = Report(name, tuple(step for step in history(result) if step not in steps))
    _expect(result is gm, f"{name} returned another graph module")
    _expect(report.applied == 0, f"{name} did not refuse:\n{report}")
    _expect(report.refused > 0, f"{name} found no candidate, and so it refused nothing")
    sentences = [row[3] for row in report.rows()]
    _expect(any(re.search(match, text) for text in sentences), f"no sentence matches {match!r}:\n{report}")
    assert_same_picture(before, picture(gm), "a refusal changed the graph module")
    _undone(gm, len(steps))
    assert_same_picture(before, picture(gm), "undo of a refusal changed the graph module")
    return report


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _rows(steps: list[Step]) -> list[tuple[str, str, str, str]]:
    return Report("", tuple(steps)).rows()


def _undone(gm: GraphModule, steps: int) -> GraphModule:
    """Every step after the first `steps` taken back, last first."""
    while len(history(gm)) > steps:
        undo(gm)
    return gm


def _copies(reference: GraphModule, result: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """The result deep-copied, and saved and loaded where what it was made from could be."""
    yield "a deep copy", copy.deepcopy(result)
    try:
        pickle.dumps(reference)
    except Exception:  # torch saves no parametrized layer, and says so with more than one type of error
        return
    yield "what was pickled", pickle.loads(pickle.dumps(result))


def _verified(
    reference: GraphModule, result: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> None:
    fresh, named = tree_map(_cloned, (args, dict(kwargs or {})))
    verdict = verify(reference, result, fresh, named)
    _expect(verdict.ok, f"the result does not compute what the model does\n{verdict}")


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
