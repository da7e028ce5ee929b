"""Picture: who sends what to whom in every step of a plan, as SVG or PNG."""

from rvdcomm.picture.draw import PictureError, draw, svg

__all__ = ["PictureError", "draw", "svg"]
