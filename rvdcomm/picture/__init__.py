"""Picture: who sends what to whom in every step of a plan, as SVG or PNG (extra ``plot``)."""

from rvdcomm.picture.draw import PictureError, draw, svg

__all__ = ["PictureError", "draw", "svg"]
