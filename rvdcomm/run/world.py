"""The world of one process group: rank numbers, subgroups, timeout and store.

Layouts number ranks within the group, as ``torch.distributed.get_rank(group)`` does.

A world that failed once stays failed (``World.fail``): every later call raises at once, and says
what failed first and how to go on. So no call can meet messages or events of a failed call.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text
from rvdcomm.run.agree import GRACE_SECS, bounded, generation_of, tell_failure
from rvdcomm.run.torch_version import warn_of_untried
from rvdcomm.run.waiting import of_block

warn_of_untried(torch.__version__)

FORM_AGAIN = (
    "Form the group again on all of its ranks: destroy_process_group and init_process_group, or "
    "new_group."
)
_FORKED = (
    "this process was forked from one that is in the process group, and is no rank of it. Call "
    "rvdcomm in a process that was started by the spawn method and joined a group of its own."
)


class World:
    """One process group, with the subgroups that programs need; ``of`` makes one per group.

    A world holds no reference to its group. It is closed when the group is dropped. If the group is
    still held after ``destroy_process_group``, it is closed when the next world is made.
    """

    _known: ClassVar[weakref.WeakKeyDictionary[Any, World]] = weakref.WeakKeyDictionary()
    _inherited: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    """Groups of the process that this one was forked from."""

    def __init__(self, group: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.name: str = group.group_name
        self.backend: str = _backend_name(group)
        self.group_timeout: timedelta = _timeout(group)
        self.failure = ""
        self.is_closed = False
        # Compiled transitions by request. Entries are never dropped: a rank that had dropped one
        # would start an agreement that the other ranks do not join.
        self.agreed: dict[Any, Any] = {}
        self.compiled: dict[Any, Any] = {}
        self.num_agreements: dict[tuple[int, ...], int] = {}
        self.generations: dict[tuple[int, ...], str] = {}
        self._histories: dict[tuple[int, ...], int] = {}
        self.islands: weakref.WeakSet[Any] = weakref.WeakSet()
        self._made: dict[tuple[Any, ...], Any] = {}
        # By ranks and identity: that of the only program that uses it, or 0 if all programs do.
        self._subgroups: dict[tuple[tuple[int, ...], int], Subgroup] = {}
        # The gloo devices of the first communicator. All others share them, and so their thread.
        self.gloo_devices: list[Any] = []

    @classmethod
    def of(cls, group: Any = None) -> World:
        """The world of ``group``, or of the default group.

        Raises:
            CommError: torch.distributed is not initialized, this rank is not in the group, or this
                process was forked from one that is.
        """
        if not dist.is_initialized():
            raise CommError(
                "torch.distributed is not initialized; call init_process_group first "
                "(rvdcomm.simulate needs no processes)."
            )
        group = group if group is not None else dist.group.WORLD
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError("this rank is not a member of the group that was given.")
        known = cls._known.get(group)
        return cls._make(group) if known is None else known

    @classmethod
    def _make(cls, group: Any) -> World:
        if group in cls._inherited:
            raise CommError(_FORKED)
        for other, world in list(cls._known.items()):
            if other not in dist.distributed_c10d._world.pg_map:
                world.close()
        made = cls._known[group] = cls(group)
        # Also at the end of the interpreter: a backend that outlives the interpreter is destroyed
        # while its threads run, which aborts the process.
        weakref.finalize(group, made.close)
        return made

    @property
    def device(self) -> torch.device:
        """The device whose tensors the backend serves: this process's GPU, or the CPU."""
        if "nccl" in self.backend:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def timeout(self) -> timedelta:
        """How long a call waits for another rank: the limit of ``rv.timeout``, else the group's."""
        return of_block() or self.group_timeout

    @cached_property
    def store(self) -> Any:
        """The key-value store of the job, over a connection of this group's own.

        On torch's own connection, one operation blocks those of all other threads until it ends.
        """
        shared: Any = dist.distributed_c10d._get_default_store()
        try:
            return shared.clone()
        except RuntimeError:  # No descriptor is left, or the store cannot do it.
            return shared

    # --- the end --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise a CommError if the group failed before, was destroyed, or is another process's."""
        if self.failure:
            raise CommError(self.failure)

    def fail(self, error: BaseException) -> None:
        """Break the group for good because of ``error``, and let all ranks know that it is broken.

        Ranks that share memory notice before their next call, ranks that wait for messages when
        their connection to this rank closes, ranks in an agreement when they poll the store.
        """
        if self.failure:
            return
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.failure = f"process group {self.name!r} failed in an earlier call: {text} {FORM_AGAIN}"
        islands = list(self.islands)
        lost = next(filter(None, [island.lost() for island in islands]), None)
        for island in islands:
            island.fail(lost)
        for subgroup in list(self._subgroups.values()):
            subgroup.close()
        with suppress(TimeoutError, RuntimeError):
            tell_failure(self, text)

    def watch(self, members: Iterable[int], what: str, is_done: Callable[[], bool]) -> None:
        """Raise a CommError if a member that shares memory here is lost before ``is_done``."""
        for island in list(self.islands):
            island.watch(members, what, is_done)

    def close(self) -> None:
        """Release all communicators; transitions compiled for this group cannot run any more.

        A call that runs in another thread raises an error. It holds the memory in which it works.
        """
        self.is_closed = True
        self.failure = self.failure or f"process group {self.name!r} was destroyed. {FORM_AGAIN}"
        for group in [group for group, world in list(self._known.items()) if world is self]:
            self._known.pop(group, None)
        # Item by item, because two threads may close this world at the same time.
        for table in (self._subgroups, self._made):
            with suppress(KeyError):
                while True:
                    _, made = table.popitem()
                    if hasattr(made, "close"):
                        made.close()
        self.agreed.clear()
        self.compiled.clear()
        self.gloo_devices.clear()
        self.__dict__.pop("store", None)

    def disown(self) -> None:
        """In a forked child: make this world unusable without destroying what it holds.

        The destructors of backends, and of process groups that compiled calls hold, would wait for
        threads that the child does not have. So the child keeps these objects.
        """
        self.failure = _FORKED
        _not_ours.append(dict(self.__dict__))
        self.__dict__.pop("store", None)
        self._subgroups, self._made, self.agreed, self.compiled = {}, {}, {}, {}
        self.gloo_devices = []

    # --- what programs need ---------------------------------------------------------------------

    def begin(self, members: tuple[int, ...], identity: int) -> int:
        """The tag that the messages of the next call of ``members`` carry.

        The tag is a hash of all calls of ``members`` up to this one, so that messages of different
        calls do not match; ``identity`` names what the call does.
        """
        self.check()
        history = hash((self._histories.get(members, 0), identity)) & MAX_TAG
        self._histories[members] = history
        return history

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The result of ``make``, called once per ``key``; closed with this world if it can be."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def subgroup(self, ranks: tuple[int, ...], identity: int = 0) -> Subgroup:
        """The communicator of these ranks, in this order; collective over them when first asked.

        It is a communicator of our own even if it has all ranks, so that the user's calls on the
        group cannot mix with ours. With an ``identity``, only the program of this identity uses it,
        and its ranks are connected. NCCL needs that: its messages have no tags, so all ranks must
        issue the messages of one communicator in one order.
        """
        key = ranks, identity
        if key not in self._subgroups:
            if self.backend not in _BACKENDS:
                known = ", ".join(sorted(_BACKENDS))
                raise CommError(f"backend {self.backend!r} is not supported; use one of {known}.")
            try:
                # gloo's own all_gather sends around a ring, through a second buffer as large as
                # dst. Its all_to_all makes ranks wait for each other that exchange no data.
                made = Subgroup(self._connected(ranks, identity), sends_best=self.has_tags)
                if identity:
                    self._meet(made, ranks)
            except BaseException as error:
                self.fail(error)
                raise
            self._subgroups[key] = made
        return self._subgroups[key]

    def _meet(self, group: Subgroup, ranks: tuple[int, ...]) -> None:
        """Exchange a byte: the first message of a group blocks the host until all ranks join."""
        there, here = torch.empty((2, len(ranks)), dtype=torch.uint8, device=self.device)
        ones = [1] * len(ranks)
        try:
            group.wait(group.all_to_all(there, here, ones, ones))
        except RuntimeError as error:
            raise CommError(
                f"{self.backend}: rank {self.rank} does not reach ranks ({ranges_text(ranks)}): "
                f"{error}"
            ) from None

    @property
    def has_tags(self) -> bool:
        """Whether messages carry tags, so that they may be issued in any order."""
        return self.backend == "gloo"

    def _connected(self, ranks: tuple[int, ...], identity: int) -> Any:
        what = f"{self.backend}: rank {self.rank} connects to ranks ({ranges_text(ranks)})"
        generation = generation_of(self, ranks, what)
        prefix = f"{generation}/{self.backend}" + (f"/{identity}" if identity else "")
        store = dist.distributed_c10d.PrefixStore(prefix, self.store)
        make = _BACKENDS[self.backend]
        secs = self.timeout.total_seconds()
        try:
            return bounded(
                lambda: make(self, store, ranks.index(self.rank), len(ranks)), secs + GRACE_SECS
            )
        except (TimeoutError, RuntimeError) as error:
            raise CommError(
                f"{self.backend}: rank {self.rank} cannot connect to ranks "
                f"({ranges_text(ranks)}): {error}"
            ) from None


MAX_TAG = (1 << 30) - 1
"""Largest tag of calls that are not posted. Tags of gloo have 31 bits; the top bit marks posted
calls."""

LANE_SHIFT, NUM_LANES = 20, 1 << 10
"""In the tag of a posted call, the lowest ``LANE_SHIFT`` bits count and the bits above hold the
lane; lane numbers are used again after ``NUM_LANES``."""

_not_ours: list[Any] = []


def _after_fork() -> None:
    for group in dist.distributed_c10d._world.pg_map:
        World._inherited.add(group)
    for world in list(World._known.values()):
        world.disown()
    World._known.clear()


os.register_at_fork(after_in_child=_after_fork)


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


def _make_gloo(world: World, store: Any, rank: int, size: int) -> Any:
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


def _make_nccl(world: World, store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = world.group_timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_BACKENDS: dict[str, Callable[[World, Any, int, int], Any]] = {
    "gloo": _make_gloo,
    "nccl": _make_nccl,
}


def _backend_name(group: Any) -> str:
    """The backend that serves tensors; NCCL if the group has several (cpu:gloo,cuda:nccl)."""
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
