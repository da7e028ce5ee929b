"""Training: a trainer of a program, its state, and what of it is saved."""

from superscaler_core.training.live_bytes import StorageMeter
from superscaler_core.training.load import in_threads, module_from
from superscaler_core.training.torch_record import recorded_by_torch

__all__ = [
    "StorageMeter",
    "in_threads",
    "module_from",
    "recorded_by_torch",
]
