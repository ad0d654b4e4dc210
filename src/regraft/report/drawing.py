"""A piece of a graph as SVG: boxes in layers, each below what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from regraft.core.results import DrawnNode

_WIDEST = 26  # characters of a line in a box
_LETTER, _PAD, _HEIGHT, _GAP, _DROP = 6.65, 11.0, 58.0, 18.0, 34.0
SMALLEST = 0.8
_SAID = {"removed": "removed", "added": "new", "changed": "changed", "around": ""}


@dataclass
class _Box:
    node: DrawnNode
    rank: int
    width: float
    x: float = 0.0
    y: float = 0.0

    @property
    def centre(self) -> float:
        return self.x + self.width / 2


def graph(nodes: Sequence[DrawnNode], title: str) -> str:
    """The nodes as one SVG element, which takes its colours from the page.

    Args:
        nodes: what to draw, each behind what it reads.
        title: what the picture shows, for those who cannot see it.
    """
    boxes = {node.name: _Box(node, rank, _width(node)) for node, rank in zip(nodes, _ranks(nodes), strict=True)}
    layers = _layers(list(boxes.values()))
    widths = [sum(box.width for box in layer) + _GAP * (len(layer) - 1) for layer in layers]
    width = max(widths, default=0.0)
    for i, layer in enumerate(layers):
        x = (width - widths[i]) / 2
        for box in layer:
            box.x, box.y = x, i * (_HEIGHT + _DROP)
            x += box.width + _GAP
    height = len(layers) * (_HEIGHT + _DROP) - _DROP
    edges = [_edge(boxes[read], box) for box in boxes.values() for read in box.node.inputs]
    drawn = [_drawn(box) for box in boxes.values()]
    # It shrinks a little to fit beside its other half, and no further than it can be read.
    fit = f'style="max-width: {width + 4:.0f}px; min-width: {(width + 4) * SMALLEST:.0f}px"'
    size = f'{fit} viewBox="-2 -2 {width + 4:.0f} {height + 4:.0f}"'
    return f'<svg class="graph" role="img" aria-label="{escape(title)}" {size}>{"".join(edges)}{"".join(drawn)}</svg>'


def shortened(text: str, width: int = _WIDEST) -> str:
    """A text that fits, with some of its beginning left out if need be: the names of neighbours differ at the end.

    Args:
        text: the text.
        width: the number of characters.

    >>> shortened("encoder_layer_3_attention_self_query", 20)
    'enco…tion_self_query'
    """
    if len(text) <= width:
        return text
    start = width // 5
    return f"{text[:start]}…{text[len(text) - (width - start - 1) :]}"


def _width(node: DrawnNode) -> float:
    head = len(shortened(node.label)) * 1.15 + (len(_SAID[node.touch]) + 2 if node.touch != "around" else 0)
    longest = max(head, len(shortened(node.name)), len(shortened(node.value)))
    return max(longest * _LETTER + 2 * _PAD, 90.0)


def _ranks(nodes: Sequence[DrawnNode]) -> list[int]:
    """The layer of each: one below the lowest that it reads, and what is only read stands above its first reader."""
    ranks: dict[str, int] = {}
    for node in nodes:
        ranks[node.name] = max((ranks[read] + 1 for read in node.inputs if read in ranks), default=0)
    first: dict[str, int] = {}
    for node in nodes:
        for read in node.inputs:
            first[read] = min(first.get(read, ranks[node.name]), ranks[node.name])
    sources = {node.name for node in nodes if not node.inputs}
    return [first[n.name] - 1 if n.name in sources and n.name in first else ranks[n.name] for n in nodes]


def _layers(boxes: list[_Box]) -> list[list[_Box]]:
    """The boxes of each layer from left to right, each near the middle of what it reads."""
    layers: list[list[_Box]] = [[] for _ in range(max((box.rank for box in boxes), default=-1) + 1)]
    for box in boxes:
        layers[box.rank].append(box)
    layers = [layer for layer in layers if layer]
    place: dict[str, float] = {}
    for layer in layers:
        layer.sort(key=lambda box: _middle([place[read] for read in box.node.inputs if read in place]))
        for i, box in enumerate(layer):
            place[box.node.name] = (i + 1) / (len(layer) + 1)
    return layers


def _middle(places: list[float]) -> float:
    return sum(places) / len(places) if places else 0.5


def _edge(start: _Box, end: _Box) -> str:
    x1, y1, x2, y2 = start.centre, start.y + _HEIGHT, end.centre, end.y
    bend = max((y2 - y1) / 2, 14)
    tip = f"M{x2 - 4:.1f} {y2 - 7:.1f}L{x2:.1f} {y2:.1f}L{x2 + 4:.1f} {y2 - 7:.1f}"
    curve = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
    return f'<path class="edge" d="{curve}"/><path class="edge" d="{tip}"/>'


def _drawn(box: _Box) -> str:
    node, left = box.node, box.x + _PAD
    said = _SAID[node.touch]
    mark = f'<text class="mark" x="{box.x + box.width - _PAD:.1f}" y="{box.y + 18:.1f}">{said}</text>' if said else ""
    return (
        f'<g class="node {node.touch}" tabindex="0" data-detail="{escape(f"{node.name} = {node.detail}")}">'
        f"<title>{escape(f'{node.name} = {node.detail}')}</title>"
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{_HEIGHT}" rx="7"/>'
        f'<text class="label" x="{left:.1f}" y="{box.y + 18:.1f}">{escape(shortened(node.label))}</text>{mark}'
        f'<text class="name" x="{left:.1f}" y="{box.y + 35:.1f}">{escape(shortened(node.name))}</text>'
        f'<text class="value" x="{left:.1f}" y="{box.y + 50:.1f}">{escape(shortened(node.value))}</text></g>'
    )
