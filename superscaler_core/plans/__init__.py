"""Plans: short functions that parallelize a model with the three primitives of ``Plan``.

A plan is called with a new ``Plan`` of a captured model, and with its options by name. Its
docstring says what it communicates for every microbatch, and what a device holds.
"""

from superscaler_core.plans.pipeline import Pipeline
from superscaler_core.plans.row import plan_row
from superscaler_core.plans.table import PLANS

__all__ = ["PLANS", "Pipeline", "plan_row"]
