"""Asynchronous pipelines: PipeDream, PipeDream-2BW, AMPNet and PipeMare.

The functions here are the schedules; ``plans`` has the plans of the same names.
"""

from superscaler_core.published.asynchronous.correction import PipeMare
from superscaler_core.published.asynchronous.schedules import (
    ampnet,
    pipedream,
    pipedream_2bw,
    pipemare,
    with_updates,
)

__all__ = ["PipeMare", "ampnet", "pipedream", "pipedream_2bw", "pipemare", "with_updates"]
