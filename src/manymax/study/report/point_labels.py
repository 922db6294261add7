"""Where the names of single points stand in a figure, so that they cover neither one another nor the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

WIDTH, HEIGHT = 540, 300  # pixels of the axes that places are chosen for; the window decides the real size
LETTER, LINE, AWAY = 7, 16, 9  # pixels: the width of a letter, the height of a line, from a point to its name
ROOM_LEFT, ROOM_RIGHT = 0.12, 0.3  # of the length of the x axis, beyond the outermost points
OUTSIDE = 3  # what a name that leaves the axes counts beside one that covers something

# {side of the point: (plotly's word, matplotlib's offset and alignment)}
SIDES = {
    "right": ("middle right", {"xytext": (7, 0), "ha": "left", "va": "center"}),
    "left": ("middle left", {"xytext": (-7, 0), "ha": "right", "va": "center"}),
    "top": ("top center", {"xytext": (0, 7), "ha": "center", "va": "bottom"}),
    "bottom": ("bottom center", {"xytext": (0, -7), "ha": "center", "va": "top"}),
}


class LabelledPoint(Protocol):
    """A point with a name and the half length of its error bar; with several coordinates it is a line."""

    @property
    def name(self) -> str: ...
    @property
    def x(self) -> Sequence[float]: ...
    @property
    def y(self) -> Sequence[float]: ...
    @property
    def spread(self) -> Sequence[float] | None: ...
    @property
    def joined(self) -> bool: ...


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether two rectangles have something in common."""
        apart = self.right < other.left or other.right < self.left or self.bottom < other.top or other.bottom < self.top
        return not apart


def room(lines: Sequence[LabelledPoint]) -> tuple[float, float]:
    """The ends of a logarithmic x axis with room for names at its sides."""
    logs = [math.log10(x) for line in lines for x in line.x]
    span = max(max(logs) - min(logs), 0.3)
    return 10 ** (min(logs) - ROOM_LEFT * span), 10 ** (max(logs) + ROOM_RIGHT * span)


def sides(lines: Sequence[LabelledPoint]) -> list[str | None]:
    """On which side of each single point its name stands, a key of `SIDES`; None for lines, which have none.

    One name after the other gets the side on which it covers least.
    """
    low, high = (math.log10(end) for end in room(lines))
    bottom = min(y - _half(line) for line in lines for y in line.y)
    top = max(y + _half(line) for line in lines for y in line.y)
    covered = [_bar(line, low, high, bottom, top) for line in lines if not line.joined]
    found: list[str | None] = []
    for line in lines:
        if line.joined:
            found.append(None)
            continue
        x, y = _pixel(line.x[0], line.y[0], low, high, bottom, top)
        boxes = {side: _box(side, x, y, LETTER * len(line.name)) for side in SIDES}
        best = min(boxes, key=lambda side: _covers(boxes[side], covered))
        covered.append(boxes[best])
        found.append(best)
    return found


def _half(line: LabelledPoint) -> float:
    return line.spread[0] if line.spread else 0.0


def _pixel(x: float, y: float, low: float, high: float, bottom: float, top: float) -> tuple[float, float]:
    down = (top - y) / (top - bottom) if top > bottom else 0.5
    return WIDTH * (math.log10(x) - low) / (high - low), HEIGHT * down


def _bar(line: LabelledPoint, low: float, high: float, bottom: float, top: float) -> Box:
    """What a point takes with its error bar."""
    half = _half(line)
    x, upper = _pixel(line.x[0], line.y[0] + half, low, high, bottom, top)
    _, lower = _pixel(line.x[0], line.y[0] - half, low, high, bottom, top)
    return Box(x - 5, upper - 5, x + 5, lower + 5)


def _box(side: str, x: float, y: float, width: float) -> Box:
    """What a name takes on this side of its point."""
    left = {"right": x + AWAY, "left": x - AWAY - width}.get(side, x - width / 2)
    top = {"top": y - AWAY - LINE, "bottom": y + AWAY}.get(side, y - LINE / 2)
    return Box(left, top, left + width, top + LINE)


def _covers(box: Box, covered: Sequence[Box]) -> int:
    outside = box.left < 0 or box.right > WIDTH or box.top < -LINE or box.bottom > HEIGHT + LINE
    return sum(box.meets(other) for other in covered) + OUTSIDE * outside
