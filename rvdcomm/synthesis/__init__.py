"""Synthesis: trees that serve what two layouts ask for on any network, near the best time."""

from rvdcomm.synthesis.beats import Beats, beats_in_full, beats_of
from rvdcomm.synthesis.forest import Forest, Pair, Tree
from rvdcomm.synthesis.packing import pack
from rvdcomm.synthesis.search import (
    MAX_PACKED_RANKS,
    MAX_QUICK_RANKS,
    MAX_RANKS,
    bare_forest,
    forest_of,
    forests,
    is_packed,
    least_secs,
    quick_forest,
    relayed_forests,
)

__all__ = [
    "MAX_PACKED_RANKS",
    "MAX_QUICK_RANKS",
    "MAX_RANKS",
    "Beats",
    "Forest",
    "Pair",
    "Tree",
    "bare_forest",
    "beats_in_full",
    "beats_of",
    "forest_of",
    "forests",
    "is_packed",
    "least_secs",
    "pack",
    "quick_forest",
    "relayed_forests",
]
