"""Plans: short functions that parallelize a model with the three primitives of ``Plan``.

A plan is called with a new ``Plan`` of a captured model, and with its options by name. Its
docstring says what it communicates for every microbatch, and what a device holds.
"""

from superscaler_core.plans.every import fill
from superscaler_core.plans.option_texts import cuts, parse_plan, readers_of
from superscaler_core.plans.pieces.axial import EVOFORMER, Cut
from superscaler_core.plans.pieces.follow import followed
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.plans.pipeline import Pipeline
from superscaler_core.plans.row import plan_row
from superscaler_core.plans.table import PLANS

__all__ = [
    "EVOFORMER",
    "PLANS",
    "Cut",
    "Pipeline",
    "cuts",
    "fill",
    "followed",
    "parse_plan",
    "plan_row",
    "readers_of",
    "shard_storage",
    "stages_of_blocks",
]
