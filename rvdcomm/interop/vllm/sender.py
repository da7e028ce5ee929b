"""Sender: the side of a trainer's rank. It needs no vLLM, only a client that reaches the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from threading import Thread
from typing import Any, Protocol

import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import CommError, LayoutError
from rvdcomm.interop.vllm.held import Held, Weight, held_by
from rvdcomm.interop.vllm.joint import Joint, joint_store
from rvdcomm.interop.vllm.meeting import end_together, meet
from rvdcomm.interop.vllm.receiver import InitInfo, loaded_key
from rvdcomm.run import World, exchange_posts


class Client(Protocol):
    """What drives an engine: vLLM's four methods of a weight-sync client.

    A client may have ``reset_prefix_cache()`` too, which is called after every update.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Sender:
    """Sends the weights of a trainer to the workers of vLLM engines; one object on every rank.

    Construction is collective over the ranks of the trainer, and calls
    ``client.init_weight_transfer_engine``. The engines serve their old weights until ``send``
    has brought all of the new ones.

    Args:
        weights: gives this rank's tensors by their names in the checkpoint that vLLM loads; called
            for every update. Each is a DTensor, a pair of this rank's shard and its layout over
            the trainer's ranks, or a whole tensor (then equal on all ranks that pass it).
            ``model.state_dict`` of FSDP2 and ``model.weight_shards`` of superscaler_core are such
            functions.
        client: reaches the engine; used on rank 0 alone, other ranks may pass None.
        rank, num_trainers: of this process among the ranks of the trainer; those of the default
            process group if not given.
        num_workers: ranks of all engines together: tensor × pipeline × data parallel.
        host: address of rank 0, which workers can reach.
        port: of the store that rank 0 serves; 0 is a free one, and needs a default process group.
        secs: how long ranks wait for each other.
        executor: as of ``rvdcomm.redistribute``.
        proof: compare digests of all boxes after each update, before the engine loads it;
            ``arrival`` says what was compared.

    Raises:
        LayoutError: trainers disagree about a tensor, or the engine cannot take one; on all ranks.
        CommError: a rank did not come, or the engine refused.
    """

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Weight]],
        client: Client | None,
        *,
        num_workers: int,
        rank: int | None = None,
        num_trainers: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        secs: float = 120.0,
        executor: str | None = None,
        proof: bool = False,
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self.num_trainers = dist.get_world_size() if num_trainers is None else num_trainers
        self._weights, self._client = weights, client
        self._number = 0
        store, port = self._store(host, port, secs)
        self._joint = Joint(
            store, self.rank, self.num_trainers + num_workers, self.num_trainers, secs
        )
        info = InitInfo(
            host, port, self.num_trainers, num_workers, secs=secs, executor=executor, proof=proof
        )
        try:
            if self.rank == 0:
                self._join(info)
            self.transfer, self._is_open = meet(self._joint, self._held(), None)
        except Exception as error:
            self._joint.give_up(error)
            raise
        self._options = rv.CallOptions(group=self._joint.group, executor=executor)
        self._proof = proof
        self.arrival: rv.Arrival | None = None

    def send(self, version: str | None = None) -> None:
        """Update the engines to the present values; collective over the ranks of the trainer.

        Raises:
            LayoutError: a tensor is not what it was when the sender was made.
            CommError: a rank or the engine failed. The engine serves its old weights, unless it
                failed while it loaded the new ones, which the message says. Make a new sender then.
        """
        self._number += 1
        self._as_first("begin", self._begin)
        error: Exception | None = None
        try:
            tensors = self.transfer.sources(self._held(), self.rank)
            self.transfer.move(tensors, {}, self._options)
            if self._proof:
                self.arrival = self.transfer.prove(tensors, {}, self._options)
        except Exception as failure:
            error = failure
        end_together(self._joint, self._number, error)
        self._as_first("end", lambda client: self._finish(client, version))

    def close(self) -> None:
        """Leave the engines, which go on serving."""
        self._joint.world.fail(CommError("the trainer left"))

    def _held(self) -> dict[str, Held]:
        return held_by(self._weights(), self.rank)

    def _store(self, host: str, port: int, secs: float) -> tuple[Any, int]:
        """The store of rank 0, and its port, which the default group tells the other ranks."""
        if port == 0 and self.num_trainers > 1 and not dist.is_initialized():
            raise LayoutError("port=0 needs a default process group; give a port.")
        made = None
        if self.rank == 0:
            made = joint_store(host, port, secs, is_host=True)
            port = made.port
        if self.num_trainers > 1 and dist.is_initialized():
            world = World.of(None)
            posts = exchange_posts(
                world, tuple(range(world.size)), {"port": port}, "trainers learn the port"
            )
            port = max(post["port"] for post in posts.values())
        return made or joint_store(host, port, secs, is_host=False), port

    def _join(self, info: InitInfo) -> None:
        """Let the engine's workers join, while this rank waits for them."""

        def call(client: Client) -> None:
            try:
                client.init_weight_transfer_engine(asdict(info))
            except Exception as error:
                self._joint.give_up(error)
                raise

        self._calling(call)

    def _calling(self, call: Callable[[Client], None]) -> tuple[Thread, list[Exception]]:
        """Call the engine in a thread; the list gets its error."""
        client, errors = self._client, list[Exception]()
        assert client is not None, "the first rank has a client"

        def run() -> None:
            try:
                call(client)
            except Exception as error:
                errors.append(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        return thread, errors

    def _as_first(self, what: str, call: Callable[[Client], None]) -> None:
        """Rank 0 calls the engine; all ranks raise if that fails, or a rank dies meanwhile."""
        key = f"update {self._number}/{what}"
        if self.rank != 0:
            if said := self._joint.told(key):
                raise CommError(said)
            return
        thread, errors = self._calling(call)
        self._joint.watched(thread, f"calls the engine at the {what} of update {self._number}")
        text = "".join(f"the engine failed at the {what}: {error}" for error in errors)
        self._joint.tell(key, text)
        if text:
            raise CommError(text) from errors[0]

    def _begin(self, client: Client) -> None:
        # An earlier trainer that died may have left its update open; vLLM knows one at a time.
        if not self._is_open:
            client.start_weight_update()
        self._is_open = True
        client.update_weights({"number": self._number})

    def _finish(self, client: Client, version: str | None) -> None:
        client.finish_weight_update(version)
        self._is_open = False
        for rank in self._joint.workers:
            said = self._joint.told(loaded_key(self._number, rank))
            if said:
                raise CommError(
                    f"worker {rank - self.num_trainers} could not load the update, and may have "
                    f"some new and some old weights: {said}"
                )
        reset = getattr(client, "reset_prefix_cache", None)
        if reset is not None:
            reset()
