"""The world of one process group: rank numbers, subgroups, timeout and store.

Layouts number ranks within the group, as ``torch.distributed.get_rank(group)`` does.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text


class World:
    """One process group, with the subgroups that programs need; made once a group by ``of``."""

    _known: ClassVar[weakref.WeakKeyDictionary[Any, World]] = weakref.WeakKeyDictionary()

    def __init__(self, group: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.name: str = group.group_name
        self.backend: str = _backend_name(group)
        self.timeout: timedelta = _timeout(group)
        # Compiled transitions by request; never dropped, or ranks would agree at different times.
        self.agreed: dict[Any, Any] = {}
        self.compiled: dict[Any, Any] = {}
        self.num_agreements: dict[tuple[int, ...], int] = {}
        self._made: dict[tuple[Any, ...], Any] = {}
        self._subgroups: dict[tuple[int, ...], Subgroup] = {}

    @classmethod
    def of(cls, group: Any = None) -> World:
        """The world of ``group``, or of the default group.

        Raises:
            CommError: torch.distributed is not initialized, or this rank is not in the group.
        """
        if not dist.is_initialized():
            raise CommError(
                "torch.distributed is not initialized; call init_process_group first "
                "(rvdcomm.simulate needs no processes)."
            )
        group = group if group is not None else dist.group.WORLD
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError("this rank is not a member of the group that was given.")
        if group not in cls._known:
            if not cls._known:
                # A backend that outlives the interpreter ends with its threads running: an abort.
                atexit.register(_close_all)
            cls._known[group] = cls(group)
        return cls._known[group]

    @property
    def device(self) -> torch.device:
        """The device whose tensors the backend serves: this process's GPU, or the CPU."""
        if "nccl" in self.backend:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def store(self) -> Any:
        """The key-value store that all ranks of the job share."""
        return dist.distributed_c10d._get_default_store()

    def close(self) -> None:
        """Let go of all communicators; transitions compiled for this group cannot run any more."""
        for subgroup in self._subgroups.values():
            subgroup.close()
        self._subgroups.clear()
        for made in self._made.values():
            if hasattr(made, "close"):
                made.close()
        self._made.clear()
        self.agreed.clear()
        self.compiled.clear()

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What ``make`` makes: made once for this group, and closed with it if it can be."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def subgroup(self, ranks: tuple[int, ...]) -> Subgroup:
        """The communicator of these ranks, in this order; collective over them when first asked.

        It is a communicator of our own even where it has all ranks: calls of the user's on the same
        group cannot mix with ours.
        """
        if ranks not in self._subgroups:
            if self.backend not in _BACKENDS:
                known = ", ".join(sorted(_BACKENDS))
                raise CommError(f"backend {self.backend!r} is not supported; use one of {known}.")
            name = f"rvdcomm/{self.backend}/{self.name}/{ranges_text(ranks)}"
            store = dist.distributed_c10d.PrefixStore(name, self.store)
            make = _BACKENDS[self.backend]
            try:
                made = make(store, ranks.index(self.rank), len(ranks), self.timeout)
            except RuntimeError as error:
                raise CommError(
                    f"{self.backend}: rank {self.rank} cannot connect to ranks "
                    f"({ranges_text(ranks)}): {error}"
                ) from None
            # gloo's own all_gather goes round a ring and through a second buffer as large as dst;
            # its all_to_all lets ranks meet that have nothing for each other.
            self._subgroups[ranks] = Subgroup(made, sends_best=self.backend == "gloo")
        return self._subgroups[ranks]


def _close_all() -> None:
    for world in list(World._known.values()):
        world.close()


class Subgroup:
    """A communicator of some ranks of a group, known to its members alone.

    ``torch.distributed.new_group`` must be called by every rank of the job, also by those that take
    no part in a transition; with ``use_local_synchronization`` its ranks deadlock as soon as they
    are in unequal numbers of groups (pytorch#189073). So the backend is made here, from the store.

    Ranks are numbered within it, and every call returns what there is to wait for. ``sends_best``:
    sends and receives are the fastest way to do an all_to_all and an all_gather.
    """

    def __init__(self, backend: Any, *, sends_best: bool) -> None:
        self._backend = backend
        self.sends_best = sends_best

    def close(self) -> None:
        """Drop the backend, which joins its threads."""
        self._backend = None

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
        return self._backend.allreduce([tensor])


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _make_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_BACKENDS: dict[str, Callable[[Any, int, int, timedelta], Any]] = {
    "gloo": _make_gloo,
    "nccl": _make_nccl,
}


def _backend_name(group: Any) -> str:
    """The backend that serves tensors; NCCL's where the group has several (cpu:gloo,cuda:nccl)."""
    name: str = dist.get_backend(group)
    return "nccl" if "nccl" in name else name


def _timeout(group: Any) -> timedelta:
    """The timeout that the group was made with."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return dist.default_pg_timeout
