"""Shapes: the four things that a picture is made of, whichever file it is written to.

Lengths are pixels, x to the right and y down. A shape's ``tag`` says what it stands for (a cell, a
message, ...), and its ``hint`` is the text that an SVG viewer shows under the pointer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Point = tuple[float, float]
Bounds = tuple[float, float, float, float]
"""Left, top, right, bottom."""

INK, GREY, OUTLINE = "#1F2933", "#52606D", "#7B8794"
MARGIN = 28.0
"""Empty space around a picture."""
MAX_LABEL = 30
"""Characters of a label."""


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; with a large ``radius`` a dot."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = "none"
    stroke_width: float = 1.0
    radius: float = 0.0
    opacity: float = 1.0
    tag: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Stroke:
    """Curves drawn with one pen, each a line (2 points) or a cubic Bezier curve (4 points)."""

    curves: tuple[tuple[Point, ...], ...]
    color: str
    width: float
    dashes: tuple[float, ...] = ()
    opacity: float = 1.0
    tag: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled outline, such as the head of an arrow."""

    points: tuple[Point, ...]
    fill: str
    opacity: float = 1.0
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; ``y`` is its baseline, ``anchor`` which end of it ``x`` is."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False
    mono: bool = False
    color: str = INK
    tag: str = ""

    @property
    def bounds(self) -> Bounds:
        """Where the text is, estimated: a viewer may not have our font."""
        width = text_width(self.text, self.size, mono=self.mono, bold=self.bold)
        left = self.x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]
        return left, self.y - 0.8 * self.size, left + width, self.y + 0.24 * self.size


Shape = Rect | Stroke | Polygon | Text


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes in the order in which they are painted, on a white page."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float, *, mono: bool = False, bold: bool = False) -> float:
    """Estimated width of a line: that of DejaVu, among the widest of the common fonts."""
    if mono:
        return 0.603 * size * len(text)
    ems = sum(0.36 if c in " .,:;'|()[]ijlft" else 1.0 if c in "mwMW" else 0.64 for c in text)
    return ems * size * (1.1 if bold else 1.0)


def arrow_head(tip: Point, length: float, half_width: float, color: str) -> Polygon:
    """A head that points down to ``tip``."""
    x, y = tip
    points = ((x, y), (x - half_width, y - length), (x + half_width, y - length))
    return Polygon(points, color, tag="head")


def moved(shape: Shape, dx: float, dy: float) -> Shape:
    """The same shape elsewhere."""

    def point(p: Point) -> Point:
        return p[0] + dx, p[1] + dy

    match shape:
        case Stroke():
            return replace(shape, curves=tuple(tuple(map(point, c)) for c in shape.curves))
        case Polygon():
            return replace(shape, points=tuple(map(point, shape.points)))
        case Rect() | Text():
            return replace(shape, x=shape.x + dx, y=shape.y + dy)


def shortened(text: str) -> str:
    """A label, with its end left out where it is too long."""
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
