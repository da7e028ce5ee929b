"""Running a program on this rank of a process group (docs/executors.md)."""

from rvdcomm.run.agree import compare_requests, exchange_posts
from rvdcomm.run.choice import executor_name
from rvdcomm.run.local import add_into
from rvdcomm.run.request import check_in_group
from rvdcomm.run.shared_memory.rendezvous import domains
from rvdcomm.run.world import World

__all__ = [
    "World",
    "add_into",
    "check_in_group",
    "compare_requests",
    "domains",
    "exchange_posts",
    "executor_name",
]
