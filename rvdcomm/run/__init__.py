"""Running a program on this rank of a process group (docs/executors.md)."""

from rvdcomm.run.agree import compare_requests, exchange_posts, read_post
from rvdcomm.run.call_memory import CallMemory
from rvdcomm.run.choice import executor_name
from rvdcomm.run.local import add_into, operation
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.request import TransitionRequest, check_in_group
from rvdcomm.run.schedule import Do
from rvdcomm.run.shared_memory.rendezvous import SocketChannel, domains, unix_socket
from rvdcomm.run.shared_memory.staging import PrivateStaging
from rvdcomm.run.stage import native_stage
from rvdcomm.run.world import World

__all__ = [
    "CallMemory",
    "Do",
    "PrivateStaging",
    "RankProgram",
    "SocketChannel",
    "TransitionRequest",
    "World",
    "add_into",
    "check_in_group",
    "compare_requests",
    "domains",
    "exchange_posts",
    "executor_name",
    "native_stage",
    "operation",
    "read_post",
    "unix_socket",
]
