"""Evaluation: candidates of planners are compiled, their memory is read, their steps compared."""

from superscaler_core.evaluation.evaluate import compiled
from superscaler_core.evaluation.lower_bound import LowerBound
from superscaler_core.evaluation.microbatches import Captured, Resizing
from superscaler_core.evaluation.offers import with_overlap
from superscaler_core.evaluation.request import (
    EXACT,
    FULL,
    Candidate,
    Request,
    Scope,
    SearchPlanner,
    Trial,
)
from superscaler_core.evaluation.workers import Workers

__all__ = [
    "EXACT",
    "FULL",
    "Candidate",
    "Captured",
    "LowerBound",
    "Request",
    "Resizing",
    "Scope",
    "SearchPlanner",
    "Trial",
    "Workers",
    "compiled",
    "with_overlap",
]
