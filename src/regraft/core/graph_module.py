"""The graph module that every function of regraft returns: it is copied and saved without being traced again.

`torch.fx.GraphModule` is saved as its Python source and loaded by tracing that source. This loses `node.meta`, the
names of nodes, the modules that the graph does not call and the hooks, and fails on code that cannot be traced.
regraft's graph module is saved as what it is, a list of nodes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from regraft.core import fx_private
from regraft.core.graph_record import build_graph, copy_graph, record_graph, shared_when_copied
from regraft.core.portable import portable


class GraphModule(torch.fx.GraphModule):
    """A `torch.fx.GraphModule` that survives `copy`, `pickle` and `torch.save` whole.

    Node names, their order, `node.meta`, `gm.meta`, `gm.code`, the order of the `state_dict`, parameters that the graph
    does not use, ties, hooks, training flags and attributes are the same afterwards. Only what cannot be pickled is
    missing from `node.meta` after a load. A deep copy shares the fake tensors of `node.meta`.

    `copy.copy` gives a module with a graph and containers of its own, which shares every layer and every weight.

    >>> import pickle, torch
    >>> gm = adopt(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())))
    >>> same = pickle.loads(pickle.dumps(gm))
    >>> same.code == gm.code, [node.name for node in same.graph.nodes]
    (True, ['input_1', '_0', '_1', 'output'])
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        clone = _blank(type(self), self)
        memo[id(self)] = clone
        graph, nodes = copy_graph(self.graph)
        memo.update(shared_when_copied(node.meta for node in self.graph.nodes))
        # before anything else is copied, so that whatever refers to a node finds the new one
        memo.update({id(old): new for old, new in nodes.items()})
        memo[id(self.graph)] = graph
        for key, value in _attributes(self).items():
            clone.__dict__[key] = copy.deepcopy(value, memo)
        for old, new in nodes.items():
            new.meta = copy.deepcopy(old.meta, memo)
        clone.graph = graph
        for hook in getattr(clone, "_deepcopy_hooks", ()):
            hook(clone)
        return clone

    def __copy__(self) -> GraphModule:
        clone = _blank(type(self), self)
        graph, nodes = copy_graph(self.graph)
        clone.__dict__.update({key: _own_container(value) for key, value in _attributes(self).items()})
        clone.__dict__["_modules"] = _own_modules(self)
        clone.__dict__["meta"] = {key: _own_state(value) for key, value in self.meta.items()}
        for old, new in nodes.items():
            new.meta = dict(old.meta)
        clone.graph = graph
        return clone

    def _apply(self, fn: Any, recurse: bool = True) -> GraphModule:
        from regraft.core.convert import converting  # the journal knows graph modules, and so this one

        with converting(self, fn, recurse):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        attributes = _attributes(self)
        attributes["meta"] = portable(self.meta)
        attributes["shape_env"] = None  # belongs to a process; the fake tensors bring their own
        attributes["_tracer_cls"] = None
        state = {"attributes": attributes, "graph": record_graph(self.graph), "name": type(self).__name__}
        return _blank, (_base_class(self),), state

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__name__ = state["name"]
        self.__dict__.update(state["attributes"])
        self.graph = build_graph(state["graph"])


def adopt(gm: torch.fx.GraphModule) -> GraphModule:
    """Turn a plain `torch.fx.GraphModule` into regraft's, in place: the same object, with another class.

    Graph modules inside it, which the model that it was traced from may hold too, are replaced by copies that share
    their layers and weights.

    Args:
        gm: any graph module. One that is regraft's already is returned as it is; the class of one that somebody
            derived stays among its bases.

    Raises:
        TypeError: the class of the module cannot be changed.

    >>> import torch
    >>> traced = torch.fx.symbolic_trace(torch.nn.Linear(2, 3))
    >>> adopt(traced) is traced, isinstance(traced, GraphModule)
    (True, True)
    """
    if isinstance(gm, GraphModule):
        return _with_own_parts(gm, fresh=False)
    own = fx_private.own_class(gm)
    if own is None:
        raise TypeError(f"a {type(gm).__name__} has no class of its own, as fx gives every graph module; copy it first")
    own.__bases__ = (_combined(fx_private.declared_class(gm)),)
    assert isinstance(gm, GraphModule)
    return _with_own_parts(gm, fresh=True)


def _with_own_parts(gm: GraphModule, *, fresh: bool) -> GraphModule:
    """`gm` with copies of the graph modules inside it: of all in a fresh one, else of those that are not regraft's."""
    copies: dict[int, GraphModule] = {}
    holders: list[nn.Module] = [gm]
    while holders:
        holder = holders.pop()
        for name, part in holder._modules.items():
            if isinstance(part, torch.fx.GraphModule) and (fresh or not isinstance(part, GraphModule)):
                if id(part) not in copies:
                    copies[id(part)] = adopt(GraphModule.__copy__(part))  # type: ignore[arg-type]
                holder._modules[name] = copies[id(part)]
            elif isinstance(part, GraphModule) or type(part) is nn.Module:  # other containers are the caller's too
                holders.append(part)
    return gm


#: ours and somebody else's class in one, by the latter
_COMBINED: dict[type, type[GraphModule]] = {torch.fx.GraphModule: GraphModule}


def _combined(base: type[torch.fx.GraphModule]) -> type[GraphModule]:
    if issubclass(base, GraphModule):
        return base
    if base not in _COMBINED:
        namespace = {"__module__": __name__, "_regraft_base": base}
        make_class: Any = type(base)  # the metaclass of the other class, whatever it is
        _COMBINED[base] = make_class(base.__name__, (GraphModule, base), namespace)
    return _COMBINED[base]


def _base_class(gm: torch.fx.GraphModule) -> type[torch.fx.GraphModule]:
    """The class to save, which can be imported; a combined one cannot, and is combined again when loaded."""
    declared = fx_private.declared_class(gm)
    base: type[torch.fx.GraphModule] = vars(declared).get("_regraft_base", declared)
    return base


def _blank(cls: type[torch.fx.GraphModule], like: torch.fx.GraphModule | None = None) -> GraphModule:
    """A graph module without a graph, not yet initialised by its class: state follows."""
    combined = _combined(cls) if like is None else cls
    blank: GraphModule = combined.__new__(combined)  # type: ignore[assignment]
    nn.Module.__init__(blank)
    if like is not None:
        type(blank).__name__ = type(like).__name__
    return blank


def _attributes(gm: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(gm).items() if key not in fx_private.DERIVED_ATTRIBUTES}


def _own_container(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _own_state(value: Any) -> Any:
    """What two graph modules must not share: containers, and objects that say how they are copied (a history)."""
    if isinstance(value, nn.Module) or not hasattr(type(value), "__copy__"):
        return _own_container(value)
    return copy.copy(value)


def _own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module, containers copied and layers shared; one container under two names stays one."""
    copies: dict[int, nn.Module] = {}

    def own(child: nn.Module | None) -> nn.Module | None:
        if isinstance(child, torch.fx.GraphModule):
            if id(child) not in copies:
                copies[id(child)] = GraphModule.__copy__(child)  # type: ignore[arg-type]
            return copies[id(child)]
        if child is None or type(child) is not nn.Module:
            return child
        if id(child) not in copies:
            copies[id(child)] = container = nn.Module()
            container.__dict__.update({key: _own_container(value) for key, value in vars(child).items()})
            container.__dict__["_modules"] = {name: own(part) for name, part in child._modules.items()}
        return copies[id(child)]

    return {name: own(child) for name, child in module._modules.items()}
