"""PNG: a picture drawn by matplotlib, the optional extra ``plot``."""

from __future__ import annotations

import io
from typing import Any

from rvdcomm.picture.shapes import Picture, Point, Polygon, Rect, Shape, Stroke, Text

PIXELS_AN_INCH = 72
"""Of a picture's own pixels: one is then a point, so that pens and fonts need no conversion."""
SCALE = 2
"""PNG pixels for each of the picture's own."""


class PictureError(ValueError):
    """A picture cannot be written as asked: an unknown kind of file, or matplotlib is missing."""


def png_of(picture: Picture) -> bytes:
    """The picture as a PNG file, at twice its size in pixels.

    Raises:
        PictureError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError(
            "a PNG picture needs matplotlib: pip install 'rvdcomm[plot]', or write an .svg file."
        ) from None
    inches = picture.width / PIXELS_AN_INCH, picture.height / PIXELS_AN_INCH
    figure = Figure(figsize=inches, dpi=PIXELS_AN_INCH * SCALE, facecolor="#FFFFFF")
    axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    for order, shape in enumerate(picture.shapes):
        _draw(axes, shape, order)
    file = io.BytesIO()
    # Without the version of matplotlib in it, the same picture gives the same bytes.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(file, metadata={"Software": None})
    return file.getvalue()


def _draw(axes: Any, shape: Shape, order: int) -> None:
    from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Rectangle
    from matplotlib.patches import Polygon as PolygonPatch

    match shape:
        case Rect():
            corner, size = (shape.x, shape.y), (shape.width, shape.height)
            look: dict[str, Any] = {
                "facecolor": shape.fill,
                "edgecolor": shape.stroke,
                "linewidth": shape.stroke_width if shape.stroke != "none" else 0.0,
                "alpha": shape.opacity,
                "zorder": order,
            }
            radius = min(shape.radius, shape.width / 2, shape.height / 2)
            if radius and 2 * radius == shape.width == shape.height:
                axes.add_patch(Circle((shape.x + radius, shape.y + radius), radius, **look))
            elif radius:
                style = f"round,pad=0,rounding_size={radius}"
                axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=style, **look))
            else:
                axes.add_patch(Rectangle(corner, *size, **look))
        case Stroke():
            pen: dict[str, Any] = {"linewidth": shape.width, "capstyle": "butt"}
            if shape.dashes:
                # matplotlib counts dashes in pen widths.
                pen["linestyle"] = (0, [dash / shape.width for dash in shape.dashes])
            if shape.curves:
                axes.add_patch(
                    PathPatch(
                        _path(shape.curves),
                        fill=False,
                        edgecolor=shape.color,
                        alpha=shape.opacity,
                        zorder=order,
                        **pen,
                    )
                )
        case Polygon():
            axes.add_patch(
                PolygonPatch(shape.points, facecolor=shape.fill, linewidth=0, zorder=order)
            )
        case Text():
            axes.text(
                *(shape.x, shape.y, shape.text.replace("$", r"\$")),
                fontsize=shape.size,
                fontweight="bold" if shape.bold else "normal",
                fontfamily="DejaVu Sans Mono" if shape.mono else "DejaVu Sans",
                color=shape.color,
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="baseline",
                zorder=order,
            )


def _path(curves: tuple[tuple[Point, ...], ...]) -> Any:
    from matplotlib.path import Path

    vertices: list[Point] = []
    codes: list[Any] = []
    for curve in curves:
        vertices += curve
        codes += [Path.MOVETO] + [Path.CURVE4 if len(curve) == 4 else Path.LINETO] * (
            len(curve) - 1
        )
    return Path(vertices, codes)
