"""The group that joins the ranks of a trainer and the workers of engines, which are other jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from rvdcomm import CommError
from rvdcomm.run import World

_dist: Any = dist

_POLL_SECS = 0.02


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
            CommError: it did not come in time, the host of the store is gone, or a rank gave up.
        """
        end = time.monotonic() + self.secs
        while True:
            try:
                if self.store.check(["gave up"]):
                    raise CommError(self.store.get("gave up").decode())
                if self.store.check([key]):
                    said: bytes = self.store.get(key)
                    return said.decode()
            except dist.DistError as error:
                raise CommError(
                    f"rank {self.rank} waits for {key!r}: the first trainer, which hosts the "
                    f"store, is gone ({error})."
                ) from None
            if time.monotonic() > end:
                raise CommError(f"rank {self.rank} waited {self.secs:g} s for {key!r}.")
            time.sleep(_POLL_SECS)

    def give_up(self, error: BaseException) -> None:
        """Let ranks that wait for this one raise ``error`` instead."""
        self.tell("gave up", f"rank {self.rank}: {type(error).__name__}: {error}")

    def _meet(self) -> None:
        """Wait until all ranks are there, so that connecting takes no longer than it should."""
        self.tell(f"here/{self.rank}")
        for rank in self.everybody:
            self.told(f"here/{rank}")


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
