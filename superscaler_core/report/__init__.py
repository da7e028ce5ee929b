"""Report: the communication and memory of a plan, as tables for people."""

from superscaler_core.report.explain import explain_ops, split_text
from superscaler_core.report.explain_edge import explain_edge
from superscaler_core.report.move import PricedMove, moves_of
from superscaler_core.report.report import TITLES, Report, report_of
from superscaler_core.report.words import plan_in_words

__all__ = [
    "TITLES",
    "PricedMove",
    "Report",
    "explain_edge",
    "explain_ops",
    "moves_of",
    "plan_in_words",
    "report_of",
    "split_text",
]
