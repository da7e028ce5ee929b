"""Materialize: from a plan to its communication and its step program.

Wherever the shards that are written differ from the shards that are read, an rvdcomm plan moves
them. Then each stage is written out, forward and backward, in one order for all devices.
"""

from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.events import schedule_of
from superscaler_core.materialize.materialized import Materialized, materialize
from superscaler_core.materialize.operands import Operands, instruction_of
from superscaler_core.materialize.segments import Segment
from superscaler_core.materialize.sequence import Compute
from superscaler_core.materialize.transfer import Transfer

__all__ = [
    "Compute",
    "Edge",
    "Materialized",
    "Operands",
    "Segment",
    "Transfer",
    "instruction_of",
    "materialize",
    "schedule_of",
]
