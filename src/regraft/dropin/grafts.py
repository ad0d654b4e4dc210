"""What a drop-in knows of its graphs, and the choice between them and the original's own forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regraft.capture import caches, filling
from regraft.capture.cache_names import returned_in
from regraft.capture.transformers_adapter import collects
from regraft.core.errors import NotCovered
from regraft.core.mutation import weights_written
from regraft.core.ordinary import functions_are_seen
from regraft.dropin.entries import Entry
from regraft.dropin.reading import Reader
from regraft.dropin.watch import Watch

logger = logging.getLogger("regraft")
_form = attrgetter("dtype", "device")

Again = Callable[[nn.Module], Iterable[Entry]]
_ONE_AT_A_TIME = threading.RLock()

NOTHING = object()
"""What `Grafts.run` returns where no graph covers the call; None is a result that a model may have."""


class Grafts:
    """The graphs of one model.

    Args:
        reader: Reads calls of the model.
        entries: The graphs, the likeliest first.
        again: Makes graphs of the model as it is once its weights have been converted; None where nothing can.
        frozen: Whether somebody has promised that the model stays as it is, so that no call has to look.

    Attributes:
        calls: How many calls each graph has run, by its name.
        stale: Why no graph holds any more, or None.
    """

    def __init__(
        self, reader: Reader, entries: Sequence[Entry], again: Again | None = None, frozen: bool = False
    ) -> None:
        self.reader = reader
        self.entries = list(entries)
        self.calls = {entry.name: 0 for entry in entries}
        self.stale: str | None = None
        self._again = again
        self._frozen = frozen
        self._default = torch.get_default_dtype()  # which a graph has wherever the model names no type
        self._waiting = False  # to be captured again, at the next call
        self._watch: Watch | None = None
        self._all: tuple[set[Watch], Watch] | None = None
        self._said: set[str] = set()

    def run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph that covers a call.

        Args:
            model: The drop-in.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result, or `NOTHING` where the original's own forward has to run.
        """
        if torch.compiler.is_compiling():
            return self._run_traced(model, args, kwargs)
        call, cache = self._read(args, kwargs)
        unchanged = self.stale is None and self._is_unchanged(model)
        reason = self._obstacle(model, call, unchanged)
        if reason is not None:
            return self._leave(reason)
        refused: NotCovered | None = None
        for entry in self.entries:
            if not entry.matches(call) or (cache is not None and not entry.fills):
                continue
            try:
                result = entry.leave(model, call, entry.run(call, unchanged))
            except NotCovered as error:
                refused = error
                continue
            except Exception as error:  # the original decides whether the call is wrong, and says so in its own words
                return self._leave(f"{_first_line(error)}", key=f"{entry.name}: {type(error).__name__}", call=call)
            if cache is not None and returned_in(result) is None:  # the original may fill it all the same
                entry.fills = False  # later calls need not try
                return self._leave(
                    "a graph of it returns no cache, with which to fill the one that was given", key="cache"
                )
            self.calls[entry.name] += 1
            if refused is not None:  # what is called next is likely to be of this entry's sizes too
                self.entries = [entry, *(other for other in self.entries if other is not entry)]
            return result if cache is None else filling.fill(cache, result)
        if refused is not None:
            return self._leave(f"{_first_line(refused)}", key="sizes", call=call)
        return self._leave("no graph that pays was captured for it", call=call)

    def check(self, model: nn.Module) -> str | None:
        """Look whether the model is still what was captured; where it is not, its graphs are never used again.

        Args:
            model: The drop-in.

        Returns:
            What was changed, or None.
        """
        if self.stale is None:
            self.stale = self.watch(model).change()
        return self.stale

    @contextmanager
    def converting(self, model: nn.Module) -> Iterator[None]:
        """While the weights may be converted or moved: if they were, graphs are captured again at the next call.

        A graph is not converted itself: it says which type and device some of its values have.

        Args:
            model: The drop-in.
        """
        known = self.check(model) is None or self._waiting
        before = list(map(_form, _tensors(model)))
        yield
        after = list(map(_form, _tensors(model)))
        self.check(model)
        changed = next((new for old, new in zip(before, after) if old != new), None)
        if changed is None:
            return
        self.stale = f"its weights became {changed[0]} on {changed[1]}".replace("torch.", "")
        if known and self._again is not None and not self._waiting:
            self._waiting = True
            logger.warning("%s: the next call captures and verifies its graphs again, which takes a while", self.stale)

    def _capture_again(self, model: nn.Module) -> None:
        with _ONE_AT_A_TIME:
            if not self._waiting or self._again is None:
                return
            self._waiting = False
            try:
                entries = list(self._again(model))
            except Exception as error:  # whatever a model raises that cannot run in its new form
                self.stale = f"{self.stale} and cannot be captured so ({_first_line(error)})"
                return
            if not entries:
                self.stale = f"{self.stale} and no graph of it is faster or right so"
                return
            self.calls = {entry.name: self.calls.get(entry.name, 0) for entry in entries}
            self.entries = entries
            self._watch = None
            self.watch(model)
            self.stale = None

    def watch(self, model: nn.Module) -> Watch:
        """The memory of what was captured, made where there is none.

        Args:
            model: The drop-in.
        """
        if self._watch is None:
            ignored = (
                frozenset.intersection(*(entry.ignores for entry in self.entries)) if self.entries else frozenset()
            )
            self._watch = Watch(model, ignored, self._written(), movable=self._frozen)
        return self._watch

    def _written(self) -> list[Tensor]:
        """The buffers that every graph writes to, and so has in it as tensors and not as the values that they had.

        A parameter may be a layer's as well, which has packed it, and is taken for written where that is not certain.
        """
        first, *others = [weights_written(entry.gm) for entry in self.entries] or [[]]
        buffers = (tensor for tensor in first if not isinstance(tensor, nn.Parameter))
        return [buffer for buffer in buffers if all(any(buffer is each for each in other) for other in others)]

    def renew(self, model: nn.Module) -> None:
        """Take the graphs as they are now for right: after regraft itself has changed them.

        Args:
            model: The drop-in.
        """
        if self.check(model) is None:
            self._watch = None
            self.watch(model)

    def __getstate__(self) -> dict[str, Any]:
        # a copy makes its own memory, of its own modules
        if self._watch is not None and self.stale is None:
            self.stale = self._watch.change()
        return {**self.__dict__, "_watch": None, "_all": None, "_said": set(), "calls": dict.fromkeys(self.calls, 0)}

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The call, its cache taken apart, and that cache."""
        call, cache, state = self.reader.without_empty_cache(self.reader.read(args, kwargs))
        if state is not None:
            call[str(self.reader.cache_name)] = state
        return call, cache

    def _is_unchanged(self, model: nn.Module) -> bool:
        return not model.training if self._frozen else self._everything(model).untouched

    def _everything(self, model: nn.Module) -> Watch:
        """The memory of the model and of what its engines have taken over, most of which is the same."""
        engines = [entry.engine for entry in self.entries if entry.engine is not None]
        watches = {self.watch(model), *(engine.watch for engine in engines)}
        if self._all is None or watches != self._all[0]:
            self._all = watches, self.watch(model).and_also(watches)
        return self._all[1]

    def _obstacle(self, model: nn.Module, call: Mapping[str, Any], unchanged: bool) -> str | None:
        """Why no graph may be used, whatever was captured."""
        if torch.jit.is_tracing():  # which knows the weights of the module that it was given alone
            return "torch.jit.trace traces it; to trace the graph, give it result.graph_module"
        if functions_are_seen():
            return "a TorchFunctionMode is active, which is to see the functions that the original calls"
        if collects():
            return "the results of layers inside are collected, as output_hidden_states asks, and a graph has none"
        if torch.get_default_dtype() is not self._default:
            return f"torch's default type is not {self._default}, as it was when it was optimized"
        watch = self.watch(model)
        if not unchanged and self.check(model) is not None and not self._waiting:
            return f"{self.stale} after it was optimized; optimize it again"
        if watch.configured:
            return "its config is not what it was when it was optimized"
        if not unchanged and watch.training:
            return "it is in training mode; call .eval() for inference"
        if not unchanged and watch.hooked:
            return "a module inside of it was given a hook, which a graph would not call"
        if torch.is_grad_enabled() and (watch.trainable or _wants_gradient(call)):
            return "gradients are recorded; call it under torch.inference_mode() or torch.no_grad()"
        if self._waiting and any(tensor.is_meta for tensor in _tensors(model)):
            return "its weights are on the meta device, where nothing can be verified"
        if self._waiting:
            self._capture_again(model)
        return None if self.stale is None else f"{self.stale} after it was optimized; optimize it again"

    def _leave(self, reason: str, key: str | None = None, call: Mapping[str, Any] | None = None) -> Any:
        described = f" for ({_described(call)})" if call is not None else ""
        once = (key or reason) + described
        if once not in self._said:
            self._said.add(once)
            logger.warning("the original's own forward runs%s: %s", described, reason)
        return NOTHING

    def _run_traced(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Traced once and guarded by whoever traces it, so nothing here has to be fast, and all of it plain.
        another = torch.get_default_dtype() is not self._default
        if self.stale is not None or model.training or another or collects(traced=True):
            return NOTHING
        call, cache = self._read(args, kwargs)
        recorded = torch.is_grad_enabled() and not torch.compiler.is_exporting()
        if recorded and (any(p.requires_grad for p in model.parameters()) or _wants_gradient(call)):
            return NOTHING
        for entry in self.entries:
            if entry.matches(call) and entry.holds(call):
                result = entry.leave(model, call, entry.gm.forward(**call))
                if cache is not None and returned_in(result) is None:
                    return NOTHING
                return result if cache is None else filling.fill(cache, result)
        return NOTHING


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _wants_gradient(call: Mapping[str, Any]) -> bool:
    return any(
        isinstance(leaf, Tensor) and leaf.requires_grad
        for value in call.values()
        for leaf in ([value] if isinstance(value, Tensor) else pytree.tree_leaves(value))
    )


def _described(call: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_kind(value)}" for name, value in call.items())


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of {value.dim()} axes on {value.device}"
    if isinstance(value, caches.State):
        return "a cache"
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
