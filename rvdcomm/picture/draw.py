"""Picture: who sends what to whom in every step of a plan, as SVG or PNG.

One list of shapes (``scene.py``) is written either as SVG text or by matplotlib, so that both are
the same picture.
"""

from __future__ import annotations

from pathlib import Path as FilePath

from rvdcomm.picture.png import PictureError, png_of
from rvdcomm.picture.scene import scene_of
from rvdcomm.picture.svg import svg_of
from rvdcomm.plans.planner import Plan

__all__ = ["PictureError", "draw", "svg"]


def svg(plan: Plan) -> str:
    """The picture of ``plan`` as an SVG document; equal plans give equal text.

    >>> from rvdcomm import Layout, plan
    >>> src, dst = Layout((6,), "R(1)V(1)D(2)"), Layout((6,), "R(1)V(1)D(3)")
    >>> svg(plan(src, dst)).count('class="message"')
    2
    """
    return svg_of(scene_of(plan))


def draw(plan: Plan, file: str | FilePath) -> None:
    """Write the picture of ``plan`` to ``file``, whose name ends in ``.svg`` or ``.png``.

    A row a state and a column a rank: every cell is a small tensor with the boxes that the rank
    holds in colour. Arrows between rows are the messages of a step.

    Raises:
        PictureError: the name ends otherwise, or a PNG is asked for without matplotlib.
    """
    file = FilePath(file)
    match file.suffix:
        case ".svg":
            file.write_text(svg(plan), encoding="utf-8")
        case ".png":
            file.write_bytes(png_of(scene_of(plan)))
        case _:
            raise PictureError(f"cannot draw to {str(file)!r}: use a name in .svg or .png.")
