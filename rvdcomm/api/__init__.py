"""The functions that people call to move tensors on a process group."""

from rvdcomm.api.arrival import Arrival, Difference, digest, prove
from rvdcomm.api.many import redistribute_many
from rvdcomm.api.many_memory import ManyMemory
from rvdcomm.api.memory import empty, empty_cache
from rvdcomm.api.notes import tell, told
from rvdcomm.api.one import redistribute
from rvdcomm.api.options import CallOptions
from rvdcomm.api.pending import Pending, drain
from rvdcomm.api.process_groups import known_groups
from rvdcomm.api.recovery import abort, restart
from rvdcomm.api.redistributor import Redistributor
from rvdcomm.api.tensors import fault_of, fault_of_mode, fault_of_out, resolved
from rvdcomm.api.traced import breaks_graph
from rvdcomm.run.waiting import timeout

__all__ = [
    "Arrival",
    "CallOptions",
    "Difference",
    "ManyMemory",
    "Pending",
    "Redistributor",
    "abort",
    "breaks_graph",
    "digest",
    "drain",
    "empty",
    "empty_cache",
    "fault_of",
    "fault_of_mode",
    "fault_of_out",
    "known_groups",
    "prove",
    "redistribute",
    "redistribute_many",
    "resolved",
    "restart",
    "tell",
    "timeout",
    "told",
]
