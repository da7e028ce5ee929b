"""Plan: the object that an sProgram fills with decisions, and those decisions as a frozen value."""

from superscaler_core.plan.coverage import check_assigned, check_coverage
from superscaler_core.plan.decisions import DECISIONS_SUFFIX, Chosen, Decisions, PlacedPart
from superscaler_core.plan.keep import Keep
from superscaler_core.plan.mesh import Mesh
from superscaler_core.plan.op_split import OpSplit
from superscaler_core.plan.overlap import NO_OVERLAP, Overlap
from superscaler_core.plan.placement import Placement
from superscaler_core.plan.plan import Axis, Device, Plan, Stage
from superscaler_core.plan.savings import FsdpUnit
from superscaler_core.plan.workers import check_placement

__all__ = [
    "DECISIONS_SUFFIX",
    "NO_OVERLAP",
    "Axis",
    "Chosen",
    "Decisions",
    "Device",
    "FsdpUnit",
    "Keep",
    "Mesh",
    "OpSplit",
    "Overlap",
    "PlacedPart",
    "Placement",
    "Plan",
    "Stage",
    "check_assigned",
    "check_coverage",
    "check_placement",
]
