"""Parallel: training and evaluation of a model by a plan in one call."""

from superscaler_core.parallel.batch import Batch
from superscaler_core.parallel.own_batches import OwnBatches
from superscaler_core.parallel.parallel import Evaluated, Parallel
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.parallel.start import parallelize

__all__ = [
    "Batch",
    "Evaluated",
    "OwnBatches",
    "Parallel",
    "Programs",
    "SProgram",
    "parallelize",
]
