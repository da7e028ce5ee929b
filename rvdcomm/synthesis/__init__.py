"""Synthesis: trees that serve what two layouts ask for on any network, near the best time."""

from rvdcomm.synthesis.forest import Forest, Pair, Tree
from rvdcomm.synthesis.packing import forest_of, pack

__all__ = ["Forest", "Pair", "Tree", "forest_of", "pack"]
