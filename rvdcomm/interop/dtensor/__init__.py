"""DTensor: layouts from and to meshes and placements, and redistributions that our plans run."""

from rvdcomm.interop.dtensor.context import Tally, planned
from rvdcomm.interop.dtensor.many import local_tensor, redistribute_many, union_of
from rvdcomm.interop.dtensor.placements import (
    check_sums,
    layout_of,
    layout_of_dtensor,
    placements_of,
    sharding_of,
    sharding_of_dtensor,
)
from rvdcomm.interop.dtensor.private import key_of, spec_of
from rvdcomm.interop.dtensor.redistribute import placeholder, redistribute
from rvdcomm.interop.dtensor.slabs import slabs_of, slices_of

__all__ = [
    "Tally",
    "check_sums",
    "key_of",
    "layout_of",
    "layout_of_dtensor",
    "local_tensor",
    "placeholder",
    "placements_of",
    "planned",
    "redistribute",
    "redistribute_many",
    "sharding_of",
    "sharding_of_dtensor",
    "slabs_of",
    "slices_of",
    "spec_of",
    "union_of",
]
