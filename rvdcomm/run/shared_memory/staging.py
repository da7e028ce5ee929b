"""Staging: memory of a rank in which programs prepare data for other ranks and keep received data.

One block serves all programs of the same ranks, because fresh pages cost more than the copy into
them. In an island (a shared-memory domain) the block is shared: the other ranks read from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from rvdcomm.program import aligned
from rvdcomm.run.cuda.staging import CudaStaging
from rvdcomm.run.world import World


class PrivateStaging:
    """A staging block that only this rank uses; ``version`` changes when its address does."""

    island: Any = None
    """None: no other rank waits for this rank's memory."""

    def __init__(self, rank: int) -> None:
        self.ranks = (rank,)
        self.rank = rank
        self.version = 0
        self.block = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: Mapping[int, int]) -> None:
        """Grow the block to at least ``num_bytes`` of this rank."""
        wanted = aligned(num_bytes[self.rank])
        if self.block.numel() < wanted:
            self.block = torch.empty(wanted, dtype=torch.uint8)
            self.version += 1

    def bind(self, stage: Any) -> None:
        """Let a native stage work in this block."""
        stage.bind([self.block.data_ptr()], None, 0.0)

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
        """Release the block."""
        self.block = torch.empty(0, dtype=torch.uint8)
        self.version += 1


class SharedStaging:
    """The staging blocks of an island: this rank's own, and those of the others to read from."""

    def __init__(self, island: Any) -> None:
        self.island = island
        self.ranks: tuple[int, ...] = island.ranks
        self.rank: int = island.rank
        self.version = 0
        self.block = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: Mapping[int, int]) -> None:
        """Grow every rank's block to at least ``num_bytes[rank]``; collective over the island.

        Raises:
            SharedMemoryError: a rank cannot get that much; on all ranks.
        """
        wanted = {rank: aligned(num_bytes.get(rank, 0)) for rank in self.ranks}
        before = self._sizes()
        self.island.reserve(wanted)
        if self._sizes() != before:
            self.version += 1
            own = self.island.num_bytes(self.rank)
            if own:
                self.block = torch.frombuffer(self.island.arena(own), dtype=torch.uint8)

    def _sizes(self) -> list[int]:
        return [self.island.num_bytes(rank) for rank in self.ranks]

    def bind(self, stage: Any) -> None:
        """Let a native stage work in these blocks, and wait for their ranks."""
        addresses = [self.island.address(rank) for rank in self.ranks]
        stage.bind(addresses, self.island.signals, self.island.timeout_secs)

    def begin_call(self, identity: int, location: int) -> None:
        """Begin a call; ranks whose ``identity`` differs do not accept each other's events.

        ``location`` is the location of this rank's source in its pool; 0 if it is not in the pool.
        """
        self.island.signals.begin(identity, location, self.island.timeout_secs)

    def sources(self, owners: Collection[int], location: int) -> tuple[int, ...]:
        """The address of every rank's source in this process.

        The address is 0 for a rank that is not among ``owners``, or whose source is not in its
        pool. The entry of this rank is its ``location``, not an address. Waits until all ``owners``
        have begun this call.
        """
        island, out = self.island, []
        for i, rank in enumerate(self.ranks):
            found = location if rank == self.rank else 0
            if rank in owners:
                found = island.signals.location(i, island.timeout_secs)
            is_foreign = found and rank != self.rank
            out.append(island.in_pool(rank, found) if is_foreign else found)
        return tuple(out)

    def wait_for(self, readers: Collection[int], totals: list[int]) -> None:
        """Wait until ``readers`` have counted all events of this call, and so read nothing more."""
        for i, rank in enumerate(self.ranks):
            if rank in readers:
                self.island.signals.wait(i, totals[i], self.island.timeout_secs)

    def end_call(self, totals: list[int]) -> None:
        """End a call in which the i-th rank of the island counts ``totals[i]`` events."""
        self.island.signals.end(totals)

    def close(self) -> None:
        """Release all blocks."""
        self.block = torch.empty(0, dtype=torch.uint8)
        self.island.close()


Staging = PrivateStaging | SharedStaging | CudaStaging


def staging_of(world: World, island: tuple[int, ...] | None) -> Staging:
    """The staging that the ranks of ``island`` share, or this rank's own if None.

    The first call is collective over the island. Shared staging is on the device that the world's
    backend serves.

    Raises:
        SharedMemoryError: the ranks cannot share memory; on all of them.
    """

    def make() -> Staging:
        if island is None:
            return PrivateStaging(world.rank)
        from rvdcomm.run.shared_memory.island import Island  # It needs the native core.

        made = Island.connect(world, island)
        if world.device.type == "cuda":
            return CudaStaging(world, made, world.device)
        return SharedStaging(made)

    found: Staging = world.once(("staging", island), make)
    return found
