"""Staging: memory of a rank in which programs prepare data for other ranks and keep received data.

One block serves all programs of the same ranks, because fresh pages cost more than the copy into
them. In a domain (a shared-memory domain) the block is shared: the other ranks read from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from rvdcomm.program import aligned
from rvdcomm.run.cuda.staging import CudaStaging
from rvdcomm.run.staging_memory import StagingMemory
from rvdcomm.run.world import World


class PrivateStaging:
    """A staging block that only this rank uses."""

    domain: Any = None
    """None: no other rank waits for this rank's memory."""

    def __init__(self, rank: int) -> None:
        self.ranks = (rank,)
        self.rank = rank
        self.memory = StagingMemory.none(1)

    def reserve(self, num_bytes: Mapping[int, int]) -> None:
        """Grow the block to at least ``num_bytes`` of this rank."""
        wanted = aligned(num_bytes[self.rank])
        if self.memory.own.numel() < wanted:
            block = torch.empty(wanted, dtype=torch.uint8)
            self.memory = StagingMemory(block, [block.data_ptr()])

    def bind(self, stage: Any, memory: StagingMemory) -> None:
        """Let a native stage work in the block of ``memory``."""
        stage.bind(memory.addresses, None, 0.0)

    def begin_call(self, identity: int, location: int) -> None:
        """Do nothing: no other rank has to know that a call begins."""

    def sources(self, owners: Collection[int], location: int) -> tuple[int, ...]:
        """Nothing: this rank can read no other rank's memory."""
        return ()

    def wait_for(self, readers: Collection[int], totals: list[int]) -> None:
        """Do nothing: no other rank reads this rank's memory."""

    def end_call(self, totals: list[int]) -> None:
        """Do nothing: no other rank has to know that a call ends."""

    def close(self) -> None:
        """Release the block; a run that still works in it holds it."""
        self.memory = StagingMemory.none(1)


class SharedStaging:
    """The staging blocks of a domain: this rank's own, and those of the others to read from."""

    def __init__(self, domain: Any) -> None:
        self.domain = domain
        self.ranks: tuple[int, ...] = domain.ranks
        self.rank: int = domain.rank

    @property
    def memory(self) -> StagingMemory:
        """The blocks as they are now."""
        memory: StagingMemory = self.domain.memory
        return memory

    def reserve(self, num_bytes: Mapping[int, int]) -> None:
        """Grow every rank's block to at least ``num_bytes[rank]``; collective over the domain.

        Raises:
            SharedMemoryError: a rank cannot get that much; on all ranks.
        """
        self.domain.reserve({rank: aligned(num_bytes.get(rank, 0)) for rank in self.ranks})

    def bind(self, stage: Any, memory: StagingMemory) -> None:
        """Let a native stage work in the blocks of ``memory``, and wait for their ranks."""
        stage.bind(memory.addresses, self.domain.signals, self.domain.timeout_secs)

    def begin_call(self, identity: int, location: int) -> None:
        """Begin a call; ranks whose ``identity`` differs do not accept each other's events.

        ``location`` is the location of this rank's source in its pool; 0 if it is not in the pool.
        """
        self.domain.signals.begin(identity, location, self.domain.timeout_secs)

    def sources(self, owners: Collection[int], location: int) -> tuple[int, ...]:
        """The address of every rank's source in this process.

        The address is 0 for a rank that is not among ``owners``, or whose source is not in its
        pool. The entry of this rank is its ``location``, not an address. Waits until all ``owners``
        have begun this call.
        """
        domain, out = self.domain, []
        for i, rank in enumerate(self.ranks):
            found = location if rank == self.rank else 0
            if rank in owners:
                found = domain.signals.location(i, domain.timeout_secs)
            is_foreign = found and rank != self.rank
            out.append(domain.in_pool(rank, found) if is_foreign else found)
        return tuple(out)

    def wait_for(self, readers: Collection[int], totals: list[int]) -> None:
        """Wait until ``readers`` have counted all events of this call, and so read nothing more."""
        for i, rank in enumerate(self.ranks):
            if rank in readers:
                self.domain.signals.wait(i, totals[i], self.domain.timeout_secs)

    def end_call(self, totals: list[int]) -> None:
        """End a call in which the i-th rank of the domain counts ``totals[i]`` events."""
        self.domain.signals.end(totals)

    def close(self) -> None:
        """Release all blocks; a run that still works in them holds them."""
        self.domain.close()


Staging = PrivateStaging | SharedStaging | CudaStaging


def staging_of(world: World, domain: tuple[int, ...] | None) -> Staging:
    """The staging that the ranks of ``domain`` share, or this rank's own if None.

    The first call is collective over the domain. Shared staging is on the device that the world's
    backend serves.

    Raises:
        SharedMemoryError: the ranks cannot share memory; on all of them.
    """

    def make() -> Staging:
        if domain is None:
            return PrivateStaging(world.rank)
        from rvdcomm.run.shared_memory.domain import SharedDomain  # It needs the native core.

        made = SharedDomain.connect(world, domain)
        if world.device.type == "cuda":
            return CudaStaging(world, made, world.device)
        return SharedStaging(made)

    found: Staging = world.once(("staging", domain), make)
    return found
