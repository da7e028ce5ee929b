"""Staging on GPUs: blocks that the ranks of a domain map by CUDA IPC, ordered by CUDA events.

When a rank has queued the work before an event, it records the event on its stream and counts it
on the host. A rank that waits for the event first waits on its host for the count, which takes no
time if all ranks run alike. Then it lets its own stream wait for the recorded event. So the GPUs
run on without the hosts.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text
from rvdcomm.program import aligned
from rvdcomm.run.agree import exchange_posts
from rvdcomm.run.staging_memory import StagingMemory
from rvdcomm.run.world import World

# Torch has no types for these.
Event: Any = torch.cuda.Event


class CudaStaging:
    """The staging blocks of a domain in GPU memory; construction is collective over the domain.

    Every rank records one CUDA event again and again. A wait may therefore meet a later record of
    a peer's event, and wait for more work than it needs. No circular wait can arise: the work that
    the peer has queued by then depends on nothing that this rank has not queued yet.
    """

    def __init__(self, world: World, domain: Any, device: torch.device) -> None:
        self.domain, self.device = domain, device
        self.ranks: tuple[int, ...] = domain.ranks
        self.rank: int = domain.rank
        self.memory = StagingMemory.none(len(self.ranks), device)
        self._world = world
        self._sizes = dict.fromkeys(self.ranks, 0)
        self._event = Event(interprocess=True)
        self._event.record(torch.cuda.current_stream(device))
        posts = self._exchange({"event": _text(self._event.ipc_handle())})
        self._events = [
            self._event
            if rank == self.rank
            else Event.from_ipc_handle(device, _bytes(posts[rank]["event"]))
            for rank in self.ranks
        ]

    def reserve(self, num_bytes: Mapping[int, int]) -> None:
        """Grow every rank's block to at least ``num_bytes[rank]``; collective over the domain.

        Raises:
            CommError: a GPU has not enough memory; on all ranks.
        """
        wanted = {r: max(num_bytes.get(r, 0), self._sizes[r]) for r in self.ranks}
        if wanted == self._sizes:
            return
        post: dict[str, Any] = {"refusal": "", "storage": None}
        try:
            # Once all ranks have come here, no rank reads the old blocks any more.
            torch.cuda.synchronize(self.device)
            own_bytes = aligned(max(wanted[self.rank], 1))
            block = torch.empty(own_bytes, dtype=torch.uint8, device=self.device)
            storage: Any = block.untyped_storage()
            post["storage"] = [_plain(value) for value in storage._share_cuda_()]
        except RuntimeError as error:
            post["refusal"] = str(error).splitlines()[0]
        posts = self._exchange(post)
        for rank, found in posts.items():
            if found["refusal"]:
                raise CommError(
                    f"sharing GPU memory among ranks ({ranges_text(self.ranks)}): rank {rank} "
                    f"cannot reserve {wanted[rank]} bytes: {found['refusal']}"
                )
        mapped = [
            block.untyped_storage()
            if rank == self.rank
            else torch.UntypedStorage._new_shared_cuda(*map(_back, posts[rank]["storage"]))
            for rank in self.ranks
        ]
        self.memory = StagingMemory(block, [storage.data_ptr() for storage in mapped], held=mapped)
        self._sizes = wanted
        # A rank may free its old block only when no other rank maps it any more.
        self._exchange({})

    def _exchange(self, post: dict[str, Any]) -> dict[int, Any]:
        return exchange_posts(self._world, self.ranks, post, "sharing GPU memory")

    def advance(self, stream: Any) -> None:
        """Count one event, which comes after all work that is queued on ``stream``."""
        self._event.record(stream)
        self.domain.signals.advance()

    def wait(self, peer: int, count: int, stream: Any) -> None:
        """Let ``stream`` wait for event number ``count`` of the ``peer``-th rank in this call."""
        self.domain.signals.wait(peer, count, self.domain.timeout_secs)
        stream.wait_event(self._events[peer])

    def begin_call(self, identity: int, location: int) -> None:
        """Begin a call; ranks whose ``identity`` differs do not accept each other's events."""
        self.domain.signals.begin(identity, location, self.domain.timeout_secs)

    def end_call(self, totals: list[int]) -> None:
        """End a queued call, in which the i-th rank of the domain counts ``totals[i]`` events."""
        self.domain.signals.end(totals)

    def close(self) -> None:
        """Release all blocks."""
        self.memory = StagingMemory.none(len(self.ranks))
        self.domain.close()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _plain(value: Any) -> Any:
    """A value of torch's handle of the storage, in a form for JSON."""
    return {"bytes": _text(value)} if isinstance(value, bytes) else value


def _back(value: Any) -> Any:
    return _bytes(value["bytes"]) if isinstance(value, dict) else value
