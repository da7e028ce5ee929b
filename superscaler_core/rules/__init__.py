"""Rules: for every supported ATen op, how it is represented in a graph."""

from superscaler_core.rules import (  # noqa: F401 - each adds its rules to the table
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
from superscaler_core.rules.opaque import opaque
from superscaler_core.rules.records import Ref
from superscaler_core.rules.register import REGISTERED
from superscaler_core.rules.table import RULES, rule, rule_of
from superscaler_core.rules.views import view_annotation

__all__ = [
    "REGISTERED",
    "RULES",
    "Ref",
    "opaque",
    "rule",
    "rule_of",
    "view_annotation",
]
