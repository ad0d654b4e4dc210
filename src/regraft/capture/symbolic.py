"""`symbolic_trace`: a model without an example of its call."""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.proxy import Attribute

from regraft.capture import transformers_adapter
from regraft.capture.cache_names import FORMER, name_in
from regraft.capture.failures import capture_error
from regraft.capture.layers_called import LayersCalled
from regraft.capture.module_tree import attribute, graft_tree, is_leaf, place_tensor
from regraft.capture.random_numbers import others_drawn
from regraft.capture.sample_inputs import SampleMaker, Unmakeable
from regraft.capture.shapes import axes_of
from regraft.capture.signature import take_apart
from regraft.capture.trace import ONE_AT_A_TIME, capture
from regraft.capture.untouched import untouched
from regraft.core.errors import CaptureError
from regraft.core.graph_module import GraphModule, adopt
from regraft.core.ordinary import ordinary_call


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[Proxy, Any], Proxy]:
    def method(self: Proxy, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return method


class _Proxy(Proxy):
    """`x += y` writes into x. That of torch.fx takes it for `x = x + y`, which leaves what else is in x's memory."""

    def __getattr__(self, name: str) -> Attribute:
        return _Attribute(self, name)


class _Attribute(Attribute):
    """`x.T` is written into too."""

    def __getattr__(self, name: str) -> Attribute:
        return _Attribute(self, name)


for _name in ("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    for _class in (_Proxy, _Attribute):
        setattr(_class, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(Tracer):
    proxy_buffer_attributes = True  # a buffer is read when the graph runs, not computed with while it is made

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)

    def trace(self, root: Any, *args: Any, **kwargs: Any) -> Graph:
        self._layers, self._thread = LayersCalled(root), threading.get_ident()
        return super().trace(root, *args, **kwargs)

    # What torch.fx puts in the place of nn.Module's methods, other threads' models go through meanwhile as well.

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = is_leaf(m) or super().is_leaf_module(m, module_qualified_name)
        return leaf and all(map(self._layers.is_as_it_was, m.modules()))


class _TracerOfBuffers(_Tracer):
    proxy_buffer_attributes = False


def symbolic_trace(
    model: nn.Module,
    input_names: Sequence[str] | None = None,
    disable_check: bool = False,
    tracer_cls: type[Tracer] | None = None,
) -> GraphModule:
    """Capture a model as a graph, for any batch and any sequence length, without an example of its call.

    A transformers model is exported with inputs that are made from its config. Any other model is traced by `torch.fx`,
    but that `x += y` writes into x, and that a buffer is read when the graph runs wherever the trace does not ask for
    its size or its value.

    Args:
        model: the model. A graph module is returned as it is, as regraft's.
        input_names: the arguments that the graph of a transformers model is to take; None for its main inputs. That of
            any other model takes what its forward takes.
        disable_check: do not compare `input_names` with the model's forward beforehand.
        tracer_cls: trace with this class of `torch.fx` in any case.

    Raises:
        TypeError: an argument is not what it should be; the message shows the corrected call.
        CaptureError: the model cannot be captured, it takes no such input, or an input cannot be made; the message
            says how to pass it.

    Example:
        >>> import torch
        >>> gm = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()))
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['0', '1']
    """
    if isinstance(model, torch.fx.GraphModule):
        return adopt(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"symbolic_trace takes a torch.nn.Module, not a {type(model).__name__}")
    names = _listed(input_names)
    if names is not None and not disable_check:
        _check_names(model, names)
    if tracer_cls is not None:
        _expect_tracer(tracer_cls)
        return _traced(model, tracer_cls)
    if not transformers_adapter.is_pretrained(model):
        try:
            return _traced(model, _Tracer)
        except CaptureError as error:  # a decision by the size or the value of a buffer is one that can be made now
            with contextlib.suppress(CaptureError):
                return _traced(model, _TracerOfBuffers)
            raise error
    return _exported(model, names if names is not None else transformers_adapter.main_inputs(model))


def _listed(names: Any) -> list[str] | None:
    if names is None:
        return None
    call = "regraft.symbolic_trace(model, input_names={})"
    if isinstance(names, str):
        raise TypeError(f"input_names={names!r} is one name: {call.format([names])}")
    listed = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"input_names={names!r}, but takes names: {call.format(['input_ids'])}")
    return listed


def _expect_tracer(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Tracer)):
        raise TypeError(
            f"tracer_cls={kind!r}, but takes a class of tracers: "
            "regraft.symbolic_trace(model, tracer_cls=torch.fx.Tracer)"
        )


def _check_names(model: nn.Module, names: Iterable[str]) -> None:
    parameters = inspect.signature(model.forward).parameters
    for name in names:
        if name not in parameters:
            renamed = name_in(parameters) if name in FORMER else None
            near = [renamed] if renamed else get_close_matches(name, parameters, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(parameters)}"
            raise CaptureError(f"{type(model).__name__}.forward takes no {name}{hint}")


def _exported(model: nn.Module, names: Sequence[str]) -> GraphModule:
    transformers_adapter.prepare(model)
    failure: CaptureError | None = None
    for maker in SampleMaker.variants(model, names):
        try:
            kwargs = maker.make(names)
        except Unmakeable as error:
            listed = ", ".join(f'"{name}": ...' for name in names)
            raise CaptureError(
                f'{error}; capture with an example instead: rg.trace(model, kwargs={{{listed}}}, dynamic_shapes="auto")'
            ) from None
        call = take_apart(model, (), kwargs)
        axes = axes_of(call, "auto", model, (), kwargs)
        axes = [maker.narrowed(label, varying) for label, varying in zip(call.labels, axes)]
        try:
            return capture(model, call, axes, automatic=True)
        except CaptureError as error:
            failure = error  # the last way is the one that asks least
    assert failure is not None
    raise failure


def _traced(model: nn.Module, tracer_cls: type[Tracer]) -> GraphModule:
    tracer = tracer_cls()
    constants: dict[str, Any] = {}
    try:
        with ONE_AT_A_TIME, untouched(model), others_drawn() as others:
            state = torch.get_rng_state()
            graph = tracer.trace(model)
            # among fake tensors none is drawn, and there the states cannot be compared
            drawn = {"torch's"} if ordinary_call() and not torch.equal(state, torch.get_rng_state()) else set()
            for node in graph.find_nodes(op="get_attr"):  # the tracer hangs constants onto the model
                constants[str(node.target)] = attribute(model, str(node.target))
    except Exception as error:  # whatever a model raises when it is called on proxies
        raise capture_error(model, error) from error
    if whose := " and ".join(sorted(drawn | others)):
        raise CaptureError(
            f"{type(model).__name__} cannot be captured without an example of its call: it draws numbers of "
            f"{whose} random generator, and its graph would have the same ones at each call; capture it "
            'with one: rg.trace(model, args, kwargs, dynamic_shapes="auto")'
        )
    called = {id(attribute(model, str(node.target))) for node in graph.find_nodes(op="call_module")}
    gm = GraphModule(nn.Module(), torch.fx.Graph(), type(model).__name__)
    graft_tree(model, gm, whole=called)
    for path, value in constants.items():
        if attribute(gm, path) is None and isinstance(value, torch.Tensor):
            place_tensor(gm, path, value)
    gm.graph = graph
    return adopt(gm)
