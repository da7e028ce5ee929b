"""Adapters to other systems, one package each; none is imported by ``import rvdcomm``."""

from rvdcomm.interop.dtensor.placements import sharding_of

__all__ = [
    "sharding_of",
]
