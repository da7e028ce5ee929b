"""The space of choices: nodes with choices, their costs, and costs between neighbours."""

from superscaler_core.planners.space.brute_force import brute_force
from superscaler_core.planners.space.space import (
    Array,
    Assignment,
    Solution,
    Space,
    SpaceEdge,
    SpaceNode,
)

__all__ = [
    "Array",
    "Assignment",
    "Solution",
    "Space",
    "SpaceEdge",
    "SpaceNode",
    "brute_force",
]
