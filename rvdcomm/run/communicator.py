"""Communicators: backends of our own over some ranks of a group, made from the group's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rvdcomm.run.waiting import of_block

MAX_TAG = (1 << 30) - 1
"""Largest tag of calls that are not posted. Tags of gloo have 31 bits; the top bit marks posted
calls."""

LANE_SHIFT, NUM_LANES = 20, 1 << 10
"""In the tag of a posted call, the lowest ``LANE_SHIFT`` bits count and the bits above hold the
lane; lane numbers are used again after ``NUM_LANES``."""


class Subgroup:
    """A communicator of some ranks of a group, known to its members alone.

    ``torch.distributed.new_group`` must be called by every rank of the job, also by those that take
    no part in a transition; with ``use_local_synchronization`` its ranks deadlock as soon as they
    are in unequal numbers of groups (pytorch#189073). So the backend is made here, from the store.

    Ranks are numbered within the subgroup, and every operation returns a work object for ``wait``.
    ``sends_best`` says that single sends and receives are the fastest way to do an all_to_all and
    an all_gather.
    """

    def __init__(self, backend: Any, *, sends_best: bool) -> None:
        self._backend = backend
        self.sends_best = sends_best
        self._num_lanes = 0

    def lane(self) -> int:
        """The lane of the next compiled collective; all ranks of the group ask in one order."""
        self._num_lanes += 1
        return (self._num_lanes - 1) % NUM_LANES

    def close(self) -> None:
        """Drop the backend, which joins its threads."""
        self._backend = None

    def wait(self, work: Any) -> None:
        """Wait for the work that an operation of this communicator returned."""
        limit = of_block() if self.sends_best else None
        if limit is None:
            work.wait()
        else:
            work.wait(limit)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Send a contiguous tensor of any dtype."""
        return self._backend.send([tensor], rank, tag)

    def recv(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Receive into a contiguous tensor of any dtype."""
        return self._backend.recv([tensor], rank, tag)

    def all_to_all(
        self, dst: Tensor, src: Tensor, dst_splits: list[int], src_splits: list[int]
    ) -> Any:
        """Send ``src_splits[i]`` elements of ``src`` to the i-th rank, receive from it likewise."""
        return self._backend.alltoall_base(dst, src, dst_splits, src_splits)

    def all_gather(self, dst: Tensor, src: Tensor) -> Any:
        """Concatenate all ranks' ``src`` in ``dst``."""
        return self._backend._allgather_base(dst, src)

    def all_reduce(self, tensor: Tensor) -> Any:
        """Replace ``tensor`` by the sum over all ranks."""
        options = dist.AllreduceOptions()
        limit = of_block()
        if limit is not None:
            # Without it the backend's thread would go on adding after the call has given up, in
            # memory that the caller uses again.
            options.timeout = limit
        return self._backend.allreduce([tensor], options)


def _make_gloo(world: Any, store: Any, rank: int, size: int) -> Any:
    """A gloo backend; all communicators of a world share one thread that waits for messages.

    With a thread per communicator, these threads would take time from the cores that compute.
    """
    if not world.gloo_devices:
        # torch knows which interfaces the user asked for.
        made: Any = dist.ProcessGroupGloo(store, rank, size, world.group_timeout)
        world.gloo_devices = list(made.options._devices)
        return made
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = world.gloo_devices, world.group_timeout
    return gloo(store, rank, size, options)


def _make_nccl(world: Any, store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = world.group_timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


MAKERS: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "gloo": _make_gloo,
    "nccl": _make_nccl,
}
"""By name of a backend: makes it for a world, from a store, this rank's number and the size."""
