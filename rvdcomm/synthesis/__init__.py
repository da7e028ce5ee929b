"""Synthesis: trees that serve what two layouts ask for on any network, near the best time."""

from rvdcomm.synthesis.forest import Forest, Tree
from rvdcomm.synthesis.packing import forest_of, pack

__all__ = ["Forest", "Tree", "forest_of", "pack"]
