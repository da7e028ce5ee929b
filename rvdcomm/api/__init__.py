"""The functions that people call to move tensors on a process group."""

from rvdcomm.api.many import redistribute_many
from rvdcomm.api.one import redistribute
from rvdcomm.api.pending import Pending, drain
from rvdcomm.api.redistributor import Redistributor

__all__ = ["Pending", "Redistributor", "drain", "redistribute", "redistribute_many"]
