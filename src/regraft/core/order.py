"""Where what is gone comes back to: the order of names, of those that are here and of those that may return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merge_order(known: Sequence[str], live: Sequence[str], dead: set[str]) -> list[str]:
    """The order of everything that is here or may come back: `live` as it stands, each of `dead` after the live name
    that it followed in `known`.
    """
    if not dead:
        return list(live)
    alive = set(live)
    following: dict[str | None, list[str]] = {}
    anchor: str | None = None
    for name in known:
        if name in alive:
            anchor = name
        elif name in dead:
            following.setdefault(anchor, []).append(name)
    order = list(following.get(None, ()))
    for name in live:
        order.append(name)
        order.extend(following.get(name, ()))
    return order


def placed(order: Sequence[str], anchors: Iterable[tuple[str, str]]) -> list[str]:
    """`order` with the names it lacks put in, each after its anchor: (name, anchor) pairs, oldest first."""
    known = set(order)
    after: dict[str, list[str]] = {}
    for name, anchor in anchors:
        if name not in known:
            after.setdefault(anchor, []).append(name)
    if not after:
        return list(order)
    result: list[str] = []
    stack = list(reversed(order))
    stack.extend(reversed(after.pop("", ())))
    while stack:
        name = stack.pop()
        result.append(name)
        stack.extend(reversed(after.pop(name, ())))
    return result
