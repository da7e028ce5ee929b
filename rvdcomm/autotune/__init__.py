"""Autotune: of the best few plans, the one that is fastest on this machine."""

from rvdcomm.autotune.recipes import Tuned
from rvdcomm.autotune.tune import tune

__all__ = ["Tuned", "tune"]
