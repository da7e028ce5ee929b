"""Graph: a model as ops on tensors, with the loops that index them, and parts of an op's work."""

from superscaler_core.graph.annotation import Operand
from superscaler_core.graph.graph import TokenSlices
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.repeats import is_map

__all__ = [
    "Invocation",
    "Operand",
    "TokenSlices",
    "is_map",
]
