"""DTensor: layouts from and to meshes and placements, and redistributions that our plans run."""

from rvdcomm.interop.dtensor.context import Tally, planned
from rvdcomm.interop.dtensor.many import redistribute_many
from rvdcomm.interop.dtensor.placements import (
    layout_of,
    layout_of_dtensor,
    placements_of,
    sharding_of,
)
from rvdcomm.interop.dtensor.redistribute import placeholder, redistribute

__all__ = [
    "Tally",
    "layout_of",
    "layout_of_dtensor",
    "placeholder",
    "placements_of",
    "planned",
    "redistribute",
    "redistribute_many",
    "sharding_of",
]
