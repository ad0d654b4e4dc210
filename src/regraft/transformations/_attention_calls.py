"""What a call of fused attention is given without need, and of how many axes it is.

Keys and values repeated for each query, a mask that hides the future alone; and axes for which torch has no fast
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.pattern import Match, Pattern
from regraft.core.query import Facts, require, that
from regraft.core.tree import Tree
from regraft.core.values import same_shape, value_of
from regraft.core.vocabulary import ATTENTION, EXPAND, INDEX, REPEAT, RESHAPE, UNSQUEEZE, Call, read
from regraft.transformations._attention import Mask
from regraft.transformations._constants import constant_value, piece

_LARGEST = 1 << 24
"""So many elements of a mask are looked at."""


class Attentions(Pattern):
    """Attention that is written out, and calls of the fused one with more than they need, or of other than four axes.

    Args:
        written: What written-out attention looks like.
    """

    def __init__(self, written: Tree) -> None:
        self.written = written

    def candidates(self, owner: GraphModule) -> Iterator[tuple[Node, ...]]:
        calls = ((node,) for node in owner.graph.nodes if _heavy(node, owner))
        yield from sorted((*self.written.candidates(owner), *calls), key=lambda nodes: nodes[-1])

    def match(self, owner: GraphModule, nodes: tuple[Node, ...]) -> Match | None:
        call = read(nodes[0], owner)
        if call is None or call.operation is not ATTENTION:
            return self.written.match(owner, nodes)
        return Match(owner, (call,)) if _heavy(nodes[0], owner) else None


def _heavy(node: Node, owner: GraphModule) -> bool:
    call = read(node, owner)
    if call is None or call.operation is not ATTENTION:
        return False
    mask = call["attn_mask"]
    return (
        grouped(call["key"], call["value"], owner) is not None
        or (isinstance(mask, Node) and not call["is_causal"] and piece(mask, owner) is not None)
        or _other_axes(call, mask) is not None
    )


def _other_axes(call: Call, mask: Any) -> tuple[int, ...] | None:
    """The sizes of the axes before the last three, where these or those of the mask are others: see `put`."""
    query, key, value = (value_of(call[name]) for name in ("input", "key", "value"))
    if query is None or key is None or value is None or query.ndim < 3 or call["dropout_p"]:
        return None
    heads = 3 if call["enable_gqa"] else 2  # of groups of queries there are fewer keys
    if not all(same_shape(query.shape[:-heads], one.shape[:-heads]) for one in (key, value)):
        return None
    batches = batches_of(query, mask)
    return batches if len(batches) != 1 or _has_three_axes(mask) else None


def _has_three_axes(mask: Any) -> bool:
    value = value_of(mask)
    return value is not None and value.ndim == 3


def lighten(match: Match, edit: Edit, facts: Facts) -> str:
    """Give a fused call four axes, the keys and values without their repetition, and no mask where that is causal."""
    call, owner = match.call, match.owner
    query, key, value, mask = (call[name] for name in ("input", "key", "value", "attn_mask"))
    pair = grouped(key, value, owner)
    reason = repeats_in_vain(query, pair, [key, value], call.node, facts) if pair is not None else None
    causal = isinstance(mask, Node) and is_causal([_given(mask)], call["scale"], query, value, owner, facts)
    batches = _other_axes(call, None if causal else mask)
    lighter = causal or pair is not None or batches is not None
    require(that(lighter, f"the mask {getattr(mask, 'name', mask)!r} is not known to be causal"))
    require(reason if not causal else None)
    taken = pair if reason is None else None

    operands = [query, *(taken or (key, value))]
    if batches is not None:
        ordered = facts.order_free(call.node) is not None
        put(edit, call.node, operands, settings_of(call, causal, taken), batches, None, ordered)
    else:
        edit.replace(call.node, F.scaled_dot_product_attention, *operands, **settings_of(call, causal, taken))
    for left in (key, value, *([mask] if causal else [])):
        drop(left, edit)
    what = ("the keys and values are not repeated", taken is not None), ("the mask is causal", causal)
    return ", ".join(text for text, done in (*what, ("four axes", batches is not None)) if done)


def settings_of(call: Call, causal: bool = False, pair: Any = None) -> dict[str, Any]:
    """The keywords of a call of fused attention, without defaults, for another in its place.

    Args:
        call: The call.
        causal: Whether its mask is not needed, since it is known to be causal.
        pair: The keys and values that are not repeated any more, if any.
    """
    given = {name: call[name] for name in ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")}
    given |= {"attn_mask": None, "is_causal": True} if causal else {}
    given |= {"enable_gqa": True} if pair is not None else {}
    if not given["dropout_p"]:
        del given["dropout_p"]
    return {name: value for name, value in given.items() if value is not None and value is not False}


def _given(mask: Node) -> Mask:
    """The mask of a fused call: true where a score stays, or added."""
    value = value_of(mask)
    boolean = value is not None and value.dtype is torch.bool
    return Mask(mask, -math.inf, True) if boolean else Mask(mask)


def grouped(key: Any, value: Any, owner: GraphModule) -> tuple[Node, Node] | None:
    """The keys and values before each head of theirs was repeated for the queries of its group."""
    found = repeated(key, owner), repeated(value, owner)
    if found[0] is None or found[1] is None or found[0][1] != found[1][1]:
        return None
    return found[0][0], found[1][0]


def repeated(value: Any, owner: GraphModule) -> tuple[Node, int] | None:
    """What a value of (batch, heads, length, width) repeats, each head so many times running, and how often."""
    call, after = read(value, owner), value_of(value)
    if call is None or after is None or after.ndim != 4:
        return None
    source = _expanded(call) if call.operation is RESHAPE else call["input"] if call.operation is REPEAT else None
    before = value_of(source)
    if source is None or before is None or before.ndim != 4:
        return None
    heads: Any = before.shape[1]
    more: Any = after.shape[1]
    if not isinstance(heads, int) or not isinstance(more, int) or more <= heads:
        return None
    if call.operation is REPEAT and call["repeats"] != more // heads:
        return None  # a number for each head, perhaps
    alike = same_shape([before.shape[0], *before.shape[2:]], [after.shape[0], *after.shape[2:]])
    return (source, more // heads) if alike else None


def _expanded(reshape: Call) -> Node | None:
    """The value of four axes that got a fifth behind its heads, along which it was expanded before it was reshaped."""
    expand = read(reshape.input, reshape.owner)
    added = read(expand["input"], expand.owner) if expand is not None and expand.operation is EXPAND else None
    if expand is None or added is None or not _adds_third_axis(added):
        return None
    source, wide = added["input"], value_of(expand.node)
    before = value_of(source)
    if before is None or wide is None:
        return None
    return source if same_shape([*wide.shape[:2], *wide.shape[3:]], before.shape) else None


def _adds_third_axis(call: Call) -> bool:
    if call.operation is UNSQUEEZE:
        return call["dim"] in (2, -3)
    index = call["index"] if call.operation is INDEX else None
    whole = slice(None)
    return isinstance(index, tuple) and index[:3] == (whole, whole, None) and all(one == whole for one in index[3:])


def repeats_in_vain(
    query: Any, pair: tuple[Node, Node], repetitions: list[Node], last: Node, facts: Facts
) -> str | None:
    """None where the fused call may have the keys and values as they are before they are repeated."""
    device = value_of(pair[0])
    if device is None or device.device.type not in ("cpu", "meta"):
        return "the keys and values are not on the CPU, and other devices compute groups of queries by slow ways"
    shapes = [value_of(one) for one in (query, repetitions[0])]
    if any(shape is None for shape in shapes) or shapes[0].shape[1] != shapes[1].shape[1]:  # type: ignore[union-attr]
        return "the queries have another number of heads than the repeated keys"
    answers = [facts.unchanged(one, whole, last) for one, whole in zip(pair, repetitions, strict=True)]
    answers += [facts.untouched(whole) for whole in repetitions]
    return next((answer for answer in answers if answer is not None), None)


def is_causal(masks: list[Mask], scale: float | None, query: Any, value: Any, owner: GraphModule, facts: Facts) -> bool:
    """Whether the masks together hide from each position the later ones and nothing else, whatever the inputs are."""
    q, v = value_of(query), value_of(value)
    if not masks or q is None or v is None or (scale is not None and scale <= 0):
        return False  # torch hides before it scales, and makes NaN where the scale turns infinity around
    length: Any = q.shape[-2]
    keys: Any = v.shape[-2]
    if not isinstance(length, int) or length != keys:
        return False
    values = [_constant_mask(mask, q.ndim, owner, facts) for mask in masks]
    known = [value for value in values if value is not None]
    if len(known) < len(masks) or any(value.shape[-2:] != (length, length) for value in known):
        return False
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if masks[0].fill is not None:
        hidden = [~value if mask.keeps else value for value, mask in zip(known, masks, strict=True)]
        return bool((reduce(torch.logical_or, hidden) == ~seen).all())
    total = reduce(torch.add, known)
    if not total.dtype.is_floating_point:
        return False
    return bool(torch.where(seen, total == 0, total <= torch.finfo(total.dtype).min / 2).all())


def _constant_mask(mask: Mask, axes: int, owner: GraphModule, facts: Facts) -> Tensor | None:
    """The value of a mask that has always the same, with the axes of the scores; None for others."""
    value = constant_value(mask.node, owner, facts, _LARGEST)
    if value is None or not mask.parts:
        return value
    sizes = [size for size in mask.parts if isinstance(size, int)]
    if len(sizes) < len(mask.parts):
        return None
    return value.expand(*sizes, *[-1] * (axes - 1)).flatten(0, len(sizes) - 1)


def put(
    edit: Edit,
    result: Node,
    operands: list[Node],
    keywords: dict[str, Any],
    batches: tuple[int, ...],
    lost: Node | None,
    ordered: bool,
) -> None:
    """The fused call in the place of `result`.

    The fast kernels take four axes: three get a first one, and of more the first ones become one. So do those of a mask
    with one for each head.

    Args:
        edit: The site's transaction.
        result: The node that gets the value.
        operands: The query, the key and the value.
        keywords: The other arguments.
        batches: The sizes of the axes before the last three; -1 for one that is not known.
        lost: The rows that are NaN; None where there are none.
        ordered: Whether a reader needs the value contiguous, as a product is and the fused call's need not be.
    """
    rest: list[tuple[Any, ...]] = []
    if _has_three_axes(mask := keywords.get("attn_mask")):
        keywords = {**keywords, "attn_mask": edit.insert(result, torch.unsqueeze, mask, 0)}
    if not batches:
        operands, rest = [edit.insert(result, torch.unsqueeze, one, 0) for one in operands], [(torch.squeeze, 0)]
    elif len(batches) > 1:
        operands = [edit.insert(result, torch.flatten, one, 0, len(batches) - 1) for one in operands]
        rest = [(torch.unflatten, 0, batches)]
    rest += [(torch.masked_fill, lost, math.nan)] if lost is not None else []
    rest += [(torch.ops.aten.contiguous.default,)] if ordered else []
    if not rest:
        edit.replace(result, F.scaled_dot_product_attention, *operands, **keywords)
        return
    value = edit.insert(result, F.scaled_dot_product_attention, *operands, name="attention", **keywords)
    for target, *more in rest[:-1]:
        value = edit.insert(result, target, value, *more)
    target, *more = rest[-1]
    edit.replace(result, target, value, *more)


def batches_of(query: Tensor, mask: Any) -> tuple[int, ...]:
    """The sizes of the axes before the last three, for `put`; all in one, unless the fused call can have one for them.

    Args:
        query: The query.
        mask: What the fused call is given as its mask.
    """
    known: list[Any] = list(query.shape[:-3])
    sizes = [size if isinstance(size, int) else -1 for size in known]
    masked = value_of(mask)
    each = None if masked is None else masked.shape[:-3]  # none, or one for all batches, whose axes become one
    plain = mask is None or (each is not None and (not each or (query.ndim > 4 and same_shape(each, (1,)))))
    return tuple(sizes) if plain and sizes.count(-1) < 2 else (-1,)


def drop(value: Node, edit: Edit) -> None:
    """Erase a value that nobody reads any more, and what was computed for it alone."""
    stack = [value]
    while stack:
        node = stack.pop()
        if node in edit.erased or node.users or node.op not in ("call_function", "call_method", "get_attr"):
            continue
        stack.extend(node.all_input_nodes)
        if node.op == "get_attr":
            edit.discard_weight(node)
        else:
            edit.erase(node)
