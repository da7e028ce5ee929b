"""Networks: the links between ranks, and topologies, which are networks of nested levels."""

from rvdcomm.network.link import Link
from rvdcomm.network.presets import PRESETS
from rvdcomm.network.topology import (
    DEFAULT_LINK,
    MAX_FILE_BYTES,
    MAX_FILE_LEVELS,
    Level,
    Topology,
    blocks,
)

__all__ = [
    "DEFAULT_LINK",
    "MAX_FILE_BYTES",
    "MAX_FILE_LEVELS",
    "PRESETS",
    "Level",
    "Link",
    "Topology",
    "blocks",
]
