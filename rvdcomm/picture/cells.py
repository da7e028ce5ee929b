"""Cells: what one rank holds in one state, drawn as a thumbnail of the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rvdcomm.layout import Box
from rvdcomm.picture.shapes import OUTLINE, Point, Rect, Shape, Stroke, Text, text_width
from rvdcomm.planning.path import State

# Paul Tol's "light" scheme: fills that stay apart for colour-blind eyes and carry black text.
LIGHT = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
# The same hues a third darker, for pieces 8 to 15.
DARK = tuple(
    "#" + "".join(f"{int(color[i : i + 2], 16) * 2 // 3:02X}" for i in (1, 3, 5)) for color in LIGHT
)
PALETTE = LIGHT + DARK

EMPTY = "#F5F7FA"
MIXED = "#9AA5B1"
"""Fill of boxes whose pieces are too thin to be told apart."""
THIN = 1.0
HATCH_SPACING = 5.0
MAX_RECTS = 256
"""Coloured rectangles in one cell; the rest is left out, and said so."""


@dataclass(frozen=True)
class Thumbnails:
    """How the cells of a picture are drawn: which dims, how large, which piece in which colour.

    A piece is what one rank holds in the state that cuts the tensor finest; equal pieces have equal
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
        """Height of a cell: as the tensor's, but never a line."""
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

    def draw(self, state: State, rank: int, x: float, y: float) -> Iterator[Shape]:
        """The cell of ``rank``, with its left upper corner at (x, y)."""
        holding = state.placement.by_rank[rank]
        is_part = state.placement.num_parts > 1
        boxes = " ".join(map(str, holding.boxes[:8])) + (" ..." if len(holding.boxes) > 8 else "")
        part = f", part {holding.part}" if is_part else ""
        radius = 0.0 if self.dims else self.width / 2
        yield Rect(x, y, self.width, self.height, EMPTY, radius=radius)
        rects = [replace(rect, x=x + rect.x, y=y + rect.y) for rect in self.rects(holding.boxes)]
        for rect in rects[:MAX_RECTS]:
            yield from hatched(rect, min(HATCH_SPACING, self.width / 8)) if is_part else (rect,)
        yield Rect(
            *(x, y, self.width, self.height, "none", OUTLINE),
            radius=radius,
            tag="cell",
            hint=f"rank {rank}{part}: {boxes}",
        )
        if not rects:
            yield from self._label("empty", "–", rects, x, y)
        elif is_part:
            yield from self._label(f"part {holding.part}", str(holding.part), rects, x, y)

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
        if len(rects) > len(boxes) and any(min(r.width, r.height) <= THIN for r in rects.values()):
            return [self._rect(box, MIXED) for box in boxes]
        return list(rects.values())

    def _label(
        self, text: str, short: str, rects: list[Rect], x: float, y: float
    ) -> Iterator[Shape]:
        """A word on a white plate, where it hides least: in the middle, or below, or above it."""
        size = 10.5 if self.width >= 40 else 9.0
        if text_width(text, size) > self.width - 8:
            text = short
        width, height = text_width(text, size) + 6, size + 4
        middle = y + self.height / 2
        # Down and up by this much, the plate still lies inside the cell.
        edge = self.height / 2 - height / 2 - 2
        is_roomy = len(self.dims) == 2 and edge > height * 0.75
        cy = min(
            (middle, middle + edge, middle - edge) if is_roomy else (middle,),
            key=lambda at: sum(_overlap(r, at - height / 2, at + height / 2) for r in rects),
        )
        cx = x + self.width / 2
        yield Rect(cx - width / 2, cy - height / 2, width, height, "#FFFFFF", radius=4, opacity=0.9)
        yield Text(cx, cy + 0.36 * size, text, size, "middle", tag="label")

    def _rect(self, box: Box, color: str) -> Rect:
        if not self.dims:
            inset = self.width * 0.15
            size = self.width - 2 * inset
            return Rect(inset, inset, size, size, color, radius=size / 2, tag="box")
        spans = [(0.0, self.height), (0.0, self.width)]
        for i, d in enumerate(self.dims, start=2 - len(self.dims)):
            length = spans[i][1]
            low, high = (bound * length / self.shape[d] for bound in (box.lo[i - 2], box.hi[i - 2]))
            high = max(high, low + THIN)
            spans[i] = (min(low, length - (high - low)), min(high, length))
        (top, bottom), (left, right) = spans
        # A white edge sets neighbours of one colour apart, where there is room for it.
        edge = "#FFFFFF" if min(bottom - top, right - left) > 3 else "none"
        return Rect(
            left, top, right - left, bottom - top, color, stroke=edge, stroke_width=0.6, tag="box"
        )

    def _shown(self, boxes: Sequence[Box]) -> list[Box]:
        """Boxes in the dims that are shown, each once; empty ones are not."""
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


def hatched(rect: Rect, spacing: float = HATCH_SPACING) -> tuple[Rect, Stroke]:
    """The same rectangle a third as strong, with diagonals: a value part."""
    channels = (int(rect.fill[i : i + 2], 16) for i in (1, 3, 5))
    fill = "#" + "".join(f"{(c + 2 * 255) // 3:02X}" for c in channels)
    return replace(rect, fill=fill), _hatch(rect, spacing)


def _overlap(rect: Rect, top: float, bottom: float) -> float:
    """How much of ``rect`` lies between two heights."""
    return max(min(rect.y + rect.height, bottom) - max(rect.y, top), 0.0) * rect.width


def _hatch(rect: Rect, spacing: float) -> Stroke:
    """Diagonals inside ``rect``, on one grid for the whole picture."""
    left, top, right, bottom = rect.x, rect.y, rect.x + rect.width, rect.y + rect.height
    if rect.radius:
        # Of a dot, the square inside its circle is hatched.
        inset = rect.width * 0.15
        left, top, right, bottom = left + inset, top + inset, right - inset, bottom - inset
    curves: list[tuple[Point, ...]] = []
    for i in range(int((left + top) / spacing) + 1, int((right + bottom) / spacing) + 1):
        total = i * spacing  # the diagonal x + y = total
        start, stop = max(left, total - bottom), min(right, total - top)
        if stop - start > 0.5:
            curves.append(((start, total - start), (stop, total - stop)))
    return Stroke(tuple(curves), rect.fill, 1.6, tag="hatch")
