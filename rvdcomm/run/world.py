"""The world of one process group: rank numbers, subgroups, timeout and store.

Layouts number ranks within the group, as ``torch.distributed.get_rank(group)`` does.

A world that failed once stays failed (``World.fail``): every later call raises at once, and says
what failed first and how to go on. So no call can meet messages or events of a failed call.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from threading import RLock
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text
from rvdcomm.run.agree import (
    GRACE_SECS,
    PROBE_SECS,
    bounded,
    generation_of,
    gone_error,
    part,
    tell_failure,
    text_of,
)
from rvdcomm.run.communicator import MAKERS, MAX_TAG, Subgroup
from rvdcomm.run.process_group import Membership, membership_of, real_group
from rvdcomm.run.torch_version import warn_of_untried
from rvdcomm.run.waiting import of_block

warn_of_untried(torch.__version__)

FORM_AGAIN = (
    "Form the group again on all of its ranks: rvdcomm.restart, or destroy_process_group and "
    "init_process_group, or new_group."
)
_FORKED = (
    "this process was forked from one that is in the process group, and is no rank of it. Call "
    "rvdcomm in a process that was started by the spawn method and joined a group of its own."
)


class World:
    """One process group on one of its backends, with the communicators that programs need.

    ``of`` makes one per group. Ranks compare their requests in this one; ``on`` gives the world of
    the backend that moves the tensors. Worlds of one group fail and end together.

    A world holds no reference to its group. It is closed when the group is dropped. If the group is
    still held after ``destroy_process_group``, it is closed when the next world is made.
    """

    _known: ClassVar[dict[int, World]] = {}
    """By the id of the group: groups of other libraries may have no hash."""
    _inherited: ClassVar[dict[int, weakref.ref[Any]]] = {}
    """Groups of the process that this one was forked from, by their id."""
    at_failure: ClassVar[list[Callable[[World], None]]] = []
    """Functions that drop what this process holds of a world that failed."""

    settlers: ClassVar[list[Callable[[], None]]] = []
    """Functions that wait for the calls that this process makes in the background."""

    def __init__(
        self, member: Membership, backend: str, family: dict[str, World] | None = None
    ) -> None:
        self.member = member
        self.rank, self.size, self.name = member.rank, member.size, member.name
        self.backend = backend
        self.group_timeout = member.timeout
        self.failure = ""
        self.is_closed = False
        # The worlds of the group's backends, this one among them, by backend.
        self._family: dict[str, World] = {} if family is None else family
        self.prefix = "rvdcomm/posts" + (f"/{backend}" if self._family else "")
        # One for all backends, because one failure breaks them all.
        others = list(self._family.values())
        self._lock: Any = others[0]._lock if others else RLock()
        self._is_together = False
        self._family[backend] = self
        # Compiled transitions by request. Entries are never dropped: a rank that had dropped one
        # would start an agreement that the other ranks do not join.
        self.agreed: dict[Any, Any] = {}
        self.compiled: dict[Any, Any] = {}
        self.num_agreements: dict[tuple[int, ...], int] = {}
        self.generations: dict[tuple[int, ...], str] = {}
        self.num_partings: dict[tuple[int, ...], int] = {}
        self._histories: dict[tuple[int, ...], int] = {}
        self.domains: weakref.WeakSet[Any] = weakref.WeakSet()
        self._made: dict[tuple[Any, ...], Any] = {}
        # By ranks and identity: that of the only program that uses it, or 0 if all programs do.
        self._subgroups: dict[tuple[tuple[int, ...], int], Subgroup] = {}
        # The gloo devices of the first communicator. All others share them, and so their thread.
        self.gloo_devices: list[Any] = []
        self._next_probe = 0.0
        self.has_one_backend = len(set(member.backends.values())) == 1

    @classmethod
    def of(cls, group: Any = None) -> World:
        """The world of ``group``, or of the default group.

        Raises:
            CommError: torch.distributed is not initialized and no group is given, this rank is not
                in the group, no backend of it is supported, or this process was forked from one
                that is in it.
        """
        if group is None:
            if not dist.is_initialized():
                raise CommError(
                    "torch.distributed is not initialized; call init_process_group first "
                    "(rvdcomm.simulate needs no processes)."
                )
            group = dist.group.WORLD
        known = cls._known.get(id(group))
        return cls._make(group) if known is None else known

    @classmethod
    def _make(cls, group: Any) -> World:
        given, group = group, real_group(group)
        if group is not given:
            return cls.of(group)
        inherited = cls._inherited.get(id(group))
        if inherited is not None and inherited() is group:
            raise CommError(_FORKED)
        for world in list(cls._known.values()):
            if world.member.is_destroyed():
                world.close()
        member = membership_of(group)
        made = cls._known[id(group)] = cls(member, member.default_backend)
        # Also at the end of the interpreter: a backend that outlives the interpreter is destroyed
        # while its threads run, which aborts the process.
        weakref.finalize(group, cls._end, id(group), made)
        return made

    @classmethod
    def _end(cls, number: int, world: World) -> None:
        cls._known.pop(number, None)
        world.close()

    @classmethod
    def renewed(cls, group: Any = None) -> World:
        """A new world of a group, in place of one that failed; what the old one holds is closed."""
        old = cls.of(group)
        old.close()
        cls._known = {number: world for number, world in cls._known.items() if world is not old}
        return cls.of(group)

    def on(self, device_type: str) -> World:
        """The world of the backend that moves tensors on devices of a type; maybe this one.

        Raises:
            LayoutError: the group has no such backend.
        """
        backend = self.member.serving(device_type)
        found = self._family.get(backend)
        if found is None:
            self.check()
            found = World(self.member, backend, self._family)
        return found

    @property
    def device(self) -> torch.device:
        """The device whose tensors the backend serves: this process's GPU, or the CPU."""
        if self.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def timeout(self) -> timedelta:
        """How long a call waits for another rank: the limit of ``rv.timeout``, else the group's."""
        return of_block() or self.group_timeout

    @cached_property
    def store(self) -> Any:
        """The key-value store of the group, over a connection of this world's own.

        On the group's own connection, one operation blocks those of all other threads until it
        ends.
        """
        try:
            return self.member.store.clone()
        except RuntimeError:  # No descriptor is left, or the store cannot do it.
            return self.member.store

    # --- turns ----------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Hold the group for a call of this thread, until ``release``; may be nested.

        Ranks match calls by their order alone. If two threads call at once, ranks cannot tell which
        calls belong together, and a thread would get the data of another one. So the group breaks.

        Raises:
            CommError: another thread is in a call.
        """
        if not self._lock.acquire(blocking=False):
            error = CommError(
                f"process group {self.name!r}: two threads call it at once, and ranks cannot tell "
                "whose data belong together; give each thread a group of its own (new_group)."
            )
            self.fail(error)
            raise error

    def release(self) -> None:
        """End what ``acquire`` began."""
        self._lock.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the group for work that all ranks do in one order.

        Calls in the background end first, because they need the group too.
        """
        if not self._lock._is_owned():
            for settle in self.settlers:
                settle()
        with self.held():
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the group in the block; as of ``acquire``."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def together(self, members: tuple[int, ...]) -> Iterator[None]:
        """Hold the group while ``members`` agree, connect and share memory; collective over them.

        On return, or if all of them raise the same error, no member needs this rank for that any
        more: its process may end. A block inside of another one adds nothing.
        """
        with self.alone():
            if self._is_together:
                yield
                return
            self._is_together = True
            try:
                yield
            except Exception:
                self._part(members)
                raise
            finally:
                self._is_together = False
            self._part(members)

    def _part(self, members: tuple[int, ...]) -> None:
        if not self.failure:
            part(self, members)

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
        domains = list(self.domains)
        lost = next(filter(None, [domain.lost() for domain in domains]), None)
        for domain in domains:
            domain.fail(lost)
        for subgroup in list(self._subgroups.values()):
            subgroup.close()
        for drop in self.at_failure:
            drop(self)
        with suppress(TimeoutError, RuntimeError):
            tell_failure(self, text)
        for world in list(self._family.values()):
            world.fail(error)

    def watch(self, members: Iterable[int], what: str, is_done: Callable[[], bool]) -> None:
        """Raise a CommError if a member is known to be lost before ``is_done``.

        Members that share memory here are known by their wires, at every call. All others are known
        by the connections of the group itself, where it has any; these are asked now and then.
        """
        for domain in list(self.domains):
            domain.watch(members, what, is_done)
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + PROBE_SECS
        gone = self.member.gone(members)
        # A rank that is gone may already have done everything that this rank waits for.
        if gone and not is_done():
            raise gone_error(what, self.rank, gone)

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that are known to have ended, or to have destroyed the group."""
        known = {rank for domain in list(self.domains) for rank in domain.hung_up()}
        return {rank for rank in ranks if rank in known or self.member.gone([rank])}

    def close(self) -> None:
        """Release all communicators; transitions compiled for this group cannot run any more.

        A call that runs in another thread raises an error. It holds the memory in which it works.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.failure = self.failure or f"process group {self.name!r} was destroyed. {FORM_AGAIN}"
        for world in list(self._family.values()):
            world.close()
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
        # A rank that serves the store stops to do so when the group is gone.
        self.member = replace(self.member, store=None)
        self.__dict__.pop("store", None)

    def disown(self) -> None:
        """In a forked child: make this world unusable without destroying what it holds.

        The destructors of backends, and of process groups that compiled calls hold, would wait for
        threads that the child does not have. So the child keeps these objects.
        """
        if self.failure == _FORKED:
            return
        self.failure = _FORKED
        for world in self._family.values():
            world.disown()
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
            with self.alone():
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
            what = f"{self.backend}: rank {self.rank} connects to ranks ({ranges_text(ranks)})"
            generation = generation_of(self, ranks, what)
            try:
                # gloo's own all_gather sends around a ring, through a second buffer as large as
                # dst. Its all_to_all makes ranks wait for each other that exchange no data.
                made = Subgroup(
                    self._connected(generation, ranks, identity), sends_best=self.has_tags
                )
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

    def _connected(self, generation: str, ranks: tuple[int, ...], identity: int) -> Any:
        what = f"{self.backend}: rank {self.rank} connects to ranks ({ranges_text(ranks)})"
        prefix = f"{generation}/{self.backend}" + (f"/{identity}" if identity else "")
        store = dist.distributed_c10d.PrefixStore(prefix, self.store)
        make = MAKERS[self.backend]
        secs = self.timeout.total_seconds()
        try:
            return bounded(
                lambda: make(self, store, ranks.index(self.rank), len(ranks)),
                secs + GRACE_SECS,
                lambda is_done: self.watch(ranks, what, is_done),
            )
        except (TimeoutError, RuntimeError) as error:
            if isinstance(error, CommError):
                raise
            raise CommError(
                f"{self.backend}: rank {self.rank} cannot connect to ranks "
                f"({ranges_text(ranks)}): {text_of(error)}"
            ) from None


_not_ours: list[Any] = []


def _after_fork() -> None:
    groups = [world.member.group() for world in World._known.values()]
    for group in [*dist.distributed_c10d._world.pg_map, *groups]:
        if group is not None:
            World._inherited[id(group)] = weakref.ref(group)
    for world in list(World._known.values()):
        world.disown()
    World._known.clear()


os.register_at_fork(after_in_child=_after_fork)
