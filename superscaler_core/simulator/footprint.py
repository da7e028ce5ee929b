"""Footprints of stages, as the memory model of ``validate`` finds them."""

from superscaler_core.validate.footprint import Footprint, footprints
from superscaler_core.validate.moments import Moment, Peak

__all__ = ["Footprint", "Moment", "Peak", "footprints"]
