"""Plan: what an sProgram decides about a graph, as an object to fill and as a value to keep."""

from superscaler_core.plan.coverage import check_assigned, check_coverage
from superscaler_core.plan.decisions import Chosen, Decisions, PlacedPart
from superscaler_core.plan.placement import check_placement
from superscaler_core.plan.plan import Axis, Device, Plan, Stage
from superscaler_core.plan.savings import Window

__all__ = [
    "Axis",
    "Chosen",
    "Decisions",
    "Device",
    "PlacedPart",
    "Plan",
    "Stage",
    "Window",
    "check_assigned",
    "check_coverage",
    "check_placement",
]
