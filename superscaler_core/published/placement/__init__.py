"""Placement of whole operations on devices: published planners over one problem."""

from superscaler_core.published.placement.brute_force import every_placement
from superscaler_core.published.placement.earliest_finish import earliest_finish
from superscaler_core.published.placement.expert import by_patterns, expert
from superscaler_core.published.placement.integer import integer_placement
from superscaler_core.published.placement.min_cut import min_cut
from superscaler_core.published.placement.place_graph import (
    PLACERS,
    assign,
    place_graph,
    search_placement,
)
from superscaler_core.published.placement.problem import (
    Operation,
    OperationResult,
    PlacementProblem,
    with_backward,
)

__all__ = [
    "PLACERS",
    "Operation",
    "OperationResult",
    "PlacementProblem",
    "assign",
    "by_patterns",
    "earliest_finish",
    "every_placement",
    "expert",
    "integer_placement",
    "min_cut",
    "place_graph",
    "search_placement",
    "with_backward",
]
