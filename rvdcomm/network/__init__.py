"""Networks: the links between ranks, and topologies, which are networks of nested levels."""

from rvdcomm.network import shapes
from rvdcomm.network.link import Link
from rvdcomm.network.machines import MACHINES, SHAPES
from rvdcomm.network.network import (
    Links,
    Network,
    Node,
    Switch,
    Wire,
    both_ways,
    check_links,
    connected,
    reach,
)
from rvdcomm.network.notation import rate_text
from rvdcomm.network.presets import PRESETS
from rvdcomm.network.routes import alpha_secs_along
from rvdcomm.network.smi import parse_matrix
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
    "MACHINES",
    "MAX_FILE_BYTES",
    "MAX_FILE_LEVELS",
    "PRESETS",
    "SHAPES",
    "Level",
    "Link",
    "Links",
    "Network",
    "Node",
    "Switch",
    "Topology",
    "Wire",
    "alpha_secs_along",
    "blocks",
    "both_ways",
    "check_links",
    "connected",
    "parse_matrix",
    "rate_text",
    "reach",
    "shapes",
]
