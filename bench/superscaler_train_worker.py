"""One rank of the training benchmark; started by ``superscaler_train.py``.

    python -m bench.superscaler_train_worker CONFIG.json RESULTS.jsonl

Rank 0 appends a JSON line a grid: samples of every method in seconds (the slowest rank of each
step; of processor time the mean), losses, and what every rank sent through TCP in a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from bench.sockets import sent_bytes
from bench.torch_parallel import TorchParallel
from bench.training_method import Method, check_losses, everyone
from superscaler_core.models.gpt import GPT, GPTConfig, example_inputs
from superscaler_core.run.load import load

TIMEOUT = timedelta(seconds=300)
NUM_CHECKED = 3
"""Steps whose losses are compared before anything is timed; they also warm up."""


def main(argv: list[str]) -> None:
    """Run all grids."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for grid in config["grids"]:
        row = {**grid, **_run(config, grid)}
        if dist.get_rank() == 0:
            with Path(argv[1]).open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _run(config: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Any]:
    sizes = GPTConfig(**config["model"])
    torch.manual_seed(0)
    model = GPT(sizes)
    generator = torch.Generator().manual_seed(1)
    num_sequences = config["microbatch"] * config["microbatches"]
    batches = [example_inputs(sizes, num_sequences, generator) for _ in range(NUM_CHECKED)]
    methods = {name: _method(name, config, grid, model) for name in config["methods"]}
    losses = {name: _losses(method, batches) for name, method in methods.items()}
    check_losses(losses)
    samples: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "optimizer": [], "cpu": []} for name in methods
    }
    for i in range(config["steps"]):
        for name, method in methods.items():
            for what, value in _timed(method, batches[i % len(batches)]).items():
                samples[name][what].append(value)
    return {
        "samples": samples,
        "losses": losses,
        "tcp_bytes": {name: _tcp_bytes(method, batches[0]) for name, method in methods.items()},
    }


def _method(name: str, config: Mapping[str, Any], grid: Mapping[str, Any], model: GPT) -> Method:
    """Collective: every rank makes its share."""
    if name == "torch":
        count = config["microbatches"]
        torchs = TorchParallel(model, tp=grid["tp"], pp=grid["pp"], num_microbatches=count)
        return Method.of(torchs.step, torchs.module.parameters())
    executor = {"ours": "auto", "dist": "dist"}[name]
    os.environ["RVDCOMM_EXECUTOR"] = executor
    trainer = load(grid["folder"], topology=rv.Topology.load(config["topology"]))
    trainer.load_state_dict(model.state_dict())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        os.environ["RVDCOMM_EXECUTOR"] = executor
        return trainer.step(tokens, targets)

    return Method.of(step, trainer.parameters())


def _losses(method: Method, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The loss of a step on every batch, as the last rank has it."""
    last = dist.get_world_size() - 1
    found = torch.zeros(len(batches), dtype=torch.float64)
    for i, batch in enumerate(batches):
        loss, _, _ = method.train(batch)
        if dist.get_rank() == last:
            assert loss is not None
            found[i] = loss.item()
    dist.broadcast(found, last)
    values: list[float] = found.tolist()
    return values


def _timed(method: Method, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Seconds of a step: of the slowest rank, and of all processors, a rank."""
    dist.barrier()
    start = time.process_time()
    _, step_secs, optimizer_secs = method.train(batch)
    cpu_secs = torch.tensor(time.process_time() - start, dtype=torch.float64)
    slowest = torch.tensor([step_secs, optimizer_secs], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu_secs)
    mean_secs = cpu_secs.item() / dist.get_world_size()
    return {"step": slowest[0].item(), "optimizer": slowest[1].item(), "cpu": mean_secs}


def _tcp_bytes(method: Method, batch: tuple[Tensor, Tensor]) -> list[int]:
    """What every rank sends in a step, without the barriers around it."""

    def sent_in(work: Callable[[], object]) -> int:
        dist.barrier()
        before = sent_bytes()
        work()
        dist.barrier()
        return sent_bytes() - before

    nothing = sent_in(lambda: None)
    mine = sent_in(lambda: method.step(*batch)) - nothing
    method.optimizer.zero_grad()
    return everyone(mine)


if __name__ == "__main__":
    main(sys.argv[1:])
