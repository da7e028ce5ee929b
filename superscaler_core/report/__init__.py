"""Report: the communication and memory of a plan, as tables for people."""

from superscaler_core.report.explain import explain_ops, split_text
from superscaler_core.report.explain_edge import explain_edge
from superscaler_core.report.move import PricedMove, moves_of
from superscaler_core.report.report import Report, report_of

__all__ = [
    "PricedMove",
    "Report",
    "explain_edge",
    "explain_ops",
    "moves_of",
    "report_of",
    "split_text",
]
