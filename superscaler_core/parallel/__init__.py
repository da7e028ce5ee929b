"""Parallel: training and evaluation of a model by a plan in one call."""

from superscaler_core.parallel.batch import Batch
from superscaler_core.parallel.callbacks import Callback
from superscaler_core.parallel.own_batches import OwnBatches
from superscaler_core.parallel.parallel import Evaluated, Parallel
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.parallel.start import parallelize
from superscaler_core.parallel.stats import Stats, StepStats
from superscaler_core.parallel.writers import TensorBoardWriter, WandbWriter

__all__ = [
    "Batch",
    "Callback",
    "Evaluated",
    "OwnBatches",
    "Parallel",
    "Programs",
    "SProgram",
    "Stats",
    "StepStats",
    "TensorBoardWriter",
    "WandbWriter",
    "parallelize",
]
