"""Exports: plans in forms that other programs read, with a reader that proves them."""

from rvdcomm.exports.msccl import msccl_xml
from rvdcomm.exports.of_program import schedule_of
from rvdcomm.exports.schedule import (
    MAX_SCHEDULE_BYTES,
    Input,
    Message,
    Output,
    Round,
    Schedule,
    Sum,
    Tensor,
    Value,
)

__all__ = [
    "MAX_SCHEDULE_BYTES",
    "Input",
    "Message",
    "Output",
    "Round",
    "Schedule",
    "Sum",
    "Tensor",
    "Value",
    "msccl_xml",
    "schedule_of",
]
