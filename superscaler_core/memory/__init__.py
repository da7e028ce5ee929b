"""Memory: the peak memory of every device in a step."""

from superscaler_core.memory.account import Moment
from superscaler_core.memory.footprint import footprints
from superscaler_core.memory.memory import (
    STATES,
    DeviceMemory,
    check_memory,
    memory_of,
    step_peaks_of,
)
from superscaler_core.memory.step_peaks import StepPeak, StepPeaks
from superscaler_core.memory.stored import StoredMemory

__all__ = [
    "STATES",
    "DeviceMemory",
    "Moment",
    "StepPeak",
    "StepPeaks",
    "StoredMemory",
    "check_memory",
    "footprints",
    "memory_of",
    "step_peaks_of",
]
