"""Receiver: the side of a worker. It gets its share of a checkpoint while the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm import CommError, LayoutError
from rvdcomm.interop.vllm.joint import Joint, joint_store
from rvdcomm.interop.vllm.meeting import begin_together, end_together, meet
from rvdcomm.interop.vllm.record import Record, TensorMeta
from rvdcomm.interop.vllm.regions import joined
from rvdcomm.interop.vllm.staging import Staging
from rvdcomm.interop.vllm.transfer import Need, Transfer

Weights = Iterator[tuple[str, Tensor]]
"""The tensors of a checkpoint, as ``load_weights`` of a model takes them."""


@dataclass
class InitInfo:
    """What the first trainer tells workers; JSON.

    Attributes:
        host, port: where its store is.
        num_trainers, num_workers: ranks of the joint group, trainers first.
        first_worker: which of all workers is the first of this engine.
        secs: how long ranks wait for each other.
        executor: of ``rvdcomm.redistribute_many``; None chooses.
        proof: whether digests of all boxes are compared after every update.
        staging: whether updates are received while the engine serves, into memory of their own.
    """

    host: str
    port: int
    num_trainers: int
    num_workers: int
    first_worker: int = 0
    secs: float = 120.0
    executor: str | None = None
    proof: bool = False
    staging: bool = True

    def check(self, num_workers: int) -> None:
        """Raise a LayoutError if an engine of ``num_workers`` workers does not fit in."""
        if self.first_worker + num_workers > self.num_workers:
            raise LayoutError(
                f"the trainer's num_workers={self.num_workers}, and the engine has {num_workers} "
                f"workers, of which the first is number {self.first_worker}."
            )

    def joint(self, worker: int) -> Joint:
        """The joint group, as seen by a worker of this engine."""
        store = joint_store(self.host, self.port, self.secs, is_host=False)
        rank = self.num_trainers + self.first_worker + worker
        return Joint(
            store, rank, self.num_trainers + self.num_workers, self.num_trainers, self.secs
        )


class Receiver:
    """The updates that one worker gets from one trainer after another.

    No method raises because of a trainer: vLLM loses count of its workers' answers after one of
    them raised. Trainers hear of failures through the store of the joint group.

    Args:
        record: records how the worker loads tensors of these shapes and dtypes.
        load: loads the tensors of a checkpoint into the model.
        device: where its staging memory is.
        num_workers: of its engine.
    """

    def __init__(
        self,
        record: Callable[[Mapping[str, TensorMeta]], Record],
        load: Callable[[Weights], object],
        device: torch.device,
        num_workers: int,
    ) -> None:
        self._record, self._load, self._device = record, load, device
        self._num_workers = num_workers
        self._joint: Joint | None = None
        self._options = rv.CallOptions()
        self._thread: Thread | None = None
        self._proof = self._streams = False
        self._number = 0
        self._staging: Staging | None = None
        self._is_loaded = False
        self.failure: Exception | None = None
        self.is_open = False
        self.record = Record()
        self.transfer: Transfer | None = None

    @property
    def share_bytes(self) -> int:
        """Bytes that this worker gets in an update; its staging memory takes as many."""
        if self.transfer is None or self._joint is None:
            return 0
        return self.transfer.share_bytes(self._joint.rank)

    def join(self, info: InitInfo, worker: int) -> None:
        """Meet a trainer, maybe in place of an earlier one; collective over the joint group."""
        self.leave()
        self.failure = None
        try:
            joint = info.joint(worker)
            try:
                info.check(self._num_workers)
                self.transfer, _ = meet(joint, None, self._needs, is_open=self.is_open)
            except Exception as error:
                joint.give_up(error)
                raise
            self._joint = joint
            self._options = rv.CallOptions(group=joint.group, executor=info.executor)
            self._proof, self._streams = info.proof, not info.staging
        except Exception as error:
            self.failure = error

    def _needs(self, metas: Mapping[str, TensorMeta]) -> dict[str, Need]:
        self.record = self._record(metas)
        return needs_in(self.record, metas)

    def begin(self, number: int) -> None:
        """Begin to receive update ``number``, in the background.

        Without staging, receive and load it here, layer by layer.
        """
        self._await()
        self._number, self._staging, self.failure = number, None, None
        if self._joint is None or self.transfer is None:
            self.failure = CommError("no trainer is here; it calls init_weight_transfer_engine.")
            return
        if self._streams:
            self._tell(begun_key(number, self._joint.rank))
            self._update(self._joint, self.transfer)
            return
        self._thread = Thread(target=self._update, args=(self._joint, self.transfer), daemon=True)
        self._thread.start()

    def _update(self, joint: Joint, transfer: Transfer) -> None:
        """Receive the update into staging memory; without that, load it too."""
        try:
            begin_together(joint, self._number, None)
            error: Exception | None = None
            staging = None
            try:
                if self._streams:
                    self._load_all(self._arriving(joint, transfer))
                else:
                    staging = self._received(joint, transfer)
            except Exception as failure:
                error = failure
            end_together(joint, self._number, error)
            self._staging, self._is_loaded = staging, self._streams
        except Exception as failure:
            self.failure = failure

    def _received(self, joint: Joint, transfer: Transfer) -> Staging:
        staging = transfer.staging(joint.rank, self._device)
        out = transfer.results(staging, joint.rank)
        transfer.move(joint.rank, {}, out, self._options, proof=self._proof)
        return staging

    def _arriving(self, joint: Joint, transfer: Transfer) -> Weights:
        """The tensors of the checkpoint; each layer is received when the loader asks for it."""
        for layer in transfer.layers:
            yield from self._received(joint, layer).tensors(self.record.whole)

    def _load_all(self, weights: Weights) -> None:
        self._load(weights)
        # A loader may leave the last tensors out, and trainers send them.
        for _ in weights:
            pass

    def finish(self) -> None:
        """Wait for the update that was begun, load it, and drop the staging memory.

        Nothing is loaded if the update failed. ``failure`` says why, and the trainer is told.
        """
        self._await()
        staging, self._staging = self._staging, None
        is_loaded, self._is_loaded = self._is_loaded, False
        if staging is not None:
            try:
                self._load_all(staging.tensors(self.record.whole))
            except Exception as error:
                self.failure = error
        elif self.failure is None and not is_loaded:
            self.failure = CommError("no update was begun.")
        if self._joint is not None:
            said = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
            self._tell(loaded_key(self._number, self._joint.rank), said)

    def _tell(self, key: str, text: str = "") -> None:
        """Tell the trainer; one that is gone does not need to know."""
        with suppress(RuntimeError):
            if self._joint is not None:
                self._joint.tell(key, text)

    def leave(self) -> None:
        """Leave the trainer, if any; an update that still comes is dropped."""
        if self._joint is not None:
            left = CommError("it left this trainer, and met another one or ended.")
            with suppress(RuntimeError):  # A trainer that is gone does not need to know.
                self._joint.give_up(left)
            self._joint.world.fail(left)
        self._await()
        self._joint, self._staging, self.transfer = None, None, None
        self._options = rv.CallOptions()

    def _await(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def needs_in(record: Record, metas: Mapping[str, TensorMeta]) -> dict[str, Need]:
    """The boxes of each tensor that a loader reads, and the dtype in which it may get them."""
    found = {name: Need(joined(record.boxes(name)), record.wanted(name)) for name in record.copies}
    for name in record.whole:
        found[name] = Need((rv.Box.of_shape(metas[name].shape),), None)
    return {name: need for name, need in found.items() if need.boxes}


def begun_key(number: int, rank: int) -> str:
    """The key at which a worker without staging says that it takes part in an update."""
    return f"update {number}/begun/{rank}"


def loaded_key(number: int, rank: int) -> str:
    """The key at which a worker says whether it loaded an update."""
    return f"update {number}/loaded/{rank}"
