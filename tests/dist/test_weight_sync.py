"""Weights of a trainer go to workers of an engine, which are another job.

Ranks 0 and 1 are the trainer, ranks 2 and 3 the workers of an engine without vLLM: its loaders are
like those of vLLM (tests/interop/vllm/loaders.py), and it is driven by messages in a store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import rvdcomm as rv
from rvdcomm.interop.vllm import Sender
from rvdcomm.interop.vllm.receiver import InitInfo, Receiver
from rvdcomm.interop.vllm.record import recorded
from tests.dist.on_ranks import on_ranks
from tests.interop.vllm.loaders import SHAPES, Engine, checkpoint, loaded

pytestmark = pytest.mark.dist

TRAINERS = WORKERS = 2
CPU = torch.device("cpu")


class StoreClient:
    """A client whose calls are messages in a store, which each worker answers."""

    def __init__(self, store: Any) -> None:
        self._store, self._number = store, 0

    def _call(self, method: str, argument: Any = None) -> None:
        self._number += 1
        self._store.set(f"call/{self._number}", json.dumps([method, argument]))
        for worker in range(WORKERS):
            said = json.loads(self._store.get(f"answer/{self._number}/{worker}"))
            if said:
                raise RuntimeError(said)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish", weight_version)

    def stop(self) -> None:
        self._call("stop")


class Worker:
    """A worker of the engine; it is as strict about the order of calls as vLLM."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.engine = rank, Engine(rank, WORKERS, dtype)
        self.receiver = Receiver(
            lambda metas: recorded(self.engine.without_data().load_weights, metas, CPU),
            lambda weights: self.engine.load_weights(weights),
            CPU,
            WORKERS,
        )
        self.versions: list[str | None] = []

    def call(self, method: str, argument: Any) -> None:
        if method == "init":
            self.receiver.join(InitInfo(**argument), self.rank)
        elif method == "start":
            assert not self.receiver.is_open, "an update is active"
            self.receiver.is_open = True
        elif method == "update":
            self.receiver.begin(argument["number"])
        elif method == "finish":
            self.receiver.finish()
            self.receiver.is_open = False
            self.versions.append(argument)

    def serve(self, store: Any, see: Callable[[str, Worker], None]) -> None:
        """Answer calls until ``stop``; ``see`` is called after each."""
        for number in range(1, 1000):
            method, argument = json.loads(store.get(f"call/{number}"))
            said = ""
            try:
                self.call(method, argument)
                see(method, self)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            store.set(f"answer/{number}/{self.rank}", json.dumps(said))
            if method == "stop":
                return


def is_trainer(rank: int, folder: Any) -> tuple[bool, Any]:
    """Leave the group of all ranks for that of a job; also the store of clients."""
    dist.destroy_process_group()
    if rank < TRAINERS:
        store = dist.FileStore(f"{folder}/trainer", TRAINERS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS)
    return rank < TRAINERS, dist.FileStore(f"{folder}/calls", -1)


def whole(weights: dict[str, Tensor], rank: int) -> Any:
    return weights


def _cut(tensor: Tensor, mesh: Any, placement: Any) -> Any:
    """A DTensor of equal values, of which every rank takes its part; gloo knows no float8."""
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def fsdp(weights: dict[str, Tensor], rank: int) -> Any:
    mesh = init_device_mesh("cpu", (TRAINERS,))
    return {
        name: _cut(t, mesh, Shard(0) if t.dim() else Replicate()) for name, t in weights.items()
    }


def parts(weights: dict[str, Tensor], rank: int) -> Any:
    """Partial sums of which each rank has a half; powers of two, so that sums are exact."""
    mesh = init_device_mesh("cpu", (TRAINERS,))
    return {
        name: t  # Sums of quantised values would not be exact.
        if t.itemsize == 1
        else distribute_tensor(t / 2, mesh, [Replicate()]).from_local(t / 2, mesh, [Partial()])
        for name, t in weights.items()
    }


def strided(weights: dict[str, Tensor], rank: int) -> Any:
    """Rows whose halves are dealt to ranks in turn, as a view of fused heads leaves them."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (TRAINERS,))
    found: dict[str, Any] = fsdp(weights, rank)
    for name in ("q", "gate", "up", "fused_up"):
        d = weights[name].dim() - 1
        found[name] = _cut(weights[name], mesh, _StridedShard(d, split_factor=2))
    return found


def pairs(weights: dict[str, Tensor], rank: int) -> Any:
    """Shards with their layouts; a stage has some of them, and the ranks stand the other way."""
    found = {}
    for i, (name, tensor) in enumerate(weights.items()):
        if i % 3 == 0:
            layout = rv.Layout(tensor.shape, rv.RVD(1, 1, (1,) * tensor.dim()), [i % 2])
        elif tensor.dim():
            cut = (1,) * (tensor.dim() - 1) + (2,)
            layout = rv.Layout(tensor.shape, rv.RVD(1, 1, cut), [1, 0], cuts="balanced")
        else:
            layout = rv.Layout((), "R(2)V(1)D()", [0, 1])
        if rank in layout:
            box = layout.cell(rank).box
            found[name] = tensor[box.slices_within(rv.Box.of_shape(tensor.shape))], layout
    return found


SOURCES = {each.__name__: each for each in (whole, fsdp, parts, strided, pairs)}


@pytest.mark.parametrize(
    "source, staging",
    [*((source, True) for source in SOURCES), ("fsdp", False), ("parts", False), ("pairs", False)],
)
@on_ranks(4, is_last=True)
def test_workers_have_what_a_loaded_checkpoint_gives_them(
    rank: int, tmp_path: Any, source: str, staging: bool
) -> None:
    trains, store = is_trainer(rank, tmp_path)
    dtype = torch.bfloat16 if source == "fsdp" else torch.float32
    if trains:
        now = dict[str, Tensor]()
        client = StoreClient(store) if rank == 0 else None
        now |= checkpoint(0)
        sender = Sender(
            lambda: SOURCES[source](now, rank), client, num_workers=2, secs=15, proof=True,
            staging=staging,
        )  # fmt: skip
        for version in range(1, 4):
            now.update(checkpoint(version))
            sender.send(f"v{version}")
            assert sender.arrival is not None
            assert (sender.arrival.num_tensors == 1) == (source == "parts")
        sender.close()
        if client is not None:
            client.stop()
        return

    def see(method: str, worker: Worker) -> None:
        # Without staging, an update is loaded while it arrives.
        version = len(worker.versions) + (method == "update" and not staging)
        wanted = loaded(worker.rank, WORKERS, checkpoint(version), dtype)
        for name, parameter in worker.engine.parameters.items():
            values = wanted[name] if version else torch.full_like(parameter, 7)
            assert torch.equal(parameter, values), (method, name)

    worker = Worker(rank - TRAINERS, dtype)
    worker.serve(store, see)
    assert worker.versions == ["v1", "v2", "v3"]


@on_ranks(4, is_last=True)
def test_a_worker_gets_its_share_and_no_more(rank: int, tmp_path: Any) -> None:
    trains, store = is_trainer(rank, tmp_path)
    if not trains:
        Worker(rank - TRAINERS, torch.float32).serve(store, lambda *_: None)
        return
    client = StoreClient(store) if rank == 0 else None
    sender = Sender(lambda: fsdp(checkpoint(1), rank), client, num_workers=2, secs=15)
    transfer = sender.transfer
    dtypes = {
        key: str(transfer.dtype(piece.name)).removeprefix("torch.")
        for key, piece in transfer.pieces.items()
    }
    plan = rv.plan_many(
        {key: piece.src for key, piece in transfer.pieces.items()},
        {key: piece.dst for key, piece in transfer.pieces.items()},
        dtypes,
        executor="dist",
    )
    plans = {member.name: member.plan for member in plan.members}
    into = dict.fromkeys(range(4), 0)
    for key, piece in transfer.pieces.items():
        empty = {
            rank: np.zeros(
                piece.src.cell(rank).box.shape,
                "uint8" if dtypes[key].startswith("float8") else dtypes[key],
            )
            for rank in piece.src.ranks
        }
        for rank, num_bytes in rv.simulate(plans[key], empty).recv_bytes.items():
            into[rank] += num_bytes
    assert into == {0: 0, 1: 0, 2: transfer.share_bytes(2), 3: transfer.share_bytes(3)}
    whole_bytes = sum(torch.Size(shape).numel() * 4 for shape in SHAPES.values())
    assert transfer.share_bytes(2) < 0.7 * whole_bytes
    sender.close()
    if client is not None:
        client.stop()


@on_ranks(4, is_last=True)
def test_ranks_hear_of_tensors_that_an_engine_cannot_take(rank: int, tmp_path: Any) -> None:
    trains, store = is_trainer(rank, tmp_path)
    if not trains:
        with suppress(RuntimeError):
            Worker(rank - TRAINERS, torch.float32).serve(store, lambda *_: None)
        return
    client = StoreClient(store) if rank == 0 else None
    wrong = checkpoint(1) | {"q": torch.ones(3, 8)}
    with pytest.raises(rv.LayoutError, match=r"loader fails at \['q'\] of shape \(3, 8\)"):
        Sender(lambda: whole(wrong, rank), client, num_workers=2, secs=15)
    if client is not None:
        client.stop()


@on_ranks(4, is_last=True, dying=[0, 1])
def test_workers_keep_their_weights_when_a_trainer_dies(rank: int, tmp_path: Any) -> None:
    """The first trainer dies in an update; ranks that are left check what is left."""
    import os

    trains, store = is_trainer(rank, tmp_path)
    if trains:
        client = StoreClient(store) if rank == 0 else None
        calls = 0

        def weights() -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                if rank == 0:
                    time.sleep(0.3)
                os._exit(1)
            return whole(checkpoint(calls), rank)

        sender = Sender(weights, client, num_workers=2, secs=15)
        sender.send("v1")
        sender.send("v2")
        raise AssertionError("it died")
    worker = Worker(rank - TRAINERS, torch.float32)
    updates = 0
    for number in range(1, 7):
        method, argument = json.loads(store.get(f"call/{number}"))
        worker.call(method, argument)
        updates += method == "update"
        store.set(f"answer/{number}/{worker.rank}", json.dumps(""))
        if updates == 2:
            break
    begun = time.monotonic()
    worker.receiver.finish()
    assert isinstance(worker.receiver.failure, rv.CommError)
    assert time.monotonic() - begun < 10
    wanted = loaded(worker.rank, WORKERS, checkpoint(2), torch.float32)
    for name, parameter in worker.engine.parameters.items():
        assert torch.equal(parameter, wanted[name])


@pytest.mark.parametrize("staging", [True, False])
@on_ranks(4, is_last=True)
def test_tensors_that_are_not_those_of_before_are_refused_on_all_ranks(
    rank: int, tmp_path: Any, staging: bool
) -> None:
    """Others than a rank offered: the engine keeps its weights, and the next update works."""
    trains, store = is_trainer(rank, tmp_path)
    if not trains:
        worker = Worker(rank - TRAINERS, torch.float32)
        worker.serve(store, lambda *_: None)
        assert worker.versions == ["v1"]
        wanted = loaded(worker.rank, WORKERS, checkpoint(1), torch.float32)
        for name, parameter in worker.engine.parameters.items():
            assert torch.equal(parameter, wanted[name])
        return
    client = StoreClient(store) if rank == 0 else None
    layout = rv.Layout((8, 8), "R(1)V(1)D(2,1)", [0, 1])
    good = checkpoint(1)
    now: dict[str, Any] = {}

    def shards(dtype: torch.dtype = torch.float32, **other: Any) -> dict[str, Any]:
        o = good["o"].chunk(2)[rank].to(dtype)
        return good | {"o": (o, layout)} | (other if rank == 1 else {})

    now = shards()
    sender = Sender(lambda: now, client, num_workers=2, secs=15, staging=staging)
    swapped = good["o"].chunk(2)[1], rv.Layout((8, 8), "R(1)V(1)D(2,1)", [1, 0])
    grown = torch.zeros(8, 16), rv.Layout((16, 16), "R(1)V(1)D(2,1)", [0, 1])
    for wrong, said in (
        (shards(o=swapped), "passes torch.float32 .*and it offered"),
        (shards(o=grown), "passes torch.float32 .*and it offered"),
        (shards(torch.bfloat16), "passes torch.bfloat16"),
        (shards(extra=torch.ones(2)), "it offered nothing"),
        ({"o": shards()["o"]}, "passes nothing, and it offered"),
        (shards(norm=None), "tensor 'norm': rank 1 of the trainer passes NoneType"),
    ):
        now = wrong
        with pytest.raises(rv.LayoutError, match=said):
            sender.send("wrong")
    now = shards()
    sender.send("v1")
    sender.close()
    if client is not None:
        client.stop()


@on_ranks(4, is_last=True)
def test_a_sender_whose_engine_left_says_so_and_does_not_disturb_the_next(
    rank: int, tmp_path: Any
) -> None:
    trains, store = is_trainer(rank, tmp_path)
    if not trains:
        worker = Worker(rank - TRAINERS, torch.float32)
        worker.serve(store, lambda *_: None)
        assert worker.versions == ["first", "second"]
        return
    client = StoreClient(store) if rank == 0 else None

    def made() -> Sender:
        return Sender(lambda: checkpoint(1) if rank == 0 else {}, client, num_workers=2, secs=15)

    first = made()
    first.send("first")
    second = made()
    with pytest.raises(rv.CommError, match=r"worker [01]: CommError: it left this trainer"):
        first.send("lost")
    second.send("second")
    dist.barrier()
    if rank == 1:
        second.close()
    dist.barrier()
    with pytest.raises(rv.CommError, match="closed"):
        second.send("closed")
    if client is not None:
        client.stop()


@pytest.mark.parametrize("num_workers", [1, 3])
@on_ranks(4, is_last=True)
def test_another_number_of_workers_is_an_error_on_all_trainers(
    rank: int, tmp_path: Any, num_workers: int
) -> None:
    trains, store = is_trainer(rank, tmp_path)
    if not trains:
        Worker(rank - TRAINERS, torch.float32).serve(store, lambda *_: None)
        return
    client = StoreClient(store) if rank == 0 else None
    said = "num_workers=1, and the engine has 2" if num_workers == 1 else "Missing: worker 2"
    with pytest.raises(rv.CommError, match=said):
        Sender(lambda: whole(checkpoint(1), rank), client, num_workers=num_workers, secs=3)
    if client is not None:
        client.stop()


@on_ranks(2, is_last=True)
def test_a_first_rank_without_a_client_is_an_error_on_all_trainers(
    rank: int, tmp_path: Any
) -> None:
    with pytest.raises(rv.CommError, match="client=None on rank 0"):
        Sender(lambda: whole(checkpoint(1), rank), None, num_workers=1, secs=5)
    with pytest.raises(rv.LayoutError, match="default process group of the 3 trainers"):
        Sender(dict, None, num_workers=1, num_trainers=3, rank=rank, secs=5)


@pytest.mark.parametrize("staging", [True, False])
@on_ranks(4, is_last=True)
def test_an_engine_that_refuses_an_update_is_an_error_on_all_trainers(
    rank: int, tmp_path: Any, staging: bool
) -> None:
    trains, store = is_trainer(rank, tmp_path)
    if not trains:
        with suppress(RuntimeError):
            Worker(rank - TRAINERS, torch.float32).serve(store, lambda *_: None)
        return

    class Refusing(StoreClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            raise RuntimeError("busy")

    client = Refusing(store) if rank == 0 else None
    sender = Sender(
        lambda: whole(checkpoint(1), rank), client, num_workers=2, secs=5, staging=staging
    )
    begun = time.monotonic()
    with pytest.raises(rv.CommError, match="busy"):
        sender.send("v1")
    assert time.monotonic() - begun < 4
    if client is not None:
        client.stop()
