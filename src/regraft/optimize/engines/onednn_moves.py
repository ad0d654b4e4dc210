"""Rows that several copies move, moved by one: Swin rolls an image, and cuts it into windows.

torch rolls along one axis after the other, by joining two parts, on one core. And where windows are put together to an
image, and that is cut into others, as in MaxViT, or an image into pixels of one place each, as in MobileViT, each
reshape is a copy. Tokens of which a `contiguous` makes an image lie as a convolution has it: they are not moved at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from regraft.optimize.engines.onednn_fusions import begins_kernel, called

_COPYING = {"reshape", "flatten", "contiguous", "clone"}
_LAYING = {"view", "unflatten", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", *_COPYING}
_NARROW = 16
"""Rows of fewer elements may take longer one by one than they do in a roll."""
_LARGEST = 1 << 25
"""Of more elements it is not asked which goes where, which takes 16 bytes for each."""


def chains(gm: GraphModule) -> dict[Node, list[Node]]:
    """Calls in a row that lay the elements of a value otherwise, and may copy them: by their last one.

    Args:
        gm: The graph.
    """
    found: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if called(node, gm) in {"roll", *_LAYING} and node.args and isinstance(node.args[0], Node):
            before = found.pop(node.args[0], []) if len(node.args[0].users) == 1 else []
            found[node] = [*before, node]
    return {last: chain for last, chain in found.items() if _rolls(chain, gm) or _copies(chain, gm)}


def _rolls(chain: Sequence[Node], gm: GraphModule) -> bool:
    return any(called(node, gm) == "roll" for node in chain)


def _copies(chain: Sequence[Node], gm: GraphModule) -> int:
    return sum(called(node, gm) in _COPYING for node in chain)


@dataclass(frozen=True)
class Move:
    """Which row of what such calls are given goes where.

    Args:
        chain: The calls.
        given: The axes of what is moved, from the one with the longest step; the elements of a row are along the last.
        places: Where the rows of the result are, among those; None where each is where it was, and nobody can tell
            the result from a copy.
        size: The size of the result, with its axes in the order in which they lie,
        laid: which is this.
    """

    chain: list[Node]
    given: tuple[int, ...]
    places: Tensor | None
    size: torch.Size
    laid: tuple[int, ...]

    @staticmethod
    def of(
        chain: list[Node],
        gm: GraphModule,
        form: tuple[torch.Size, tuple[int, ...]],
        numbers: Mapping[Node, float],
        layouts: Sequence[tuple[int, ...]],
    ) -> Move | None:
        """What calls move; None where they do not move whole rows, or would not copy them twice.

        Args:
            chain: The calls.
            gm: The graph.
            form: The size of what is moved, which has no gaps, and its axes from the one with the longest step.
            numbers: The numbers that are made of sizes.
            layouts: The axes of the result, the same way: as it lies, and as it would be copied again.
        """
        if len(layouts) < 2 and _copies(chain, gm) < 2 and not _rolls(chain, gm):
            return None
        size, axes = form
        sizes = {other for node in chain for other in node.all_input_nodes[1:]}
        width = size[axes[-1]] if size.numel() else 0
        if width < _NARROW or size.numel() > _LARGEST or not sizes <= numbers.keys():
            return None
        run, copies = Interpreter(gm), 0
        elements = torch.arange(size.numel()).view([size[axis] for axis in axes]).permute(_back(axes))
        for node in chain:
            args, kwargs = map_arg((node.args[1:], node.kwargs), numbers.__getitem__)
            before = elements.untyped_storage().data_ptr()
            elements = getattr(run, node.op)(node.target, (elements, *args), kwargs)
            copies += elements.untyped_storage().data_ptr() != before
        copies += _rolls(chain, gm)
        for more, laid in enumerate(layouts):
            if copies + more < 2:
                continue
            result = elements.permute(laid)
            rows = result.reshape(-1, width)
            places = rows[:, 0] // width
            if torch.equal(rows, places[:, None] * width + torch.arange(width)):
                read = all(begins_kernel(user, gm) for user in chain[-1].users)
                stay = read and torch.equal(places, torch.arange(len(places)))
                return Move(chain, axes, None if stay else places, result.shape, laid)
        return None

    @property
    def spelled(self) -> dict[Node, Callable[[Mapping[Node, Any]], Tensor]]:
        """The calls, as functions of the values of the nodes."""
        return {**{node: partial(_as_given, node) for node in self.chain}, self.chain[-1]: self._compute}

    def _compute(self, env: Mapping[Node, Any]) -> Tensor:
        given = _as_given(self.chain[-1], env).permute(self.given)
        if self.places is not None:
            given = given.reshape(-1, given.shape[-1]).index_select(0, self.places)
        return given.reshape(self.size).permute(_back(self.laid))


def _back(axes: Sequence[int]) -> list[int]:
    return sorted(range(len(axes)), key=axes.__getitem__)


def _as_given(node: Node, env: Mapping[Node, Any]) -> Tensor:
    given: Tensor = env[node.all_input_nodes[0]]
    return given
