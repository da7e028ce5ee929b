"""GSPMD: a few specs of tensors, completed by propagation along the loops of ops."""

from superscaler_core.plan.mesh import Mesh
from superscaler_core.published.gspmd.gspmd import complete, gspmd
from superscaler_core.published.gspmd.price import Conflict, Prices
from superscaler_core.published.gspmd.propagate import Propagated, propagate

__all__ = ["Conflict", "Mesh", "Prices", "Propagated", "complete", "gspmd", "propagate"]
