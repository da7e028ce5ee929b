"""Layouts: which rank holds which box of a tensor."""

from rvdcomm.layout.arrays import Ints, Mask
from rvdcomm.layout.box import MAX_DIMS, Box, merged
from rvdcomm.layout.dtypes import (
    ITEM_BYTES,
    NOT_SUMMED,
    SUMMED_BY_BACKENDS,
    check_summable,
    dtype_name,
)
from rvdcomm.layout.layout import (
    CUT_RULES,
    MAX_RANK,
    MAX_RANKS,
    Cell,
    Cuts,
    Layout,
    balanced_cuts,
    chunk_cuts,
    parse_ranges,
    ranges_text,
    widest_pieces,
)
from rvdcomm.layout.placement import Holding, Holdings
from rvdcomm.layout.rvd import RVD
from rvdcomm.layout.view import View

__all__ = [
    "CUT_RULES",
    "ITEM_BYTES",
    "MAX_DIMS",
    "MAX_RANK",
    "MAX_RANKS",
    "NOT_SUMMED",
    "RVD",
    "SUMMED_BY_BACKENDS",
    "Box",
    "Cell",
    "Cuts",
    "Holding",
    "Holdings",
    "Ints",
    "Layout",
    "Mask",
    "View",
    "balanced_cuts",
    "check_summable",
    "chunk_cuts",
    "dtype_name",
    "merged",
    "parse_ranges",
    "ranges_text",
    "widest_pieces",
]
