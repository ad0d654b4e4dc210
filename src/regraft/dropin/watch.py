"""Whether a model is still what its graphs were captured from. Asked at each call, so it runs at the speed of C."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain, starmap
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from regraft.capture.own_state import Attribute
from regraft.capture.torch_private import dict_version, hooks_of_all, made_by_hooks, storage_of
from regraft.capture.transformers_adapter import is_collector
from regraft.core.freed import Memory
from regraft.core.stepped import Steps

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # where gradients are recorded no graph runs
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, Tensor)
_version = attrgetter("_version")
_dtype = attrgetter("dtype")
_trainable = attrgetter("requires_grad")


#: what saving, a pipeline or a loss writes into the config of a transformers model, and no forward computes with
_BOOKKEEPING = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_commit_hash"),
    *("task_specific_params", "id2label", "label2id", "problem_type"),
)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    settings = dict(config)
    for name in _BOOKKEEPING:
        settings.pop(name, None)
    return settings


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The numbers, names and tensors that hang on a module, with which its forward may compute."""
    known = _OF_EVERY_MODULE | made_by_hooks(module) if module._forward_pre_hooks else _OF_EVERY_MODULE
    return {name: value for name, value in vars(module).items() if name not in known and _is_plain(value)}


def _foreign(hooks: dict[int, Any]) -> int:
    """How many hooks there are, but for those of transformers that do nothing while nobody collects."""
    return len(hooks) - sum(map(is_collector, hooks.values())) if hooks else 0


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, _PLAIN)


def _has(module: nn.Module, names: set[str], seen: dict[str, Any]) -> bool:
    """Whether a module has the attributes that it had, and no new one in the place of its class's."""
    having = vars(module)
    return all(name in having and _equal(having[name], old) for name, old in seen.items()) and not any(
        hasattr(type(module), name) for name in having.keys() - names
    )


def _equal(new: Any, old: Any) -> bool:
    if type(new) is tuple and type(old) is tuple:
        return len(new) == len(old) and all(map(_equal, new, old))
    return new is old or (type(new) is type(old) and not isinstance(old, Tensor) and bool(new == old))


def _is_shared(tensor: Tensor, pointer: int, storage: Any) -> bool:
    """Whether a tensor is where it was, or its storage as a whole was moved to memory that processes share."""
    return tensor.data_ptr() == pointer or (bool(storage_of(tensor) == storage) and tensor.is_shared())


def expect_counted(model: nn.Module) -> None:
    """Refuse weights of which nobody could tell whether they were written to.

    Args:
        model: The model.

    Raises:
        ValueError: A weight was made in inference mode.
    """
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if not is_lazy(weight) and weight.is_inference():
            raise ValueError(
                f"{name} was made in inference mode, where torch does not count what is written to it: make the model "
                "outside of it, or a copy, regraft.optimize(copy.deepcopy(model), args); or promise that nothing is "
                "written to it, regraft.optimize(model, args, frozen=True)"
            )


class Watch:
    """Remembers the modules, weights, attributes, hooks and settings of a model.

    Args:
        model: The model.
        ignored: Attributes that may have any value.
        written: Tensors that may hold any values.
        movable: Whether weights may move to memory that processes share, as they do when they are sent to another.
    """

    def __init__(
        self,
        model: nn.Module,
        ignored: Iterable[Attribute] = (),
        written: Iterable[Tensor] = (),
        movable: bool = False,
    ) -> None:
        self._movable = movable
        self._optimizers = Steps.counted()
        modules = list(model.modules())
        tables: list[Any] = [table for m in modules for table in (m._parameters, m._buffers, m._modules) if table]
        contents = chain.from_iterable(map(dict.values, tables))
        attributes = {id(m): _attributes(m) for m in modules}
        names = {id(m): set(vars(m)) for m in modules}
        for path, name in ignored:
            attributes[id(model.get_submodule(path))].pop(name, None)
            names[id(model.get_submodule(path))].add(name)
        contents = chain(contents, chain.from_iterable(map(dict.values, attributes.values())))
        tensors = list({id(value): value for value in contents if isinstance(value, Tensor)}.values())
        free = set(map(id, written))
        read = [t for t in tensors if not t.is_inference() and id(t) not in free]
        plain = [t for t in read if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
        lying = Memory(plain)
        hooks = [*hooks_of_all(), *(getattr(m, name) for m in modules if m is not model for name in _HOOKS)]
        # what was seen is in the key, so that two memories of one thing in two states are two
        memory: dict[str, dict[Any, Any]] = {
            "states": {id(m): vars(m) for m in modules},
            "tables": {(id(table), *map(id, table.values())): (table, list(table.values())) for table in tables},
            "attributes": {id(m): (m, names[id(m)], attributes[id(m)]) for m in modules},
            "hooks": {(id(each), _foreign(each)): each for each in hooks if isinstance(each, dict)},
            "parameters": {(id(t), self._optimizers.of(t)): t for t in tensors if isinstance(t, nn.Parameter)},
            "dtypes": {(id(t), t.dtype): t for t in tensors},
            "versions": {(id(t), t._version): t for t in read},
            "freed": {id(lying): lying},
            "pointers": {(id(t), t.data_ptr(), storage_of(t)): t for t in plain},
        }
        config = getattr(model, "config", None)
        self._config: dict[str, Any] = vars(config) if hasattr(config, "__dict__") else {}
        settings = _settings(self._config)
        self._settings = copy.deepcopy(settings)
        self._nested = not all(map(_is_plain, settings.values()))  # what is in a list, no version tells
        self._config_version: Any = None  # it has not been looked at
        self.remember(memory)

    def and_also(self, others: Iterable[Watch]) -> Watch:
        """A watch that asks what this one and others ask, and once what they have in common.

        Args:
            others: Watches of other models, whose config and attributes are not asked for.
        """
        memories = [self.memory, *(other.memory for other in others)]
        both = copy.copy(self)
        joined = {what: dict(chain.from_iterable(m[what].items() for m in memories)) for what in self.memory}
        both.remember({**joined, "attributes": self.memory["attributes"]})
        return both

    def remember(self, memory: dict[str, dict[Any, Any]]) -> None:
        """Compare with this from now on.

        Args:
            memory: What was seen, by its kind.
        """
        self.memory = memory
        self._states = list(memory["states"].values())
        self._parameters = list(memory["parameters"].values())
        self._steps, self._steps_taken = [steps for _, steps in memory["parameters"]], -1
        self._tables = [table for table, _ in memory["tables"].values()]
        self._contents = [value for _, values in memory["tables"].values() for value in values]
        self._dicts = [*self._states, *self._tables]
        self._dict_versions: list[Any] = [None] * len(self._dicts)  # none of them has been looked at
        self._trains = False
        self._hooks = list(memory["hooks"].values())
        self._foreign_counts = [count for _, count in memory["hooks"]]
        self._registered = -1
        self._removable: list[dict[int, Any]] = []
        self._removable_counts: list[int] = []
        self._tensors, self._dtypes = list(memory["dtypes"].values()), [dtype for _, dtype in memory["dtypes"]]
        self._read, self._versions = list(memory["versions"].values()), [version for _, version in memory["versions"]]
        self._plain, self._lying = list(memory["pointers"].values()), list(memory["freed"].values())
        self._pointers, self._storages = ([key[i] for key in memory["pointers"]] for i in (1, 2))

    @property
    def trainable(self) -> bool:
        """Whether a parameter of the model wants a gradient."""
        return any(map(_trainable, self._parameters))

    @property
    def training(self) -> bool:
        """Whether a module of the model is in training mode; one that `torch.compile` made has no mode of its own."""
        return any(state.get("training") for state in self._states)

    def change(self) -> str | None:
        """What has changed since, as the end of a sentence; None where nothing has."""
        self._dicts.copy()  # which fetches them side by side: the network has driven all of them out of the cache
        versions = list(map(dict_version, self._dicts))
        if versions != self._dict_versions:
            reason = self._written(versions)
            if reason is not None:
                return reason
            self._dict_versions = versions  # as they were before anybody looked
        if any(lying.freed for lying in self._lying):  # and others may lie there now
            return "weights of it were given other memory"
        pointers = list(map(Tensor.data_ptr, self._plain))  # first: what it fetches the others need
        if pointers != self._pointers:
            if not all(map(_is_shared, self._plain, self._pointers, self._storages)):
                return "weights of it were given other memory"
            if not self._movable:
                return "weights of it were moved to memory of several processes, as frozen=True allows,"
            self._pointers = pointers
        if list(map(_version, self._read)) != self._versions or self._were_stepped():
            return "weights of it were written to"
        if not all(map(is_, map(_dtype, self._tensors), self._dtypes)):
            return "weights of it were given another type"
        return None

    def _were_stepped(self) -> bool:
        """Whether an optimizer has written a weight, of which its version need not tell."""
        taken = self._optimizers.taken
        if taken == self._steps_taken:
            return False
        if list(map(self._optimizers.of, self._parameters)) != self._steps:
            return True
        self._steps_taken = taken
        return False

    def _written(self, versions: list[Any]) -> str | None:
        """What has changed in modules of which something was set or removed."""
        if not all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._contents)):
            return "a module or a weight of it was replaced"
        written = {id(d) for d, new, old in zip(self._dicts, versions, self._dict_versions) if new != old}
        attributes = (each for each in self.memory["attributes"].values() if id(vars(each[0])) in written)
        if not all(starmap(_has, attributes)):
            return "an attribute of it was set"
        self._trains = self.training
        return None

    @property
    def untouched(self) -> bool:
        """Whether nothing has changed, no module is in training mode, and none has another number of hooks."""
        return not self.hooked and self.change() is None and not self._trains

    @property
    def configured(self) -> bool:
        """Whether the config of the model, where it has one, says something else now."""
        version = dict_version(self._config)
        if version == self._config_version and not self._nested:
            return False
        self._config_version = version if _settings(self._config) == self._settings else None
        return self._config_version is None

    @property
    def hooked(self) -> bool:
        """Whether a module inside has been given a hook, or lost one."""
        registered = RemovableHandle.next_id  # by which torch numbers the hooks of the whole process
        if registered == self._registered and list(map(len, self._removable)) == self._removable_counts:
            return False
        if list(map(_foreign, self._hooks)) != self._foreign_counts:
            return True
        self._registered, self._removable = registered, [each for each in self._hooks if each]
        self._removable_counts = list(map(len, self._removable))
        return False
