"""Memory: the peak memory of every device in a step."""

from superscaler_core.memory.account import Moment, Peak
from superscaler_core.memory.changes import MemoryChange, MemoryChanges
from superscaler_core.memory.footprint import footprints, in_reverse
from superscaler_core.memory.kept_by_part import PartMemory, memory_by_part
from superscaler_core.memory.memory import (
    STATES,
    DeviceMemory,
    changes_of,
    check_memory,
    memory_of,
    step_peaks_of,
)
from superscaler_core.memory.step_peaks import StepPeak, StepPeaks
from superscaler_core.memory.stored import StoredMemory

__all__ = [
    "STATES",
    "DeviceMemory",
    "MemoryChange",
    "MemoryChanges",
    "Moment",
    "PartMemory",
    "Peak",
    "StepPeak",
    "StepPeaks",
    "StoredMemory",
    "changes_of",
    "check_memory",
    "footprints",
    "in_reverse",
    "memory_by_part",
    "memory_of",
    "step_peaks_of",
]
