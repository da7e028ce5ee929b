"""Memory: the peak memory of every device in a step."""

from superscaler_core.memory.memory import (
    STATES,
    DeviceMemory,
    check_memory,
    memory_of,
    step_peaks_of,
)
from superscaler_core.memory.step_peaks import StepPeak, StepPeaks

__all__ = [
    "STATES",
    "DeviceMemory",
    "StepPeak",
    "StepPeaks",
    "check_memory",
    "memory_of",
    "step_peaks_of",
]
