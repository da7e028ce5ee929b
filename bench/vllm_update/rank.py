"""One rank of ``bench.vllm_update``: 0 and 1 train, 2 has the engine, 2 and 3 take broadcasts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.vllm_update.peers import bytes_into, gathered_bytes

WORKERS = 2
DONE = "done"
PORT = 29871
"""Of the store at which trainers and workers meet; hosts are emulated, and nobody else is there."""


def main(config: dict[str, Any]) -> None:
    """Measure all ways in turn."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    folder = Path(config["folder"])
    trainers = dist.new_group([0, 1])
    groups = [dist.new_group([trainer, 2, 3]) for trainer in (0, 1)]
    model = _model(config["layers"])
    if rank == 0:
        model.save_pretrained(folder / "model")
    dist.barrier()
    state = model.state_dict()
    if rank < 2:
        _train(rank, state, groups, trainers, config, folder)
    else:
        shapes = {name: tuple(t.shape) for name, t in state.items()}
        del model, state
        _serve(rank, shapes, groups, config, folder)
    dist.destroy_process_group()


def _model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32000,
            max_position_embeddings=256,
        )
    )


class _StoreClient:
    """Calls of the engine, as messages in the default group's store."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._number = 0
        self.finish_secs: list[float] = []

    def call(self, method: str, argument: Any = None) -> Any:
        self._number += 1
        self._store.set(f"call/{self._number}", json.dumps([method, argument]))
        said, value = json.loads(self._store.get(f"answer/{self._number}"))
        if said:
            raise RuntimeError(said)
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        begun = time.perf_counter()
        self.call("finish_weight_update", weight_version)
        self.finish_secs.append(time.perf_counter() - begun)


def _train(
    rank: int, state: dict[str, Tensor], groups: Any, trainers: Any, config: Any, folder: Path
) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from rvdcomm.interop.vllm import Sender

    mesh = DeviceMesh("cpu", [0, 1])
    shards = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in state.items()}
    client = _StoreClient() if rank == 0 else None
    host = os.environ["MASTER_ADDR"]
    sender = Sender(
        lambda: shards, client, rank=rank, num_trainers=2, num_workers=WORKERS, host=host,
        port=PORT, executor="dist", secs=300,
    )  # fmt: skip
    secs: dict[str, list[float]] = {way: [] for way in ("rvd", "whole", "shards")}
    moved: list[list[int]] = []
    for update in range(config["updates"] + 1):
        before = client.call("received") if client else []
        begun = time.perf_counter()
        sender.send(f"v{update}")
        dist.barrier(group=trainers)
        times = {"rvd": time.perf_counter() - begun}
        after = client.call("received") if client else []
        for way in ("whole", "shards"):
            if client:
                client.call("broadcast", way)
            dist.barrier()
            begun = time.perf_counter()
            _broadcast(rank, way, state, groups)
            dist.barrier()
            times[way] = time.perf_counter() - begun
        if update:
            for way, taken in times.items():
                secs[way].append(taken)
            moved = [
                [share, got - had] for (share, got), (_, had) in zip(after, before, strict=True)
            ]
    by_rules = client.call("peers") if client else []
    sender.close()
    if client is None:
        return
    client.call(DONE)
    model_bytes = sum(t.nbytes for t in state.values())
    found = {
        "model_bytes": model_bytes,
        "secs": secs,
        "load_secs": client.finish_secs[1:],
        "worker_bytes": moved,
        "worker_bytes_of_peers": by_rules,
        "trainer_bytes_of_sharded_rdt": gathered_bytes(model_bytes, 2),
    }
    (folder / "found.json").write_text(json.dumps(found))


def _broadcast(rank: int, way: str, state: dict[str, Tensor], groups: Any) -> None:
    """The trainers' part of a broadcast by hand; all tensors are on their way at once."""
    if way == "whole" and rank != 0:
        return
    works = [
        dist.broadcast(
            tensor if way == "whole" else tensor.chunk(2)[rank],
            rank,
            group=groups[rank],
            async_op=True,
        )
        for tensor in state.values()
    ]
    for work in works:
        work.wait()


def _take(way: str, shapes: dict[str, tuple[int, ...]], groups: Any) -> None:
    """What ranks 2 and 3 take of a broadcast."""
    sources = range(1 if way == "whole" else 2)
    works = [
        dist.broadcast(part, trainer, group=groups[trainer], async_op=True)
        for shape in shapes.values()
        for trainer, part in zip(sources, torch.empty(shape).chunk(len(sources)), strict=True)
    ]
    for work in works:
        work.wait()


def _serve(
    rank: int, shapes: dict[str, tuple[int, ...]], groups: Any, config: Any, folder: Path
) -> None:
    """Rank 2 answers calls; rank 3 only takes part in broadcasts."""
    store = dist.distributed_c10d._get_default_store()
    llm = _engine(str(folder / "model")) if rank == 2 else None
    number = 0
    while True:
        number += 1
        method, argument = json.loads(store.get(f"call/{number}"))
        said, value = "", None
        if rank == 2:
            try:
                value = _answer(llm, method, argument)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            store.set(f"answer/{number}", json.dumps([said, value]))
        if method == "broadcast":
            dist.barrier()
            _take(argument, shapes, groups)
            dist.barrier()
        if method == DONE:
            return


def _engine(folder: str) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        folder,
        tensor_parallel_size=WORKERS,
        enforce_eager=True,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        weight_transfer_config=WeightTransferConfig(backend="rvd"),
    )


def _answer(llm: Any, method: str, argument: Any) -> Any:
    from rvdcomm.interop.vllm import LocalClient

    if method == "received":
        return [[share, _received(pid)] for pid, share in llm.collective_rpc(_pid_and_share)]
    if method == "peers":
        return llm.collective_rpc(bytes_into)
    client = LocalClient(llm)
    if method in ("broadcast", DONE):
        return None
    call = getattr(client, method)
    return call() if method == "start_weight_update" else call(argument)


def _pid_and_share(worker: Any) -> tuple[int, int]:
    return os.getpid(), worker.weight_transfer_engine._receiver.share_bytes


def _received(pid: int) -> int:
    """Bytes that the open TCP sockets of a process have received, as the kernel counts them."""
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    sockets = re.split(r"\n(?=\S)", text)
    own = [socket for socket in sockets if f"pid={pid}," in socket]
    return sum(int(n) for socket in own for n in re.findall(r"bytes_received:(\d+)", socket))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
