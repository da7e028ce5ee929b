"""Validate: a plan is complete, possible, and fits the devices' memory."""

from superscaler_core.validate.coverage import check_assigned, check_coverage
from superscaler_core.validate.memory import STATES, DeviceMemory, check_memory, memory_of
from superscaler_core.validate.placement import check_placement

__all__ = [
    "STATES",
    "DeviceMemory",
    "check_assigned",
    "check_coverage",
    "check_memory",
    "check_placement",
    "memory_of",
]
