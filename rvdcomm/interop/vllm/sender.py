"""Sender: the side of a trainer's rank. It needs no vLLM, only a client that reaches the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from threading import Thread
from typing import Any, Protocol

import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import CommError, LayoutError
from rvdcomm.interop.vllm.held import Held, Places, Weight, changed, held_by, offered
from rvdcomm.interop.vllm.joint import Joint, joint_store
from rvdcomm.interop.vllm.meeting import begin_together, end_together, meet
from rvdcomm.interop.vllm.receiver import InitInfo, begun_key, loaded_key
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
        staging: engines receive all of an update into memory of their own, and serve the old
            weights meanwhile. False: they receive and load layer by layer, in the memory of one
            layer, and do not serve; a failure leaves some new and some old weights.

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
        staging: bool = True,
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self.num_trainers = dist.get_world_size() if num_trainers is None else num_trainers
        self._weights, self._client = weights, client
        self._number = 0
        self._known: dict[Any, Places] = {}
        store, port = self._store(host, port, secs)
        self._joint = Joint(
            store, self.rank, self.num_trainers + num_workers, self.num_trainers, secs
        )
        info = InitInfo(
            host, port, self.num_trainers, num_workers, secs=secs, executor=executor, proof=proof,
            staging=staging,
        )  # fmt: skip
        try:
            if self.rank == 0:
                self._join(info)
            held = self._held()
            self._offered = offered(held)
            self.transfer, self._is_open = meet(self._joint, held, None)
        except Exception as error:
            self._joint.give_up(error)
            raise
        self._options = rv.CallOptions(group=self._joint.group, executor=executor)
        self._proof, self._streams, self._is_closed = proof, not staging, False
        self.arrival: rv.Arrival | None = None

    def send(self, version: str | None = None) -> None:
        """Update the engines to the present values; collective over the ranks of the trainer.

        Args:
            version: the name of these weights, as ``get_weight_version`` of vLLM returns it; the
                number of the update if None.

        Raises:
            LayoutError: a tensor is not what it was when the sender was made; on all ranks, and
                the engine serves its old weights.
            CommError: a rank or the engine failed, or the engine met another trainer. It serves its
                old weights, unless it failed while it loaded the new ones, which the message says.
                Make a new sender then.
        """
        if self._is_closed:
            raise CommError("this sender is closed; make another one.")
        self._joint.check()
        self._number += 1
        version = str(self._number) if version is None else version
        begun = self._called("begin", self._begin)
        if self._streams:  # The engine answers when it has loaded everything.
            for rank in self._joint.workers:
                self._joint.told(begun_key(self._number, rank))
        else:
            begun()
        held, fault, error = self._present()
        if error is not None:
            end_together(self._joint, self._number, error)
        begin_together(self._joint, self._number, fault)
        try:
            self.arrival = self._moved(held)
        except Exception as failure:
            error = failure
        end_together(self._joint, self._number, error)
        if self._streams:
            begun()
        self._called("end", lambda client: self._finish(client, version))()

    def close(self) -> None:
        """Leave the engines, which go on serving; other ranks' ``send`` fails from now on."""
        if not self._is_closed:
            self._is_closed = True
            closed = CommError("it closed its sender.")
            self._joint.give_up(closed)
            self._joint.world.fail(closed)

    def _held(self) -> dict[str, Held]:
        return held_by(self._weights(), self.rank, self._known)

    def _present(self) -> tuple[dict[str, Held], LayoutError | None, Exception | None]:
        """What this rank holds now; why it does not fit; why there is none."""
        try:
            held = self._held()
            return held, changed(self._offered, offered(held), self.rank), None
        except LayoutError as fault:
            return {}, fault, None
        except Exception as error:
            return {}, None, error

    def _moved(self, held: Mapping[str, Held]) -> rv.Arrival | None:
        """Send an update; what was compared, if anything."""
        found = [
            transfer.move(
                self.rank,
                transfer.sources(held, self.rank),
                {},
                self._options,
                proof=self._proof,
            )
            for transfer in (self.transfer.layers if self._streams else [self.transfer])
        ]
        arrivals = [arrival for arrival in found if arrival is not None]
        return sum(arrivals[1:], arrivals[0]) if arrivals else None

    def _store(self, host: str, port: int, secs: float) -> tuple[Any, int]:
        """The store of rank 0, and its port, which the default group tells the other ranks."""
        if self.rank == 0 and self._client is None:
            made, fault = None, "client=None on rank 0, which reaches the engine."
        elif self.rank == 0:
            made, fault = self._hosted(host, port, secs)
        else:
            made, fault = None, ""
        if port == 0 and self.num_trainers > 1:
            if not dist.is_initialized() or dist.get_world_size() != self.num_trainers:
                raise LayoutError(
                    f"port=0 needs a default process group of the {self.num_trainers} trainers, "
                    "by which they learn the port; give a port."
                )
            post = {"port": made.port if made else 0, "fault": fault}
            posts = exchange_posts(
                World.of(None), tuple(range(self.num_trainers)), post, "trainers learn the port"
            )
            port, fault = posts[0]["port"], posts[0]["fault"]
        if fault:
            raise CommError(fault)
        return made or joint_store(host, port, secs, is_host=False), made.port if made else port

    def _hosted(self, host: str, port: int, secs: float) -> tuple[Any, str]:
        try:
            return joint_store(host, port, secs, is_host=True), ""
        except CommError as error:
            return None, str(error)

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
        assert client is not None, "_store checks that the first rank has one"

        def run() -> None:
            try:
                call(client)
            except Exception as error:
                errors.append(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        return thread, errors

    def _called(self, what: str, call: Callable[[Client], None]) -> Callable[[], None]:
        """Rank 0 begins to call the engine; the result waits for the answer.

        It raises on all ranks if the call fails, or a rank dies meanwhile.
        """
        key = f"update {self._number}/{what}"

        def told() -> None:
            if said := self._joint.told(key):
                raise CommError(said)

        if self.rank != 0:
            return told
        thread, errors = self._calling(call)

        def answered() -> None:
            self._joint.watched(thread, f"calls the engine at the {what} of update {self._number}")
            text = "".join(f"the engine failed at the {what}: {error}" for error in errors)
            self._joint.tell(key, text)
            if text:
                raise CommError(text) from errors[0]

        return answered

    def _begin(self, client: Client) -> None:
        try:
            # An earlier trainer that died may have left its update open; vLLM knows one at a time.
            if not self._is_open:
                client.start_weight_update()
            self._is_open = True
            client.update_weights({"number": self._number})
        except Exception as error:
            if self._streams:  # Ranks wait for workers, which may not come.
                self._joint.give_up(CommError(f"the engine failed at the begin: {error}"))
            raise

    def _finish(self, client: Client, version: str) -> None:
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
        try:
            if reset is not None:
                reset()
        except Exception as error:
            raise CommError(
                f"all workers serve {version!r}; its prefix cache could not be reset, and has keys "
                f"and values of old weights: {error}"
            ) from error
