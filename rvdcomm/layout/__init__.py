"""Layouts: which rank holds which box of a tensor; topologies: the hosts and links of the ranks."""

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
from rvdcomm.layout.link import Link
from rvdcomm.layout.placement import Holding, Holdings
from rvdcomm.layout.presets import PRESETS
from rvdcomm.layout.rvd import RVD
from rvdcomm.layout.topology import (
    DEFAULT_LINK,
    MAX_FILE_BYTES,
    MAX_FILE_LEVELS,
    Level,
    Topology,
    blocks,
)
from rvdcomm.layout.view import View

__all__ = [
    "CUT_RULES",
    "DEFAULT_LINK",
    "ITEM_BYTES",
    "MAX_DIMS",
    "MAX_FILE_BYTES",
    "MAX_FILE_LEVELS",
    "MAX_RANK",
    "MAX_RANKS",
    "NOT_SUMMED",
    "PRESETS",
    "RVD",
    "SUMMED_BY_BACKENDS",
    "Box",
    "Cell",
    "Cuts",
    "Holding",
    "Holdings",
    "Ints",
    "Layout",
    "Level",
    "Link",
    "Mask",
    "Topology",
    "View",
    "balanced_cuts",
    "blocks",
    "check_summable",
    "chunk_cuts",
    "dtype_name",
    "merged",
    "parse_ranges",
    "ranges_text",
    "widest_pieces",
]
