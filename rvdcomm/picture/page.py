"""Page: a matplotlib figure in units of points, x to the right and y down.

What is drawn later lies above; texts lie above all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, FancyBboxPatch, Patch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

Point = tuple[float, float]

INK, GREY = "#1F2933", "#52606D"
MARGIN = 28.0
"""Empty space around a picture."""
MAX_LABEL = 30
"""Characters of a label."""


class Page:
    """A white page that grows with what is drawn on it."""

    def __init__(self) -> None:
        self.figure = Figure(facecolor="#FFFFFF", dpi=72)
        self.axes: Any = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set_axis_off()
        self._right = self._bottom = 0.0

    def resize(self) -> None:
        """Fit the page to its contents."""
        width, height = self._right + MARGIN, self._bottom + MARGIN
        self.figure.set_size_inches(width / 72, height / 72)
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)

    def reach(self, x: float, y: float) -> None:
        """Let the page contain this point."""
        self._right, self._bottom = max(self._right, x), max(self._bottom, y)

    def rect(
        self, x: float, y: float, width: float, height: float, radius: float = 0, **look: Any
    ) -> None:
        """A rectangle; ``look`` as matplotlib's patches take it."""
        self.reach(x + width, y + height)
        look = {"linewidth": 0, **look}
        if radius:
            style = f"round,pad=0,rounding_size={radius}"
            self._add(FancyBboxPatch((x, y), width, height, boxstyle=style, **look))
        else:
            self._add(Rectangle((x, y), width, height, **look))

    def curve(self, points: Sequence[Point], color: str, width: float, **look: Any) -> None:
        """A line through 2 points, or the cubic Bezier curve of 4."""
        middle = Path.CURVE4 if len(points) == 4 else Path.LINETO
        path = Path(points, [Path.MOVETO] + [middle] * (len(points) - 1))
        look = {"fill": False, "edgecolor": color, "linewidth": width, "capstyle": "butt", **look}
        self._add(PathPatch(path, **look))

    def circle(self, x: float, y: float, radius: float, **look: Any) -> None:
        """A disc around a point."""
        self.reach(x + radius, y + radius)
        self._add(Circle((x, y), radius, **{"linewidth": 0, **look}))

    def head(self, tip: Point, length: float, half_width: float, color: str) -> None:
        """The head of an arrow that points down to ``tip``."""
        x, y = tip
        corners = [(x, y), (x - half_width, y - length), (x + half_width, y - length)]
        self._add(Polygon(corners, facecolor=color, linewidth=0))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12.0,
        *,
        mono: bool = False,
        bold: bool = False,
        **look: Any,
    ) -> None:
        """A line of text with baseline ``y``; ``x`` is its left end, or as ``ha`` says."""
        if look.get("ha") != "center":
            self.reach(x + text_width(text, size, mono, bold), y)
        font = _font(size, mono, bold)
        self.axes.text(x, y, text, **{"font": font, "color": INK, "parse_math": False, **look})

    def _add(self, patch: Patch) -> None:
        # Not ``add_patch``: half of a picture's time would go into its axis limits, which
        # ``resize`` sets.
        self.axes.add_artist(patch)
        patch.set_clip_on(False)


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """Width of a line in DejaVu, which is among the widest of the common fonts."""
    font = _font(size, mono, bold)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def shortened(text: str) -> str:
    """A label, with its end left out where it is too long."""
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def _font(size: float, mono: bool, bold: bool) -> FontProperties:
    family = "DejaVu Sans Mono" if mono else "DejaVu Sans"
    return FontProperties(family=family, weight="bold" if bold else "normal", size=size)
