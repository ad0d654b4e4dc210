"""What export is not told of a model as it runs, and what it need not find out."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regraft.capture import torch_private
from regraft.capture.fixed_rows import with_fixed_rows
from regraft.capture.given_numbers import GivenNumbers
from regraft.capture.known_numbers import KnownNumbers
from regraft.capture.random_numbers import expect_no_generator

_LONGEST = 200
"""Characters of a size written out, with which export is still quick. Those of convolutional networks stay below 60.
Those of attention in windows (Swin, MaxViT) pass 250, and about Swin's export reasons for minutes."""
_NESTED = 2
"""Divisions by what has been divided, in one size, about which export reasons for minutes as well. They are in windows
whose number is divided by (SCUNet); pooling to a share of an image (PSPNet) has one for each axis."""
_LONG = 40
"""Characters of a size with which to look up what a call gives takes longer than to make it again."""


class TooInvolved(Exception):
    """The sizes hang together in so involved a way that export cannot make out how, or would take minutes to."""


class AsItRuns(TorchFunctionMode):
    """What export is not told: facts about functions that its own tensors, which have no memory, do not show.

    Keys and values of attention are of one length: torch does not ask, and reads beyond the shorter of them. A cache
    whose keys and values are inputs of their own would otherwise have two lengths in the graph.

    Dropout of an eval model returns its input, strides and all. Export takes the result for contiguous, and leaves out
    a `contiguous` behind it.

    The numbers of `torch.arange(1, 4).tolist()` are no values of the inputs, nor are those that a layer keeps as
    buffers. Norms over all axes but the first, and paddings of convolutions, are written so.

    Where the inputs' values are given, what the model reads of them is what it reads in this call. Nobody need read
    those of the numbers that `torch.tensor` is given as tensors.

    A deep copy of a tensor copies its memory, where export has none. A generator that is given is in no graph.

    The `.data` of a tensor is its memory, as what `detach()` returns is, and to export a tensor that nobody made. A
    tensor whose `.data` is assigned is for export what it was before, which nothing would tell. A packed sequence has
    as many rows as its lengths say.

    Args:
        quick: whether to give up where sizes are too involved.
        known: the numbers that are known.
        given: those that are given.
    """

    def __init__(self, quick: bool, known: KnownNumbers, given: GivenNumbers) -> None:
        super().__init__()
        self.quick = quick
        self.known = known
        self.given = given

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _ATTENTION:
            key, value = _keys_and_values(*args, **kwargs)
            torch._check(key.shape[-2] == value.shape[-2], lambda: "attention to keys and values of two lengths")
        if function in _DROPOUTS:
            value, training = _dropped(*args, **kwargs)
            if training is False:
                return torch.ops.aten.alias.default(value)
        if function == _GET_DATA:  # which is made anew each time it is asked for
            function = torch.Tensor.detach
        if function == _SET_DATA:
            raise NotImplementedError("what is assigned to the .data of a tensor does not reach its readers in a graph")
        expect_no_generator(kwargs.get("generator"))
        if function is torch.Tensor.__deepcopy__:  # which copies the memory, and in export there is none
            function, args = torch.clone, args[:1]
        if function is torch_private.pack_padded_sequence:
            raise NotImplementedError("a packed sequence has as many rows as the values of its lengths say")
        if function in _COMPARING:
            with self:
                return _COMPARING[function](*args, **kwargs)
        if (number := self._read(function, args)) is not None:
            return number
        if function in _TAKING_SIZES:
            args = (*args[:1], *map(self._instead, args[1:]))
            kwargs = {name: value if name == "input" else self._instead(value) for name, value in kwargs.items()}
        elif function in _MADE_OF_SIZES:
            args = tuple(map(self._instead, args))
        elif function in _TAKING_INDICES:
            args = (args[0], self._in_index(args[1]), *args[2:])
        elif function in _FILLED and args and self.given.follows and not self.given.gives(args[0]):
            value = kwargs.get("fill_value", args[1] if len(args) > 1 else _FILLED[function])
            return self._filled(function(*args, **kwargs), value)
        made = self.given.before(args, kwargs)
        result = with_fixed_rows(function, args, kwargs, self.given)
        if result is None and function is torch.tensor:
            result = _stacked(*args, **kwargs)
        result = function(*args, **kwargs) if result is None else result
        self.known.follow(function, args, kwargs, result)
        self.given.follow(function, made, result)
        if self.quick and isinstance(result, torch.Tensor):
            _expect_simple_sizes(result)
        return result

    def _read(self, function: Any, args: Any) -> Any:
        known = self.known.read(function, args)
        return self.given.read(function, args) if known is None else known

    def _instead(self, value: Any) -> Any:
        """The number in place of a tensor that has a known one, in tuples and lists, too."""
        if isinstance(value, (tuple, list)):
            return [self._instead(one) for one in value]
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        number = self._read(torch.Tensor.item, (value,)) if is_number else None
        return value if number is None else number

    def _filled(self, alike: torch.Tensor, value: Any) -> torch.Tensor:
        """What `torch.zeros_like` has made, computed of the sizes of a tensor alone: none of its values is in it."""
        if type(value) not in (bool, int, float) or alike.requires_grad or not alike.is_contiguous():
            return alike
        with self:
            return torch.full(alike.shape, value, dtype=alike.dtype, device=alike.device)

    def _in_index(self, index: Any) -> Any:
        """The same within the slices of an index, and in its lists of numbers; a tensor there is an index by itself."""
        if isinstance(index, slice):
            return slice(*map(self._instead, (index.start, index.stop, index.step)))
        return tuple(map(self._in_part, index)) if isinstance(index, tuple) else index

    def _in_part(self, part: Any) -> Any:
        if not isinstance(part, (list, tuple)):
            return self._in_index(part)
        with self:
            stacked = _stacked(part)
        return part if stacked is None else stacked


@contextmanager
def attention_asked(model: nn.Module) -> Iterator[None]:
    """While attention is causal `if length > 1`, say: torch takes a bool there, and no comparison of sizes that vary.

    No mode sees the call, which is wrong before. So the function is another meanwhile, wherever the classes of the
    model's layers have it from.

    Args:
        model: the model.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    namespaces = [vars(sys.modules[name]) for name in {cls.__module__ for cls in classes} if name in sys.modules]
    places = [(space, name) for space in (vars(F), *namespaces) for name, value in space.items() if value is _ATTENTION]
    for space, name in places:
        space[name] = _attention_of_bools
    try:
        yield
    finally:
        for space, name in places:
            space[name] = _ATTENTION


@contextmanager
def lists_asked(given: GivenNumbers, stand_in: Any) -> Iterator[None]:
    """While `tolist` asks for all numbers at once, which takes them apart one by one in export.

    No mode sees the call.

    Args:
        given: the numbers that are given.
        stand_in: the class of what export runs with in place of tensors.
    """
    one_by_one = stand_in.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        numbers = given.listed(tensor)
        return one_by_one(tensor) if numbers is None else numbers

    stand_in.tolist = tolist
    try:
        yield
    finally:
        stand_in.tolist = one_by_one


@contextmanager
def extremes_asked() -> Iterator[None]:
    """While `max(lengths)` and `min(lengths)` may be asked of a tensor, for which what export has there fails."""
    were = {name: vars(builtins)[name] for name in _EXTREMES}
    vars(builtins).update({name: partial(_extreme, were[name], of_all) for name, of_all in _EXTREMES.items()})
    try:
        yield
    finally:
        vars(builtins).update(were)


def _extreme(function: Any, of_all: Any, *args: Any, **options: Any) -> Any:
    only = args[0] if len(args) == 1 and not options else None
    whole = isinstance(only, torch.Tensor) and only.dim() == 1 and not only.is_floating_point()
    return of_all(only) if whole else function(*args, **options)


def _attention_of_bools(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _ATTENTION(*map(_bool, args), **{name: _bool(value) for name, value in kwargs.items()})


def _bool(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value


def _expect_simple_sizes(value: torch.Tensor) -> None:
    """Give up at a size that is too involved; from one on that is fairly so, do without what is slow for such."""
    for size in value.shape:
        text = "" if type(size) is int else str(size)
        if len(text) > _LONGEST or (text.count("//") > _NESTED and _nested(text) >= _NESTED):
            raise TooInvolved(f"a size is {text[:60]}... of those of the inputs")
        if len(text) > _LONG:
            torch_private.remember_no_calls(value)


def _nested(text: str) -> int:
    """How many divisions of a size, as torch writes it, are by what has been divided itself."""
    count, ends = 0, [index + 2 for index in range(len(text)) if text.startswith("//(", index)]
    for end in ends:
        begin, depth = end, 1
        while depth:
            end += 1
            depth += {"(": 1, ")": -1}.get(text[end], 0)
        count += "//" in text[begin:end]
    return count


_EXTREMES = {"max": torch.amax, "min": torch.amin}
_ATTENTION = F.scaled_dot_product_attention
_METHODS = ["permute", "view", "reshape", "expand", "repeat", "narrow", "split", "new_zeros", "new_ones", "new_empty"]
_TAKING_SIZES: frozenset[Any] = frozenset(
    [F.pad, torch.permute, torch.reshape, torch.narrow, *(getattr(torch.Tensor, name) for name in _METHODS)]
)
_TAKING_INDICES: frozenset[Any] = frozenset([torch.Tensor.__getitem__, torch.Tensor.__setitem__])
_FILLED = {torch.zeros_like: 0, torch.ones_like: 1, torch.full_like: None}
_MADE_OF_SIZES: frozenset[Any] = frozenset(
    [torch.arange, torch.linspace, torch.zeros, torch.ones, torch.empty, torch.eye]
)


def _stacked(data: Any, **options: Any) -> torch.Tensor | None:
    """What `torch.tensor` makes of numbers that are tensors, some or all, of which it would read the values."""
    if not isinstance(data, (list, tuple)) or not any(isinstance(one, torch.Tensor) for one in data):
        return None
    if any(one.dim() if isinstance(one, torch.Tensor) else type(one) not in (bool, int, float) for one in data):
        return None
    with torch_private.outside_of_modes():  # it is of the type that torch finds
        numbers = [torch.zeros((), dtype=one.dtype) if isinstance(one, torch.Tensor) else one for one in data]
        like = torch.tensor(numbers, **options)
    return torch.stack([torch.as_tensor(one, dtype=like.dtype, device=like.device).detach() for one in data])


def _contains(tensor: Any, element: Any) -> bool:
    return bool((tensor == element).any())


def _equal(left: Any, right: Any) -> bool:
    return left.shape == right.shape and bool((left == right).all())


def _allclose(*args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


#: what reads a number of what it computes itself, written so that the reading is seen
_COMPARING: dict[Any, Any] = {
    **dict.fromkeys([torch.equal, torch.Tensor.equal], _equal),
    **dict.fromkeys([torch.allclose, torch.Tensor.allclose], _allclose),
    torch.Tensor.__contains__: _contains,
}
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DROPOUTS: frozenset[Any] = frozenset(
    [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout]
    + [torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout]
)


def _dropped(input: Any, p: Any = 0.5, training: Any = True, *_: Any, train: Any = True, **__: Any) -> tuple[Any, bool]:  # noqa: A002
    del p
    return input, training and train


def _keys_and_values(_: Any = None, key: Any = None, value: Any = None, *__: Any, **___: Any) -> tuple[Any, Any]:
    return key, value
