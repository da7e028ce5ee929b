"""The group that joins the ranks of a trainer and the workers of engines, which are other jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from rvdcomm import CommError
from rvdcomm.run import World

_dist: Any = dist

_POLL_SECS = 0.02

_GAVE_UP = "gave up"
"""The key at which a rank that leaves the group says why."""


@dataclass(frozen=True)
class Joint:
    """One rank of a joint group: trainers first, then workers.

    Attributes:
        store: where the ranks meet; the first trainer hosts it.
        rank, size: of the joint group.
        num_trainers: ranks below this one are trainers.
        secs: how long a rank waits for another one.
    """

    store: Any
    rank: int
    size: int
    num_trainers: int
    secs: float

    @property
    def everybody(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    @property
    def trainers(self) -> tuple[int, ...]:
        """The ranks of trainers."""
        return tuple(range(self.num_trainers))

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks of workers."""
        return tuple(range(self.num_trainers, self.size))

    @cached_property
    def group(self) -> Any:
        """The process group, on a store of its own; the default group of this job stays as it is.

        It has connections of gloo from the beginning, by which ranks notice that another is dead.
        Tensors on GPUs travel by NCCL. The first use is collective over all ranks.
        """
        self._meet()
        made = dist.ProcessGroup(self.store, self.rank, self.size)
        timeout = timedelta(seconds=self.secs)
        store = _dist.PrefixStore("gloo", self.store)
        gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            store = _dist.PrefixStore("nccl", self.store)
            options = dist.ProcessGroupNCCL.Options()
            nccl: Any = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            made._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        return made

    @cached_property
    def world(self) -> World:
        """The world of the group."""
        return World.of(self.group)

    def tell(self, key: str, text: str = "") -> None:
        """Post a text that other ranks wait for."""
        self.store.set(key, text)

    def told(self, key: str) -> str:
        """The text that another rank posts.

        Raises:
            CommError: it did not come in time, a rank is dead, or one gave up or left.
        """
        return self._waited(lambda: self._posted(key), f"waits for {key!r}")

    def watched(self, thread: Thread, what: str) -> None:
        """Wait until a thread ends.

        Raises:
            CommError: a rank of the group is dead; the thread may still run.
        """
        self._waited(lambda: None if thread.is_alive() else "", what)

    def _waited(self, find: Callable[[], str | None], what: str) -> str:
        end = time.monotonic() + self.secs
        while (found := find()) is None:
            if time.monotonic() > end:
                raise CommError(f"rank {self.rank} {what}: {self.secs:g} s are over.")
            others = [rank for rank in self.everybody if rank != self.rank]
            # Before the group is formed, nobody knows.
            lost = self.world.gone(others) if "world" in self.__dict__ else set()
            if lost and (found := find()) is None:
                raise CommError(f"rank {self.rank} {what}, and ranks {sorted(lost)} are dead.")
            time.sleep(_POLL_SECS)
        return found

    def _posted(self, key: str) -> str | None:
        found = self._stored(key)
        if found is None:
            try:
                self.check()
            except CommError:
                found = self._stored(key)  # A rank posts first, and then leaves.
                if found is None:
                    raise
        return found

    def _stored(self, key: str) -> str | None:
        try:
            return str(self.store.get(key).decode()) if self.store.check([key]) else None
        except dist.DistError as error:
            raise self._storeless(error) from None

    def check(self) -> None:
        """Raise the CommError of a rank that gave up or left."""
        said = self._stored(_GAVE_UP)
        if said is not None:
            raise CommError(said)

    def _storeless(self, error: BaseException) -> CommError:
        return CommError(
            f"rank {self.rank}: the first trainer, which hosts the store, is gone ({error})."
        )

    def give_up(self, error: BaseException) -> None:
        """Let ranks that wait for this one raise ``error`` instead."""
        self.tell(_GAVE_UP, f"{self.name(self.rank)}: {type(error).__name__}: {error}")

    def name(self, rank: int) -> str:
        """A rank in words."""
        is_trainer = rank < self.num_trainers
        return f"trainer {rank}" if is_trainer else f"worker {rank - self.num_trainers}"

    def _meet(self) -> None:
        """Wait until all ranks are there, so that connecting takes no longer than it should."""
        self.tell(f"here/{self.rank}")

        def missing() -> list[int]:
            return [rank for rank in self.everybody if self._posted(f"here/{rank}") is None]

        what = f"expects {self.num_trainers} trainers and {len(self.workers)} workers (num_workers)"
        try:
            self._waited(lambda: None if missing() else "", what)
        except CommError as error:
            absent = ", ".join(map(self.name, missing()))
            raise CommError(f"{error} Missing: {absent or 'nobody'}.") from None


def joint_store(host: str, port: int, secs: float, *, is_host: bool) -> Any:
    """The store at which ranks of several jobs meet; port 0 is a free one, on the host.

    Raises:
        CommError: no store answers there.
    """
    try:
        return _dist.TCPStore(
            host, port, is_master=is_host, wait_for_workers=False, timeout=timedelta(seconds=secs)
        )
    except dist.DistError as error:
        raise CommError(f"no store at {host}:{port}: {error}") from None
