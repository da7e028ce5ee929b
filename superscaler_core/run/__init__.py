"""Run: executes a generated program on real ranks, or on threads of one process."""

from superscaler_core.run.evaluate import run_part
from superscaler_core.run.host import Arrival, Host
from superscaler_core.run.lines import (
    Add,
    BlockFunction,
    CallExpression,
    Fixed,
    Function,
    Join,
    Line,
    PartExpression,
    SumExpression,
    Tuple,
    Variable,
)
from superscaler_core.run.rank import Rank
from superscaler_core.run.trail import Mark, Trail
from superscaler_core.run.transport import DistCall, DistTransport, ThreadTransport, Transport

__all__ = [
    "Add",
    "Arrival",
    "BlockFunction",
    "CallExpression",
    "DistCall",
    "DistTransport",
    "Fixed",
    "Function",
    "Host",
    "Join",
    "Line",
    "Mark",
    "PartExpression",
    "Rank",
    "SumExpression",
    "ThreadTransport",
    "Trail",
    "Transport",
    "Tuple",
    "Variable",
    "run_part",
]
