"""Receiver: the side of a worker. It gets its share of a checkpoint while the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        self._failure: Exception | None = None
        self.record = Record()
        self.transfer: Transfer | None = None
        self.staging: Staging | None = None

    def join(self, info: InitInfo, worker: int) -> None:
        """Meet a trainer, maybe in place of an earlier one; collective over the joint group."""
        self.leave()
        joint = info.joint(worker)
        try:
            self.transfer = meet(joint, None, self._needs)
        except Exception as error:
            joint.give_up(error)
            raise
        self._joint = joint
        self._options = rv.CallOptions(group=joint.group, executor=info.executor)

    def _needs(self, metas: Mapping[str, TensorMeta]) -> dict[str, Need]:
        self.record = record = self._record(metas)
        found = {
            name: Need(joined(record.boxes(name)), record.wanted(name)) for name in record.copies
        }
        for name in record.whole:
            found[name] = Need((rv.Box.of_shape(metas[name].shape),), None)
        return {name: need for name, need in found.items() if need.boxes}

    def begin(self, number: int) -> None:
        """Begin to receive update ``number``, in the background.

        Raises:
            CommError: no trainer is there.
        """
        joint, transfer = self._known()
        self._await()
        self._failure = None
        self.staging = transfer.staging(joint.rank, self._device)
        self._thread = Thread(
            target=self._receive, args=(joint, transfer, self.staging, number), daemon=True
        )
        self._thread.start()

    def _receive(self, joint: Joint, transfer: Transfer, staging: Staging, number: int) -> None:
        try:
            error: Exception | None = None
            try:
                out = transfer.results(staging, joint.rank)
                transfer.move({}, out, self._options)
            except Exception as failure:
                error = failure
            end_together(joint, number, error)
        except Exception as failure:
            self._failure = failure

    def received(self) -> Staging:
        """The update that was begun, once all of it is here; the caller drops it after use.

        Raises:
            CommError: it failed.
        """
        self._await()
        staging, self.staging = self.staging, None
        if self._failure is not None:
            raise CommError(f"the update failed; the old weights stay: {self._failure}")
        if staging is None:
            raise CommError("no update was begun.")
        return staging

    def abandon(self) -> None:
        """Drop an update that was begun, if any; the group breaks if it still runs."""
        thread = self._thread
        if thread is not None and thread.is_alive() and self._joint is not None:
            self._joint.world.fail(CommError("the update was abandoned"))
        self._await()
        self.staging = None

    def leave(self) -> None:
        """Leave the group of the present trainer, if any."""
        self.abandon()
        if self._joint is not None:
            self._joint.world.fail(CommError("a worker left the trainer"))
        self._joint, self.transfer = None, None
        self._options = rv.CallOptions()

    def _await(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _known(self) -> tuple[Joint, Transfer]:
        if self._joint is None or self.transfer is None:
            raise CommError("no trainer has joined; call init_weight_transfer_engine first.")
        return self._joint, self.transfer
