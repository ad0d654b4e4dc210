"""Attention written out for oneDNN Graph, which makes one kernel of the products and the softmax.

That kernel may take half the time of torch's fused call. It computes one head after the other, each by calls of its own
to oneDNN; where these are small, a product of all heads at once is faster, and the softmax and the products are kept
apart. In a model in bfloat16 it computes in float32, or in bfloat16,
where oneDNN Graph rounds the scores before the softmax, which the fused call does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from regraft.core.vocabulary import Call
from regraft.optimize.engines.onednn_layouts import anew, begins_oddly, begun_anew

_AT_ONCE = 1 << 22
"""So many scores at a time, 16 MB of them: more would leave the caches between one product and the next."""
_PARTS = 32
"""Into so many parts a call is taken apart at most; those of larger calls are larger."""
_LARGEST = 4
"""More than so many times `_AT_ONCE` scores take too much memory, in a part or, as a mask is whole, in all of them."""
_SMALL = 64 * 64
"""So few scores has a head that takes less time together with all others."""
_LANES = 32
"""So many halves torch computes at once; what is left at the end of a row takes far longer, if it is half of that."""
_MANY = 1 << 16
"""Of fewer scores two calls more take as long as that."""
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Mask:
    """What a mask is to attention that is written out.

    Args:
        added: What is added to the scores, dense and of their size, for each part of the rows.
        blind: Which rows see no key, whose result is zero, along the last axis but one; None where each sees one.
    """

    added: tuple[Tensor, ...]
    blind: Tensor | None

    def to(self, dtype: torch.dtype) -> Mask:
        """The same in another type.

        Args:
            dtype: The type.
        """
        return Mask(tuple(added.to(dtype) for added in self.added), self.blind)

    def known(self) -> Mask:
        """The same, of a mask whose values are always these."""
        return self if self.blind is not None and bool(self.blind.any()) else self.sighted

    @property
    def sighted(self) -> Mask:
        """The same, where each row sees a key."""
        return Mask(self.added, None)


@dataclass(frozen=True)
class WrittenAttention:
    """A call of fused attention, to be written out for tensors of certain sizes.

    Args:
        call: The call.
        sizes: Those of the scores: batch, heads, queries and keys.
        width: That of the values.
        scale: What the products are multiplied by.
        dtype: The type of its tensors.
    """

    call: Call
    sizes: tuple[int, int, int, int]
    width: int
    scale: float
    dtype: torch.dtype

    @staticmethod
    def of(call: Call, env: Mapping[Node, Any]) -> WrittenAttention | None:
        """A call, to be written out; None where it has to stay as it is.

        Args:
            call: The call.
            env: The values of the nodes in the sample.
        """
        query, key, value = tensors = [env[call[name]] for name in ("input", "key", "value")]
        if any(isinstance(call[name], Node) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")):
            return None
        mask = call["attn_mask"]
        if call["dropout_p"] or (mask is not None and not isinstance(env[mask], Tensor)):
            return None
        if any(not t.is_cpu or t.ndim != 4 or t.dtype not in _DTYPES or len(t) != len(query) for t in tensors):
            return None
        if not call["enable_gqa"] and any(t.shape[1] != query.shape[1] for t in tensors):
            return None
        scale = query.shape[3] ** -0.5 if call["scale"] is None else call["scale"]
        written = WrittenAttention(call, (*query.shape[:3], key.shape[2]), value.shape[3], scale, query.dtype)
        return written if written.possible else None

    @property
    def possible(self) -> bool:
        """Whether oneDNN Graph has a form for it, in as much memory as it may take."""
        sizes, parts = self.sizes, self.parts
        # a product of a single row is none of matrices, at which oneDNN Graph has gone wrong before
        fewest = min(rows.stop - rows.start for _, rows in parts)
        if min(fewest, sizes[3], self.width) < 2:
            return False
        at_once = max((batch.stop - batch.start) * (rows.stop - rows.start) for batch, rows in parts)
        held = (at_once if self.mask is None else sizes[0] * sizes[2]) * sizes[1] * sizes[3]
        return held <= _LARGEST * _AT_ONCE

    @property
    def parts(self) -> list[tuple[slice, slice]]:
        """What is computed together, of the batch and of the rows: few rows make a product slower than few batches."""
        batch, rows = self.sizes[0], self.sizes[2]
        number = max(1, math.ceil(math.prod(self.sizes) / _AT_ONCE))
        batches = max(1, min(number, batch, _PARTS))
        of_rows = _slices(rows, min(math.ceil(number / batches), _PARTS // batches))
        return [(first, second) for first in _slices(batch, batches) for second in of_rows]

    @property
    def small(self) -> bool:
        """Whether the products and the softmax of all heads are faster than one kernel for each head."""
        return math.prod(self.sizes[2:]) <= _SMALL

    @property
    def mask(self) -> tuple[Node | None, tuple[int, ...], int] | None:
        """What tells its mask from those of other calls: the node, none for the causal mask, and the sizes."""
        node = self.call["attn_mask"]
        return (node, self.sizes, self.width) if node is not None or self.call["is_causal"] else None

    def prepared(self, env: Mapping[Node, Any]) -> Mask:
        """What is made of its mask: of booleans, false where a key is hidden, or of numbers to add.

        Args:
            env: The values of the nodes.
        """
        mask = self._given(env)
        if mask.is_floating_point():
            number = mask.float()
            lowest = torch.where(number == -math.inf, number, torch.finfo(self.dtype).min)  # what is finite stays so
            number = number.maximum(lowest)
        else:
            number = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        whole = number.expand(self.sizes)
        added = tuple(whole[batch, :, rows].clone(memory_format=torch.contiguous_format) for batch, rows in self.parts)
        return Mask(added, self.blind(env))

    def blind(self, env: Mapping[Node, Any]) -> Tensor:
        """Which rows see no key, (..., queries, 1).

        Args:
            env: The values of the nodes.
        """
        mask = self._given(env)
        if mask.is_floating_point():  # the largest number tells as much as all of them, a tenth of the time
            return mask.amax(-1, keepdim=True) == -math.inf
        return ~mask.any(-1, keepdim=True)

    def _given(self, env: Mapping[Node, Any]) -> Tensor:
        if self.call["is_causal"]:
            return torch.ones(self.sizes[2:], dtype=torch.bool).tril()
        mask: Tensor = env[self.call["attn_mask"]]
        return mask

    def compute(self, env: Mapping[Node, Any], mask: Mask | None, dtype: torch.dtype) -> Tensor:
        """What the fused call gives, in memory as that leaves it.

        Args:
            env: The values of the nodes.
            mask: What `prepared` gave, in that type.
            dtype: The type to compute in.
        """
        given = (env[self.call[name]].to(dtype) for name in ("input", "key", "value"))
        query, key, value = (begun_anew(tensor) if begins_oddly(tensor) else tensor for tensor in given)
        heads, scale = self.sizes[1], self.scale
        if scale == 1:  # a product with 1 is left out, and what oneDNN Graph compiles as attention has a scale
            query, scale = query * 0.5, 2.0
        key, value = (t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
        results: dict[int, list[Tensor]] = {}
        for part, (batch, rows) in enumerate(self.parts):
            scores = torch.matmul(query[batch, :, rows], key[batch].transpose(2, 3)) * scale
            scores = scores if mask is None else scores + mask.added[part]
            weights = anew(self._softmax(anew(scores))) if self.small else scores.softmax(-1)
            results.setdefault(batch.start, []).append(torch.matmul(weights, value[batch]))
        result = _joined([_joined(of_batch, 2) for of_batch in results.values()], 0)
        if mask is not None and mask.blind is not None:
            blind = mask.blind.expand(result.shape).clone(memory_format=torch.contiguous_format)
            result = result.masked_fill(blind, 0.0)
        return result.to(self.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    def _softmax(self, scores: Tensor) -> Tensor:
        """By torch, which computes in float32, and takes less time for halves in rows of 49 if it is given that."""
        rest = self.sizes[3] % _LANES
        if scores.dtype == torch.float32 or rest < _LANES // 2 or scores.numel() < _MANY:
            return scores.softmax(-1)
        return scores.float().softmax(-1).to(scores.dtype)


def _slices(length: int, number: int) -> list[slice]:
    bounds = [length * part // number for part in range(number + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _joined(tensors: list[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis)
