"""The space of choices: nodes with choices, their costs, and costs between neighbours."""

from superscaler_core.space.brute_force import brute_force
from superscaler_core.space.choices import Choice
from superscaler_core.space.elimination import Core
from superscaler_core.space.priced import PricedSpace, price_space
from superscaler_core.space.space import (
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
    "Choice",
    "Core",
    "PricedSpace",
    "Solution",
    "Space",
    "SpaceEdge",
    "SpaceNode",
    "brute_force",
    "price_space",
]
