"""SVG: a picture as text, written by hand."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from rvdcomm.picture.shapes import Picture, Point, Polygon, Rect, Shape, Stroke, Text

SANS = "'DejaVu Sans', Verdana, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"

Attributes = dict[str, str | float | None]


def svg_of(picture: Picture) -> str:
    """The picture as one SVG document; the same picture gives the same text."""
    width, height = _number(picture.width), _number(picture.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{SANS}">'
    )
    page = _element("rect", {"width": picture.width, "height": picture.height, "fill": "#FFFFFF"})
    return "\n".join([head, page, *map(_shape, picture.shapes), "</svg>"]) + "\n"


def _shape(shape: Shape) -> str:
    match shape:
        case Rect():
            return _rect(shape)
        case Stroke():
            return _stroke(shape)
        case Polygon():
            return _polygon(shape)
        case Text():
            return _text(shape)


def _rect(s: Rect) -> str:
    has_edge = s.stroke != "none"
    attributes: Attributes = {
        "class": s.tag,
        "x": s.x,
        "y": s.y,
        "width": s.width,
        "height": s.height,
        "rx": s.radius or None,
        "fill": s.fill,
        "stroke": s.stroke if has_edge else None,
        "stroke-width": s.stroke_width if has_edge else None,
        "opacity": _opacity(s.opacity),
    }
    return _element("rect", attributes, _title(s.hint))


def _stroke(s: Stroke) -> str:
    attributes: Attributes = {
        "class": s.tag,
        "d": "".join(
            f"M{_points(curve[:1])}{'C' if len(curve) == 4 else 'L'}{_points(curve[1:])}"
            for curve in s.curves
        ),
        "fill": "none",
        "stroke": s.color,
        "stroke-width": s.width,
        "stroke-dasharray": " ".join(map(_number, s.dashes)),
        "opacity": _opacity(s.opacity),
    }
    return _element("path", attributes, _title(s.hint))


def _polygon(s: Polygon) -> str:
    return _element("polygon", {"class": s.tag, "points": _points(s.points), "fill": s.fill})


def _text(s: Text) -> str:
    attributes: Attributes = {
        "class": s.tag,
        "x": s.x,
        "y": s.y,
        "font-family": MONO if s.mono else None,
        "font-size": s.size,
        "font-weight": "bold" if s.bold else None,
        "text-anchor": s.anchor if s.anchor != "start" else None,
        "fill": s.color,
        "xml:space": "preserve",
    }
    return _element("text", attributes, escape(s.text))


def _element(name: str, attributes: Attributes, inside: str = "") -> str:
    """One element; attributes that are None or empty are left out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None and value != "":
            text = value if isinstance(value, str) else _number(value)
            words.append(f"{key}={quoteattr(text)}")
    head = " ".join(words)
    return f"<{head}>{inside}</{name}>" if inside else f"<{head}/>"


def _title(hint: str) -> str:
    return f"<title>{escape(hint)}</title>" if hint else ""


def _opacity(opacity: float) -> float | None:
    return opacity if opacity < 1 else None


def _points(points: tuple[Point, ...]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """A length to a hundredth of a pixel, as short as it can be written."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
