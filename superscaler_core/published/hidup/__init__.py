"""HiDup: forms for all tensors, chosen so that communication overlaps with computing."""

from superscaler_core.published.hidup.bound import least_secs
from superscaler_core.published.hidup.prices import FormPrices, OurPrices, PublishedPrices
from superscaler_core.published.hidup.pricing import PricedForms
from superscaler_core.published.hidup.problem import (
    Form,
    FormCall,
    FormProblem,
    FormStage,
    FormStrategy,
    Signature,
)
from superscaler_core.published.hidup.proposals import BEAM, duplexed, propose_hidup
from superscaler_core.published.hidup.recurrence import (
    BACKWARDS,
    Duplexed,
    DuplexStage,
    Prediction,
    overlapped_secs,
    serial_secs,
)
from superscaler_core.published.hidup.search import PUBLISHED_MOST_CALLS, all_costs, hidup

__all__ = [
    "BACKWARDS",
    "BEAM",
    "PUBLISHED_MOST_CALLS",
    "DuplexStage",
    "Duplexed",
    "Form",
    "FormCall",
    "FormPrices",
    "FormProblem",
    "FormStage",
    "FormStrategy",
    "OurPrices",
    "Prediction",
    "PricedForms",
    "PublishedPrices",
    "Signature",
    "all_costs",
    "duplexed",
    "hidup",
    "least_secs",
    "overlapped_secs",
    "propose_hidup",
    "serial_secs",
]
