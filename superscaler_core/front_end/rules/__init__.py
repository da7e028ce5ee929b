"""Rules: for every supported ATen op, how it is represented in a graph."""

from superscaler_core.front_end.rules import (  # noqa: F401 - each adds its rules to the table
    attention,
    elementwise,
    functions,
    image,
    index,
    linear,
    loss,
    norm,
    random,
    reduce,
    registered,
    rows,
    shape,
)
from superscaler_core.front_end.rules.opaque import opaque
from superscaler_core.front_end.rules.table import RULES, rule, rule_of

__all__ = ["RULES", "opaque", "rule", "rule_of"]
