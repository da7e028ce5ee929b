"""Memory: the peak memory of every device in a step."""

from superscaler_core.memory.memory import STATES, DeviceMemory, check_memory, memory_of

__all__ = ["STATES", "DeviceMemory", "check_memory", "memory_of"]
