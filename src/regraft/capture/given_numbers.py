"""What a forward reads of the values that it is given, as they are in the example: export has none of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from regraft.capture import torch_private
from regraft.capture.decisions import Asked
from regraft.capture.failures import line_that_runs
from regraft.capture.known_numbers import READING, KnownNumbers, Maker, plain

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Made:
    """A call that is given nothing but what is known.

    Args:
        makers: what makes each leaf of its arguments.
        spec: their structure.
        tensors: the tensors among them, by place.
        versions: how often each had been written to.
    """

    makers: list[Any]
    spec: Any
    tensors: dict[int, Tensor]
    versions: dict[int, int]


class GivenNumbers:
    """The tensors of one run under export that are computed of its inputs and flags, without any other weight.

    Their values are computed where one is read, and from those on.

    Args:
        known: the tensors whose values no input decides.
        inputs: what export runs with in place of the inputs and flags, and those. None where nothing is to be read of
            them.

    Attributes:
        follows: whether anything is given.
        asked: what was read, for which the graph holds.
    """

    def __init__(self, known: KnownNumbers, inputs: Iterable[tuple[Tensor, Tensor]] | None) -> None:
        self._known = known
        self.follows = inputs is not None
        self._makers: Any = WeakTensorKeyDictionary()  # of each what makes its value, and how often it was written to
        self.asked: list[Asked] = []
        for tensor, value in inputs or ():
            self._note(tensor, lambda value=value: value)  # type: ignore[misc]

    def read(self, function: Any, args: Any) -> Any:
        """The number that a function reads, where it reads one that is given; else None.

        Args:
            function: what is called.
            args: its positional arguments.
        """
        if not self.follows or function not in READING or (maker := self._maker(args[0])) is None:
            return None
        with torch_private.outside_of_modes():
            number = function(maker())
        if type(number) not in (bool, int):  # no other call would have the same
            return None
        self.asked.append(Asked(args[0].clone(), number, line_that_runs()))  # which may be written to later
        return number

    def listed(self, tensor: Tensor) -> list[Any] | None:
        """All numbers of a tensor, where they are given; else None.

        Args:
            tensor: the tensor.
        """
        if not self.follows or tensor.dim() == 0 or (maker := self._maker(tensor)) is None:
            return None
        if tensor.is_floating_point() or tensor.is_complex():
            return None
        with torch_private.outside_of_modes():
            numbers: list[Any] = maker().tolist()
        self.asked.append(Asked(tensor.clone(), numbers, line_that_runs()))
        return numbers

    def rows(self, mask: Tensor) -> Tensor | None:
        """The indices of what is not zero in a tensor, as many as there are in the example; None where it is not given.

        Args:
            mask: the tensor.
        """
        if not self.follows or (maker := self._maker(mask)) is None or mask.dim() == 0:
            return None
        with torch_private.outside_of_modes():
            count = int(maker().count_nonzero())
        self.asked.append(Asked(mask.count_nonzero(), count, line_that_runs()))
        return torch.nonzero_static(mask, size=count)

    def total(self, tensor: Tensor) -> int | None:
        """The sum of a tensor's whole numbers in the example; None where they are not given.

        Args:
            tensor: the tensor.
        """
        if not self.follows or tensor.is_floating_point() or (maker := self._maker(tensor)) is None:
            return None
        with torch_private.outside_of_modes():
            total = int(maker().sum())
        self.asked.append(Asked(tensor.sum(), total, line_that_runs()))
        return total

    def gives(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are given.

        Args:
            tensor: the tensor.
        """
        return self._maker(tensor) is not None

    def before(self, args: Any, kwargs: Any) -> Made | None:
        """What a call is given, where all of it is known; else None.

        To be asked before the call, which may write to it.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        if not self.follows:
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        makers = [self._maker(leaf) if isinstance(leaf, Tensor) else _as_in_the_example(leaf) for leaf in leaves]
        if None in makers:
            return None
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        return Made(makers, spec, tensors, {place: tensor._version for place, tensor in tensors.items()})

    def follow(self, function: Any, made: Made | None, result: Any) -> None:
        """Note what a call has made of given numbers, and what it has written to them.

        Args:
            function: what was called.
            made: what `before` said of the call.
            result: what came of it.
        """
        if made is None:
            return
        written = [place for place, tensor in made.tensors.items() if tensor._version != made.versions[place]]

        @cache
        def values() -> list[Any]:
            leaves = [maker() for maker in made.makers]
            for place in written:
                leaves[place] = leaves[place].clone()
            args, kwargs = pytree.tree_unflatten(leaves, made.spec)
            results = pytree.tree_leaves(function(*args, **kwargs))
            return [*results, *(leaves[place] for place in written)]

        results = [*pytree.tree_leaves(result), *(made.tensors[place] for place in written)]
        for index, leaf in enumerate(results):
            if isinstance(leaf, Tensor):
                self._note(leaf, lambda index=index: values()[index])  # type: ignore[misc]

    def _note(self, tensor: Tensor, maker: Maker) -> None:
        if not tensor.is_inference():  # of which nobody counts what is written to it
            self._makers[tensor] = maker, tensor._version

    def _maker(self, tensor: Tensor) -> Maker | None:
        maker, version = self._makers.get(tensor, (None, 0))
        return maker if maker is not None and tensor._version == version else self._known.maker(tensor)


def _as_in_the_example(argument: Any) -> Maker | None:
    if not isinstance(argument, _SYMBOLIC):
        return plain(argument)
    size = torch_private.size_in_the_example(argument)
    return None if size is None else lambda: size
