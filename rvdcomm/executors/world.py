"""The world of one process group: rank numbers, subgroups, timeout and store.

Layouts number ranks within the group, as ``torch.distributed.get_rank(group)`` does.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text
from rvdcomm.program import ALIGN_BYTES


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
        self._arena: Tensor | None = None
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
    def store(self) -> Any:
        """The key-value store that all ranks of the job share."""
        return dist.distributed_c10d._get_default_store()

    def close(self) -> None:
        """Let go of all communicators; transitions compiled for this group cannot run any more."""
        for subgroup in self._subgroups.values():
            subgroup.close()
        self._subgroups.clear()
        self.agreed.clear()
        self.compiled.clear()

    def arena(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory for the staging of one call, in bytes; valid until the next call.

        On the CPU one block is kept for all calls on this group, because fresh pages cost more than
        the copy into them; on CUDA torch's allocator keeps freed memory anyway, stream by stream.
        """
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if self._arena is None or self._arena.numel() < num_bytes:
            self._arena = None
            self._arena = torch.empty(_whole(num_bytes), dtype=torch.uint8)
        return self._arena.narrow(0, 0, _whole(num_bytes))

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
    """

    def __init__(self, backend: Any, *, sends_best: bool) -> None:
        self._backend = backend
        self._sends_best = sends_best

    def close(self) -> None:
        """Drop the backend, which joins its threads."""
        self._backend = None

    def all_to_all(
        self, dst: Tensor, src: Tensor, dst_splits: list[int], src_splits: list[int]
    ) -> None:
        """Send ``src_splits[i]`` elements of ``src`` to the i-th rank, receive from it likewise."""
        if self._sends_best and len(src_splits) == 2:
            self._swap(torch.split(dst, dst_splits), torch.split(src, src_splits))
        else:
            self._backend.alltoall_base(dst, src, dst_splits, src_splits).wait()

    def _swap(self, dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
        """An all_to_all of two ranks: the receive is posted before the send."""
        rank = self._backend.rank()
        other = 1 - rank
        works = [self._backend.recv([dst[other]], other, 0)] if dst[other].numel() else []
        if src[other].numel():
            works.append(self._backend.send([src[other]], other, 0))
        dst[rank].copy_(src[rank])
        for work in works:
            work.wait()

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        """Concatenate all ranks' ``src`` in ``dst``."""
        if self._sends_best:
            self._exchange_gather(dst, src)
        else:
            self._backend._allgather_base(dst, src).wait()

    def _exchange_gather(self, dst: Tensor, src: Tensor) -> None:
        """Send ``src`` to everybody at once and receive straight into ``dst``.

        gloo's own all_gather goes round a ring and through a second buffer as large as ``dst``.
        """
        rank, size = self._backend.rank(), self._backend.size()
        chunks = dst.view(size, -1)
        others = [(rank + i) % size for i in range(1, size)]
        works = [self._backend.recv([chunks[other]], other, 0) for other in others]
        works += [self._backend.send([src], other, 0) for other in others]
        chunks[rank].copy_(src)
        for work in works:
            work.wait()

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by the sum over all ranks."""
        self._backend.allreduce([tensor]).wait()


def _whole(num_bytes: int) -> int:
    """Round up so that the block can be viewed as any dtype."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


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
