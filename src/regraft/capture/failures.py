"""The one error for a model that cannot be captured: which line of its source stands in the way, and what to do."""

from __future__ import annotations

import copy
import inspect
import linecache
import os
import traceback
from types import TracebackType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from regraft.capture.signature import Call
from regraft.capture.untouched import untouched
from regraft.core.errors import CaptureError

_TRANSFORMED = "inside of a transformed function"
_DISTRIBUTED = "while a distribution looks at its arguments"
_CURES = (
    (
        (_DISTRIBUTED,),
        (
            "torch.distributions looks whether the values that it is given are valid, which a graph cannot do; do "
            "without, if you can: torch.distributions.Distribution.set_default_validate_args(False)"
        ),
    ),
    (
        ("DataDependent", "data-dependent", "Could not guard", "Could not extract specialized"),
        (
            "the model decides by the value of a tensor, which a graph cannot do; replace the decision by torch.where "
            "or torch.cond, pass the argument that the model would otherwise compute, or optimize the parts that do "
            "not decide, each by itself: model.encoder = regraft.optimize(model.encoder, *its_call).model"
        ),
    ),
    (
        (".numpy() is not supported",),
        (
            "what NumPy computes is in no graph; write it with torch, or optimize the parts without it, each by "
            "itself: model.encoder = regraft.optimize(model.encoder, *its_call).model"
        ),
    ),
    (
        ("torch.vmap", "functorch", _TRANSFORMED),
        (
            "write what torch.vmap vectorises with broadcasting, and what torch.func derives as a formula, or capture "
            "the parts of the model before and after it with rg.trace"
        ),
    ),
    (
        ("fake tensor in the exported program constant",),
        (
            "where the model takes a gradient inside of its forward (torch.autograd.grad), write that as a formula, or "
            "capture the parts of the model before and after it with rg.trace"
        ),
    ),
    (
        ("assigned to the .data",),
        (
            "give what is assigned to the function itself, as in F.linear(x, weight, bias), or capture the parts of "
            "the model before and after it with rg.trace"
        ),
    ),
    (
        ("random generator",),
        (
            "a graph draws from torch's own generator, as it finds it; leave the seed to whoever calls the model, or "
            "draw the numbers once, in __init__, and keep them in a buffer"
        ),
    ),
    (
        ("devices, meta and", "and meta!"),
        (
            "what is on the meta device has no values: load the weights, as in model.to_empty(device='cpu') and "
            "model.load_state_dict(...), or capture with every weight and input on the meta device"
        ),
    ),
    (
        ("uninitialized parameter",),
        "a lazy layer of the model has no weights before its first call; call the model once",
    ),
    (
        ("requires_grad=True on inference tensor",),
        (
            "weights of the model were made in inference mode; make it outside of torch.inference_mode(), or a copy "
            "there: copy.deepcopy(model)"
        ),
    ),
    (
        ("PackedParams",),
        (
            "torch.ao.quantization keeps weights in objects that torch.export cannot take apart; capture the model "
            "before it is quantized, or quantize with torchao, as rg.Quantize does"
        ),
    ),
    (
        ("TraceError", "symbolically traced variables", "Proxy"),
        (
            "without an example of its call the model cannot be run; capture it with one: "
            'rg.trace(model, args, kwargs, dynamic_shapes="auto")'
        ),
    ),
    (
        ("ConstraintViolation", "Constraints violated", "constraint"),
        (
            'the model does not work for every size that dynamic_shapes allows; use dynamic_shapes="auto", '
            "which finds out what can vary"
        ),
    ),
    (
        ("pytree", "Unsupported output", "unsupported output", "Expected traced function"),
        (
            "the model returns an object that cannot be taken apart; register its class: a dataclass with "
            "torch.export.register_dataclass(Output), any other with torch.utils._pytree.register_pytree_node"
        ),
    ),
)
_SCRIPTED = (
    "into {}, which is of TorchScript, torch.export cannot look; put the module that it was made from in its place"
)
_LARGE = 1 << 31  # bytes
_ELSE = "take this line out of the traced path, or capture the parts of the model before and after it with rg.trace"


def capture_error(model: nn.Module, error: BaseException) -> CaptureError:
    """The error to raise from what torch raised while it exported a model.

    Args:
        model: the model.
        error: what was raised.
    """
    said = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {said[0] if said else 'no message'}"
    text = f"{type(error).__name__} {error} {_circumstances(error)}"
    scripted = [path for path, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    cures = (cure for signs, cure in _CURES if any(sign in text for sign in signs))
    cure = _SCRIPTED.format(scripted[0]) if scripted else next(cures, _ELSE)
    return CaptureError(
        f"{type(model).__name__} cannot be captured, because of {where(model, error)}\n  {reason}\n{cure}"
    )


def refuse_example(model: nn.Module, call: Call) -> None:
    """Raise where a model that cannot be captured does not take the example either, for then that is to blame.

    It is a copy that is asked, since a forward may write to anything; a large model is not.

    Args:
        model: the model.
        call: the example.

    Raises:
        CaptureError: it raises for this example itself.
    """
    tensors = [*model.parameters(), *model.buffers()]
    unasked = any(is_lazy(tensor) or tensor.is_meta for tensor in tensors)  # a call would make their weights, or fail
    if unasked or sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) > _LARGE:
        return
    try:
        twin = copy.deepcopy(model)
    except Exception:  # whatever an object that hangs on the model raises
        return
    args, kwargs = call.rebuild([leaf.detach().clone() for leaf in call.leaves])
    try:
        with untouched(twin), torch.no_grad():
            twin(*args, **kwargs)
    except Exception as error:  # whatever a model raises
        said = str(error).strip().splitlines()
        raise CaptureError(
            f"{type(model).__name__} cannot be captured, because it does not take this example itself: "
            f"{type(error).__name__}: {said[0] if said else 'no message'}; give it a call that runs without regraft"
        ) from error


def _circumstances(error: BaseException) -> str:
    """What was going on, where the message does not say so."""
    frames = [(frame.filename, frame.name) for part in _chain(error) for frame in traceback.extract_tb(part)]
    transforms = {inspect.getsourcefile(function) for function in (torch.vmap, torch.func.grad, torch.func.jvp)}
    if any(file in transforms for file, _ in frames):
        return _TRANSFORMED
    checks = (inspect.getsourcefile(torch.distributions.Distribution), "__init__")
    return _DISTRIBUTED if decides_by_value(error) and checks in frames else ""


def decides_by_value(error: BaseException | None) -> bool:
    """Whether torch stopped at the value of a tensor, or at a size that varies: other axes that vary seldom help.

    Args:
        error: what was raised, if anything.
    """
    return "DataDependent" in type(error).__name__ or "unhashable type: non-nested SymInt" in str(error)


def where(model: nn.Module, error: BaseException) -> str:
    """The line of the model's source that stands in the way.

    Args:
        model: the model.
        error: what was raised while it ran.
    """
    frames = [frame for part in _chain(error) for frame in traceback.extract_tb(part)]
    sources = {_source(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    own = [frame for frame in frames if frame.filename in sources]
    foreign = [frame for frame in frames if not _is_machinery(frame.filename)]
    for frame in (own or foreign)[-1:]:
        line = linecache.getline(frame.filename, frame.lineno or 0).strip() or frame.line or ""
        return f"{frame.filename}:{frame.lineno}, in {frame.name}:\n    {line}"
    return "its forward"


def line_that_runs() -> str:
    """The line of a model's source that is being run: the innermost that is no library's under it."""
    frames = traceback.extract_stack()
    own = [frame for frame in frames if not _is_machinery(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}: {(own[-1].line or '').strip()}" if own else "its forward"


def _chain(error: BaseException | None) -> list[TracebackType]:
    found: list[TracebackType] = []
    while error is not None:
        if error.__traceback__ is not None:
            found.insert(0, error.__traceback__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    # the last is what was caught; the first in time says most about the model, so it is looked at last
    return found[::-1]


def _source(module: nn.Module) -> str:
    try:
        return inspect.getsourcefile(type(module)) or ""
    except (TypeError, OSError):  # a class of C, or one that was typed into a notebook
        return ""


def _is_machinery(filename: str) -> bool:
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    torch_home = os.path.dirname(os.path.abspath(torch.__file__))
    return filename.startswith((ours, torch_home, "<")) or os.path.dirname(os.__file__) == os.path.dirname(filename)
