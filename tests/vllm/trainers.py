"""Trainers of every kind, each rank in a process of its own; values follow from a seed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.vllm.engine import Remote
from tests.vllm.models import made

Give = Callable[[], Any]
Set = Callable[[int], None]
"""Sets the weights to those of a seed."""


def plain(family: str) -> tuple[Give, Set]:
    """Whole tensors on one rank."""
    model = made(family, 0)
    return model.state_dict, lambda seed: _set(model, family, seed)


def lacking(family: str) -> tuple[Give, Set]:
    """Whole tensors, without one that is a part of a fused parameter."""
    give, set_to = plain(family)
    lacks = "model.layers.0.self_attn.k_proj.weight"
    return lambda: {n: t for n, t in give().items() if n != lacks}, set_to


def fsdp2(family: str) -> tuple[Give, Set]:
    """FSDP2 over all ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = made(family, 0)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    def set_to(seed: int) -> None:
        values = made(family, seed).state_dict()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(distribute_tensor(values[name], tensor.device_mesh, tensor.placements))

    return model.state_dict, set_to


def planned(plan: str) -> Callable[[str], tuple[Give, Set]]:
    """A plan of superscaler_core."""

    def make(family: str) -> tuple[Give, Set]:
        import superscaler_core as ss

        ids = torch.randint(0, 250, (4, 16), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids}
        model = ss.parallelize(made(family, 0), batch, plan=plan)

        def set_to(seed: int) -> None:
            model.load_state_dict(made(family, seed).state_dict(), strict=False)

        return model.weight_shards, set_to

    return make


SOURCES: dict[str, tuple[int, Callable[[str], tuple[Give, Set]]]] = {
    "plain": (1, plain),
    "fsdp2": (2, fsdp2),
    "zero3": (2, planned("zero3")),
    "tp2_pp2": (4, planned("hybrid:tp=2,pp=2,microbatches=2")),
}


LACKING = "lacking"
"""A trainer that engines refuse."""


def _set(model: Any, family: str, seed: int) -> None:
    with torch.no_grad():
        for name, value in made(family, seed).state_dict().items():
            model.state_dict()[name].copy_(value)


def _rank(
    rank: int, size: int, source: str, family: str, address: str, tp: int, folder: str,
    seeds: list[int], pipes: Any, options: dict[str, Any],
) -> None:  # fmt: skip
    from rvdcomm.interop.vllm import Sender

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    give, set_to = (lacking if source == LACKING else SOURCES[source][1])(family)
    client = Remote(address) if rank == 0 else None
    sender: Sender | None = None
    for seed in seeds:
        set_to(seed)
        pipes.recv()
        begun = time.monotonic()
        try:
            sender = sender or Sender(give, client, num_workers=tp, **options)
            sender.send(f"seed-{seed}")
            pipes.send((time.monotonic() - begun, ""))
        except Exception as error:
            pipes.send((time.monotonic() - begun, f"{type(error).__name__}: {error}"))
            raise
    assert sender is not None
    sender.close()
    dist.destroy_process_group()


class Trainer:
    """The ranks of a trainer, which sends the weights of one seed after another."""

    def __init__(
        self, source: str, family: str, engine: Remote, tp: int, folder: Path, seeds: list[int],
        **options: Any,
    ) -> None:  # fmt: skip
        size = 1 if source == LACKING else SOURCES[source][0]
        spawn = multiprocessing.get_context("spawn")
        os.environ["OMP_NUM_THREADS"] = "1"
        folder.mkdir()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=_rank,
                args=(rank, size, source, family, engine.address, tp, str(folder), seeds, there,
                      {"secs": 60.0, "proof": True, **options}),
            )  # fmt: skip
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def send(self) -> list[tuple[float, str]]:
        """Send the next seed's weights: what each rank took, in seconds, and its error."""
        self.begin()
        return self.answers()

    def begin(self) -> None:
        """Begin to send."""
        for pipe in self.pipes:
            pipe.send("go")

    def answers(self) -> list[tuple[float, str]]:
        """What each rank took and its error; a rank that is dead has none."""
        found = []
        for pipe in self.pipes:
            try:
                assert pipe.poll(120), "a trainer does not answer"
                found.append(pipe.recv())
            except (EOFError, ConnectionError):
                continue
        return found

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
