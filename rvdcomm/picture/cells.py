"""Cells: what one rank holds in one state, drawn as a thumbnail of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rvdcomm import Box
from rvdcomm.picture.page import Page, text_width
from rvdcomm.planning import State

# Paul Tol's "light" scheme: colour-blind readers can tell the fills apart, and black text on them
# is legible.
LIGHT = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
# The same hues a third darker, for pieces 8 to 15.
DARK = tuple(
    "#" + "".join(f"{int(color[i : i + 2], 16) * 2 // 3:02X}" for i in (1, 3, 5)) for color in LIGHT
)
PALETTE = LIGHT + DARK

EMPTY, OUTLINE = "#F5F7FA", "#7B8794"
MIXED = "#9AA5B1"
"""Fill of boxes whose pieces are too thin to be told apart."""
THIN = 1.0
MAX_RECTS = 256
"""Coloured rectangles in one cell; further ones are left out, and a note says so."""

Rect = tuple[float, float, float, float, str]
"""Left, top, width and height inside a cell, and the fill."""


@dataclass(frozen=True)
class Thumbnails:
    """How the cells of a picture are drawn: which dims, how large, which piece in which colour.

    A piece is what one rank holds in the state that cuts the tensor finest. Equal pieces have equal
    colours in all states. At most two dims are shown: the first ones that any state cuts.
    """

    shape: tuple[int, ...]
    states: tuple[State, ...]
    width: float

    @cached_property
    def cut_dims(self) -> frozenset[int]:
        """Dims that some state cuts."""
        return frozenset(
            d
            for state in self.states
            for holding in state.placement.holdings
            for box in holding.boxes
            for d, size in enumerate(self.shape)
            if box.hi[d] - box.lo[d] != size
        )

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The dims that are shown, ascending: vertical and horizontal, or horizontal alone."""
        by_interest = sorted(range(len(self.shape)), key=lambda d: (d not in self.cut_dims, d))
        return tuple(sorted(by_interest[:2]))

    @cached_property
    def height(self) -> float:
        """Height of a cell: in the tensor's proportion, within limits."""
        if len(self.dims) < 2:
            return self.width * (0.4 if self.dims else 1.0)
        rows, columns = (max(self.shape[d], 1) for d in self.dims)
        return self.width * min(max(rows / columns, 0.5), 1.25)

    @cached_property
    def palette_state(self) -> State:
        """The state whose pieces have the colours: the earliest of those with most pieces."""
        return max(self.states, key=lambda state: len(self._pieces(state)))

    @cached_property
    def colors(self) -> dict[tuple[Box, ...], str]:
        """Colour of every piece, in the order in which the ranks hold them."""
        pieces = self._pieces(self.palette_state)
        return {piece: PALETTE[i % len(PALETTE)] for i, piece in enumerate(pieces)}

    def draw(self, page: Page, index: int, rank: int, x: float, y: float) -> None:
        """The cell of ``rank`` in state ``index``, with its left upper corner at (x, y)."""
        state = self.states[index]
        holding = state.placement.by_rank[rank]
        is_part = state.placement.num_parts > 1
        page.rect(x, y, self.width, self.height, facecolor=EMPTY)
        rects = self.rects(holding.boxes)
        for i, (left, top, width, height, fill) in enumerate(rects[:MAX_RECTS]):
            # A white edge sets neighbours of one colour apart, where there is room for it.
            edge = {"edgecolor": "#FFFFFF", "linewidth": 0.6 if min(width, height) > 3 else 0}
            look = hatched(fill) if is_part else {"facecolor": fill, **edge}
            page.rect(x + left, y + top, width, height, gid=f"box-{index}-{rank}-{i}", **look)
        outline: dict[str, Any] = {"fill": False, "edgecolor": OUTLINE, "linewidth": 1}
        page.rect(x, y, self.width, self.height, gid=f"cell-{index}-{rank}", **outline)
        if not rects:
            self._label(page, "empty", "–", rects, x, y)
        elif is_part:
            self._label(page, f"part {holding.part}", str(holding.part), rects, x, y)

    def rects(self, boxes: tuple[Box, ...]) -> list[Rect]:
        """The coloured rectangles of these boxes, in a cell whose left upper corner is (0, 0)."""
        if boxes not in self._rects_of:
            self._rects_of[boxes] = self._colored(self._shown(boxes))
        return self._rects_of[boxes]

    @cached_property
    def _rects_of(self) -> dict[tuple[Box, ...], list[Rect]]:
        return {}

    def _colored(self, boxes: list[Box]) -> list[Rect]:
        rects: dict[Box, Rect] = {}
        for box in boxes:
            for piece, color in self.colors.items():
                for common in filter(None, map(box.intersect, piece)):
                    rects.setdefault(common, self._rect(common, color))
        # Pieces that a pixel cannot show are not told apart.
        is_thin = any(min(width, height) <= THIN for _, _, width, height, _ in rects.values())
        if len(rects) > len(boxes) and is_thin:
            return [self._rect(box, MIXED) for box in boxes]
        return list(rects.values())

    def _label(
        self, page: Page, text: str, short: str, rects: Sequence[Rect], x: float, y: float
    ) -> None:
        """A word on a white plate, where it hides least: in the middle, or below, or above it."""
        size = 10.5 if self.width >= 40 else 9.0
        if text_width(text, size) > self.width - 8:
            text = short
        height = size + 4
        middle = self.height / 2
        # Moved down or up by this much, the plate still lies inside the cell.
        edge = middle - height / 2 - 2
        is_roomy = len(self.dims) == 2 and edge > height * 0.75
        center = min(
            (middle, middle + edge, middle - edge) if is_roomy else (middle,),
            key=lambda at: sum(_overlap(r, at - height / 2, at + height / 2) for r in rects),
        )
        plate = {"boxstyle": "round,pad=0.15", "facecolor": "#FFFFFF", "alpha": 0.9, "linewidth": 0}
        at = x + self.width / 2, y + center + 0.36 * size
        page.text(*at, text, size, ha="center", gid="label", bbox=plate)

    def _rect(self, box: Box, color: str) -> Rect:
        if not self.dims:
            inset = self.width * 0.2
            return inset, inset, self.width - 2 * inset, self.width - 2 * inset, color
        spans = [(0.0, self.height), (0.0, self.width)]
        for i, d in enumerate(self.dims, start=2 - len(self.dims)):
            length = spans[i][1]
            low, high = (bound * length / self.shape[d] for bound in (box.lo[i - 2], box.hi[i - 2]))
            high = max(high, low + THIN)
            spans[i] = (min(low, length - (high - low)), min(high, length))
        (top, bottom), (left, right) = spans
        return left, top, right - left, bottom - top, color

    def _shown(self, boxes: Sequence[Box]) -> list[Box]:
        """Boxes in the dims that are shown, each once and without empty ones."""
        shown = (
            Box(tuple(box.lo[d] for d in self.dims), tuple(box.hi[d] for d in self.dims))
            for box in boxes
            if not box.is_empty
        )
        return list(dict.fromkeys(shown))

    def _pieces(self, state: State) -> list[tuple[Box, ...]]:
        """The distinct pieces that ranks hold, by the first rank that holds each."""
        holdings = sorted(state.placement.holdings, key=lambda holding: holding.ranks[0])
        pieces = (tuple(self._shown(holding.boxes)) for holding in holdings)
        return list(dict.fromkeys(piece for piece in pieces if piece))


def hatched(fill: str) -> dict[str, Any]:
    """The look of a partial sum: a light shade of the colour, with diagonals in full colour."""
    return {"facecolor": (fill, 0.4), "edgecolor": fill, "hatch": "//////", "linewidth": 0}


def _overlap(rect: Rect, top: float, bottom: float) -> float:
    """The area of ``rect`` between two heights."""
    _, y, width, height, _ = rect
    return max(min(y + height, bottom) - max(y, top), 0.0) * width
