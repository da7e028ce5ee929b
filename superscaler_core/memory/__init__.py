"""Memory: what every device holds at the worst moment of a step."""

from superscaler_core.memory.memory import STATES, DeviceMemory, check_memory, memory_of

__all__ = ["STATES", "DeviceMemory", "check_memory", "memory_of"]
