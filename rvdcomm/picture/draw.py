"""Draw: the picture of a plan as a file. matplotlib draws it and writes both formats."""

from __future__ import annotations

import io
from pathlib import Path as FilePath
from typing import Any

from rvdcomm import Plan
from rvdcomm.whole_file import write_whole

STYLE: list[Any] = [
    "default",
    {"svg.fonttype": "none", "svg.hashsalt": "rvdcomm", "hatch.linewidth": 1.6},
]
"""Overrides the user's matplotlibrc. Texts stay texts, and ids in an SVG are reproducible."""
PIXELS_PER_UNIT = 2
"""Resolution of a PNG; a unit of a picture is a point of matplotlib's."""


class PictureError(ValueError):
    """A picture cannot be written as asked: an unknown kind of file, or matplotlib is missing."""


def svg(plan: Plan) -> str:
    """The picture of ``plan`` as an SVG document; equal plans give equal text.

    Every message is an element with the id ``message-STEP-SRC-DST``, every cell one with the id
    ``cell-STATE-RANK``.

    Raises:
        PictureError: matplotlib is not installed.
    """
    return _written(plan, "svg").decode()


def draw(plan: Plan, file: str | FilePath) -> None:
    """Write the picture of ``plan`` to ``file``, whose name ends in ``.svg`` or ``.png``.

    It has a row per state and a column per rank. A cell shows the tensor, with the boxes that the
    rank holds in colour. Arrows between two rows are the messages of a step.

    Raises:
        PictureError: the name ends otherwise, or matplotlib is not installed.
    """
    file = FilePath(file)
    if file.suffix not in (".svg", ".png"):
        raise PictureError(f"cannot draw to {str(file)!r}: use a name in .svg or .png.")
    write_whole(file, _written(plan, file.suffix[1:]))


def _written(plan: Plan, kind: str) -> bytes:
    try:
        import matplotlib.style
    except ImportError:
        raise PictureError("a picture needs matplotlib: pip install 'rvdcomm[plot]'.") from None
    from rvdcomm.picture.scene import figure_of

    # Without a date and a version, the same plan gives the same bytes.
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    file = io.BytesIO()
    with matplotlib.style.context(STYLE):
        figure_of(plan).savefig(file, format=kind, dpi=72 * PIXELS_PER_UNIT, metadata=metadata)
    return file.getvalue()
