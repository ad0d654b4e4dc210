"""The class of a drop-in: the model's own class, with a forward that asks for a graph first."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from regraft.core.clone import set_modes
from regraft.dropin.grafts import NOTHING, Grafts

KEY = "_regraft"
"""The attribute of a drop-in that has its graphs."""

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def make_dropin(model: nn.Module, grafts: Grafts) -> nn.Module:
    """Give a model graphs to run, in place; it is then of a class that derives from its own.

    Args:
        model: A model of which the caller has no other use: what `share` returned.
        grafts: The graphs.
    """
    own = model.__dict__.pop("forward", None)  # a forward that hangs on the instance would go before the class's
    model.__dict__[KEY] = grafts
    if own is not None:
        model.__dict__["_regraft_forward"] = own
    model.__class__ = dropin_class(type(model))
    grafts.watch(model)
    return model


def grafts_of(model: nn.Module) -> Grafts | None:
    """The graphs of a drop-in; None for any other model.

    Args:
        model: Any module.
    """
    found = model.__dict__.get(KEY)
    return found if isinstance(found, Grafts) else None


def without_grafts(model: nn.Module) -> nn.Module:
    """A drop-in becomes, in place, what it would be without its graphs.

    Args:
        model: A drop-in, or any other module, which stays as it is.
    """
    if model.__dict__.pop(KEY, None) is not None:
        own = model.__dict__.pop("_regraft_forward", None)
        model.__class__ = type(model).__mro__[1]
        if own is not None:
            model.__dict__["forward"] = own
    return model


def dropin_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of drop-ins for the models of a class; it goes by that one's name.

    Args:
        base: The class of the model.
    """
    if KEY in base.__dict__:
        return base
    if base not in _CLASSES:
        _CLASSES[base] = _make_class(base)
    return _CLASSES[base]


def _make_class(base: type[nn.Module]) -> type[nn.Module]:
    def original(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__.get("_regraft_forward")
        return base.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._regraft.run(self, args, kwargs)
        return original(self, *args, **kwargs) if result is NOTHING else result

    # compilers keep what they made of a function by its code, and only so many of it: not one for all models there are
    forward.__code__ = forward.__code__.replace()

    inherited_load = base.load_state_dict

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inherited_load(self, *args, **kwargs)
        self._regraft.check(self)  # now, because a compiler that traces the next call cannot look
        return result

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._regraft.converting(self):
            return base._apply(self, *args, **kwargs)

    def setstate(self: Any, saved: tuple[Any, list[bool]]) -> None:
        state, modes = saved
        base.__setstate__(self, state)
        set_modes(self, modes)
        self._regraft.watch(self)  # from its first moment on

    def reduce(self: Any, protocol: Any) -> Any:
        del protocol
        # a module that says itself what its state is may leave its mode out, and comes back training
        return _blank, (base,), (self.__getstate__(), [module.training for module in self.modules()])

    namespace = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        KEY: None,
        "forward": functools.wraps(base.forward)(forward),
        "load_state_dict": functools.wraps(inherited_load)(load_state_dict),
        "_apply": apply,
        "__reduce_ex__": reduce,
        "__setstate__": setstate,
    }
    make_class: Any = type(base)  # whatever metaclass the model's class has
    cls: type[nn.Module] = make_class(base.__name__, (base,), namespace)
    return cls


def _blank(base: type[nn.Module]) -> nn.Module:
    cls = dropin_class(base)
    return cls.__new__(cls)
