"""`trace`: a model and an example of its call become a graph module."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from regraft.capture import transformers_adapter
from regraft.capture.assembling import assemble
from regraft.capture.calling import Calling
from regraft.capture.codegen import CallingCodeGen
from regraft.capture.exporting import Exported, without_prefix
from regraft.capture.failures import decides_by_value, refuse_example
from regraft.capture.first_run import run_once
from regraft.capture.probing import ROUNDED, Probe
from regraft.capture.shapes import Axes, axes_of
from regraft.capture.signature import Call, take_apart
from regraft.capture.untouched import values_kept
from regraft.capture.widest import Exports
from regraft.core.errors import CaptureError
from regraft.core.expect import expect_call
from regraft.core.fx_private import codegen_of
from regraft.core.graph_module import GraphModule, adopt
from regraft.core.mutation import weights_written

ONE_AT_A_TIME = threading.RLock()
"""`torch.export`, and what is put in place around it, warnings and stderr among it, there is once in a process."""


def trace(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> GraphModule:
    """Capture a model as a graph, from an example of its call.

    The graph holds the model's own layers and weights, never copies. It is called as the model is, and computes the
    same bits. Each call of a layer of `torch.nn` is one `call_module` node under the layer's name.

    Args:
        model: the model, in the mode in which the graph is to be used: dropout is gone from that of an eval model.
            A graph module is returned as it is, as regraft's.
        args: positional arguments, tensors or nested containers of them.
        kwargs: keyword arguments. What is no tensor is fixed in the graph, and so are whole numbers that the model
            reads from buffers of its own that are in no checkpoint. What it reads of its inputs, as `if mask.all()`
            does, and of its flags, weights and buffers of one number, is fixed where it cannot be captured otherwise;
            a call in which it would read anything else raises.
        dynamic_shapes: which sizes may differ from the example's. None: none may. `"auto"`: all that can; where export
            fails so, or would reason for minutes (Swin), the first axes that can, and where it fails again, none.
            Otherwise a form of `torch.export.export`.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of its source and what to do. Or its
            graph, run once beside it, makes something else of the example.
        TypeError: an argument is not what it should be, or the model's forward takes no such arguments.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> gm = trace(model, (torch.randn(2, 4),), dynamic_shapes="auto")
        >>> [(node.op, node.target) for node in gm.graph.nodes]
        [('placeholder', 'input'), ('call_module', '0'), ('call_module', '1'), ('output', 'output')]
        >>> torch.equal(gm(x := torch.randn(7, 4)), model(x))
        True
    """
    if isinstance(model, torch.fx.GraphModule):
        return adopt(model)
    expect_python("trace", model)
    args, kwargs = expect_call(args, kwargs, "regraft.trace(model, {})")
    transformers_adapter.prepare(model)
    call = take_apart(model, args, kwargs)
    axes = axes_of(call, dynamic_shapes, model, args, kwargs)
    return capture(model, call, axes, automatic=dynamic_shapes == "auto" if isinstance(dynamic_shapes, str) else False)


def expect_python(function: str, model: object) -> None:
    """Refuse what is no module with a forward in Python.

    Args:
        function: the name of the function that was given it.
        model: what it was given.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{function} takes a model in Python, not one in TorchScript; give it the module that torch.jit.script or "
            f"torch.jit.trace was given: regraft.{function}(module, args)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, not a {type(model).__name__}")


def capture(model: nn.Module, call: Call, axes: Axes, automatic: bool) -> GraphModule:
    """Capture one call of a model; see `trace`.

    Args:
        model: the model.
        call: the call.
        axes: which axes vary.
        automatic: whether all that can were asked to.

    Raises:
        CaptureError: the model cannot be captured.
    """
    with ONE_AT_A_TIME, values_kept(run_once(model, call)):  # export writes to some as well
        try:
            gm = _captured(model, call, axes, automatic)
        except CaptureError as error:
            refuse_example(model, call)
            decided = _decided(model, call, axes, automatic) if decides_by_value(error.__cause__) else None
            if decided is None:
                raise
            gm = decided
    transformers_adapter.dress(gm, model)
    return gm


def _decided(model: nn.Module, call: Call, axes: Axes, automatic: bool) -> GraphModule | None:
    """Capture a call for what the model reads of its inputs in it; None where that is not all that it decides by."""
    fixed: Axes = [None] * len(axes)
    for varying in [axes, fixed] if automatic and axes != fixed else [axes]:
        try:
            return _captured(model, call, varying, automatic, decided=True)
        except CaptureError:
            return None
        except NotImplementedError:  # it reads a size of what weights have made, which is a number where none varies
            continue
    return None


def _captured(model: nn.Module, call: Call, axes: Axes, automatic: bool, decided: bool = False) -> GraphModule:
    """Capture a call; `decided` is whether what it reads of its inputs is fixed, and asked for at other calls."""
    exports = Exports(model, call, decided)
    exporting = exports.widest if automatic else exports.one
    exported = exporting(axes)
    gm = _assembled(model, call, exported, automatic)
    with values_kept(weights_written(gm)):  # which are run on real tensors
        probe = Probe(model, gm, call, _calling(gm))
        probe.allow_size_one()
        if exported.seen.changed and not probe.answers_alike():
            names = ", ".join(sorted(exported.seen.changed))
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: it keeps something from one call to the next ({names}) "
                "and computes with it, and a graph would answer each time as it does now; keep it in a buffer that is "
                "written in place, as in self.count.add_(1), or give and return it"
            )
        if exported.seen.drawn and not probe.answers_alike():
            whose = " and ".join(sorted(exported.seen.drawn))
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: it computes with numbers of {whose} random generator, and "
                "a graph would have the same ones at each call; draw them with torch, as in torch.rand(())"
            )
        if exported.enlarged and not probe.agrees():
            # what holds for the larger sample does not for this one: take the axes of size one for fixed
            plain: Axes = [
                {axis: dim for axis, dim in (varying or {}).items() if leaf.shape[axis] > 1} or None
                for leaf, varying in zip(call.leaves, axes)
            ]
            gm = _assembled(model, call, exporting(plain), automatic)
            probe = Probe(model, gm, call, _calling(gm))
            probe.allow_size_one()
        if decided and not probe.agrees(ROUNDED):
            raise CaptureError(f"{type(model).__name__} decides by something that a graph of it does not")
        if probe.is_far_off():
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: of the example its graph makes something else than the "
                "model does, which so does something that torch.export does not see; capture its parts with rg.trace "
                "to find out where"
            )
    return gm


def _assembled(model: nn.Module, call: Call, exported: Exported, automatic: bool) -> GraphModule:
    return assemble(
        model,
        exported.program,
        call.interface,
        exported.seen.out_spec,
        automatic=automatic,
        rename=without_prefix,
        asked=exported.seen.asked,
        otherwise=exported.seen.otherwise,
        layouts=exported.seen.layouts,
    )


def _calling(gm: GraphModule) -> Calling:
    codegen = codegen_of(gm.graph)
    assert isinstance(codegen, CallingCodeGen)
    return codegen.calling
