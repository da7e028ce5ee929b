"""Receiver: the side of a worker. It gets its share of a checkpoint while the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import torch

import rvdcomm as rv
from rvdcomm import CommError
from rvdcomm.interop.vllm.joint import Joint, joint_store
from rvdcomm.interop.vllm.meeting import end_together, meet
from rvdcomm.interop.vllm.record import Record, TensorMeta
from rvdcomm.interop.vllm.regions import joined
from rvdcomm.interop.vllm.staging import Staging
from rvdcomm.interop.vllm.transfer import Need, Transfer


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
    """

    host: str
    port: int
    num_trainers: int
    num_workers: int
    first_worker: int = 0
    secs: float = 120.0
    executor: str | None = None
    proof: bool = False

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
        device: where its staging memory is.
    """

    def __init__(
        self, record: Callable[[Mapping[str, TensorMeta]], Record], device: torch.device
    ) -> None:
        self._record, self._device = record, device
        self._joint: Joint | None = None
        self._options = rv.CallOptions()
        self._thread: Thread | None = None
        self._proof = False
        self._number = 0
        self._staging: Staging | None = None
        self.failure: Exception | None = None
        self.is_open = False
        self.record = Record()
        self.transfer: Transfer | None = None

    @property
    def share_bytes(self) -> int:
        """Bytes that this worker gets in an update, and that its staging memory takes."""
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
                self.transfer, _ = meet(joint, None, self._needs, is_open=self.is_open)
            except Exception as error:
                joint.give_up(error)
                raise
            self._joint = joint
            self._options = rv.CallOptions(group=joint.group, executor=info.executor)
            self._proof = info.proof
        except Exception as error:
            self.failure = error

    def _needs(self, metas: Mapping[str, TensorMeta]) -> dict[str, Need]:
        self.record = record = self._record(metas)
        found = {
            name: Need(joined(record.boxes(name)), record.wanted(name)) for name in record.copies
        }
        for name in record.whole:
            found[name] = Need((rv.Box.of_shape(metas[name].shape),), None)
        return {name: need for name, need in found.items() if need.boxes}

    def begin(self, number: int) -> None:
        """Begin to receive update ``number``, in the background."""
        self._await()
        self._number, self._staging, self.failure = number, None, None
        if self._joint is None or self.transfer is None:
            self.failure = CommError("no trainer is here; it calls init_weight_transfer_engine.")
            return
        self._thread = Thread(
            target=self._receive, args=(self._joint, self.transfer, number), daemon=True
        )
        self._thread.start()

    def _receive(self, joint: Joint, transfer: Transfer, number: int) -> None:
        try:
            error: Exception | None = None
            staging = None
            try:
                staging = transfer.staging(joint.rank, self._device)
                out = transfer.results(staging, joint.rank)
                transfer.move({}, out, self._options)
                if self._proof:
                    transfer.prove({}, out, self._options)
            except Exception as failure:
                error = failure
            end_together(joint, number, error)
            self._staging = staging
        except Exception as failure:
            self.failure = failure

    def finish(self, load: Callable[[Staging], None]) -> None:
        """Wait for the update that was begun, load it, and drop the staging memory.

        Nothing is loaded if the update failed. ``failure`` says why, and the trainer is told.
        """
        self._await()
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                load(staging)
            except Exception as error:
                self.failure = error
        elif self.failure is None:
            self.failure = CommError("no update was begun.")
        if self._joint is not None:
            said = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
            # A trainer that is gone does not need to know.
            with suppress(RuntimeError):
                self._joint.tell(loaded_key(self._number, self._joint.rank), said)

    def leave(self) -> None:
        """Leave the trainer, if any; an update that still comes is dropped."""
        if self._joint is not None:
            self._joint.world.fail(CommError("a worker left the trainer"))
        self._await()
        self._joint, self._staging, self.transfer = None, None, None
        self._options = rv.CallOptions()

    def _await(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def loaded_key(number: int, rank: int) -> str:
    """The key at which a worker says whether it loaded an update."""
    return f"update {number}/loaded/{rank}"
