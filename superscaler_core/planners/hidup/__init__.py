"""HiDup: a strategy of forms for all tensors, whose communication overlaps with computing."""

from superscaler_core.planners.hidup.problem import (
    Form,
    FormCall,
    FormProblem,
    FormStage,
    FormStrategy,
    Signature,
)
from superscaler_core.planners.hidup.recurrence import (
    BACKWARDS,
    Duplexed,
    DuplexStage,
    overlapped_secs,
    serial_secs,
)
from superscaler_core.planners.hidup.search import PUBLISHED_MOST_CALLS, all_costs, hidup

__all__ = [
    "BACKWARDS",
    "PUBLISHED_MOST_CALLS",
    "DuplexStage",
    "Duplexed",
    "Form",
    "FormCall",
    "FormProblem",
    "FormStage",
    "FormStrategy",
    "Signature",
    "all_costs",
    "hidup",
    "overlapped_secs",
    "serial_secs",
]
