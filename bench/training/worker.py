"""One rank of a cell of the training benchmark; started by ``python -m bench.training``.

    python -m bench.training.worker CONFIG.json FOUND.json

Rank 0 writes the measurements of every competitor.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bench.machine.method import TIMEOUT, Method, check_losses, everyone, seen
from bench.training.competitors import competitors
from bench.training.ours import Ours
from bench.training.peak import peak_bytes, restart_peak
from bench.training.sockets import sent_bytes
from bench.training.workloads import WORKLOADS, Batch

NUM_BATCHES = 2
"""Batches on which all competitors train in turn; their first steps measure the peak memory."""

CHECKED_STEPS = 6
"""Steps whose losses must agree up to rounding.

Later, a rounding error switches a ReLU or the maximum of a pooling window to another branch. In the
Wide-ResNet, float32 differs from float64 from step 8 on, and by 2 % at step 17.
"""


def main(argv: list[str]) -> None:
    """Train by all competitors in turn."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(0)
    workload = WORKLOADS[config["workload"]](config["tiny"])
    model = workload.build()
    generator = torch.Generator().manual_seed(1)
    batches = [workload.inputs(workload.batch, generator) for _ in range(NUM_BATCHES)]
    # A first step loads code, which then does not count as memory of the first competitor.
    model(*batches[0]).backward()
    model.zero_grad()
    ours = Ours(workload, model, batches[0], Path(config["folder"]), config["budget_secs"])
    chosen = competitors(workload, model, ours, config["plans"], config["against"])
    rows: dict[str, dict[str, Any]] = {}
    methods, found, planned = {}, {}, {}
    for name, competitor in chosen.items():
        option, found[name] = competitor.tuned(batches[0])
        gc.collect()
        before = restart_peak()
        methods[name] = competitor.options[option].make()
        planned[name] = ours.planned_bytes.get(option)
        losses = [seen(methods[name], batch)[0] for batch in batches]
        rows[name] = {"peak_bytes": everyone(peak_bytes() - before), "losses": losses}
        rows[name] |= {"secs": [], "cpu_secs": []}
    order = list(methods)
    for i in tqdm(range(config["steps"]), desc="rounds", disable=dist.get_rank() > 0):
        # The order rotates, so that each competitor is first in some rounds.
        for name in order[i % len(order) :] + order[: i % len(order)]:
            loss, taken = seen(methods[name], batches[i % NUM_BATCHES])
            rows[name]["losses"].append(loss)
            rows[name]["secs"].append(taken.step)
            rows[name]["cpu_secs"].append(taken.cpu)
    check_losses({name: row["losses"][:CHECKED_STEPS] for name, row in rows.items()})
    for name, method in methods.items():
        rows[name]["sent_bytes"] = everyone(_sent_bytes(method, batches[0]))
    if dist.get_rank() == 0:
        found = {name: ours.about if name == "auto" else text for name, text in found.items()}
        made = {"competitors": rows, "found": found, "planned_bytes": planned}
        Path(argv[1]).write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


def _sent_bytes(method: Method, batch: Batch) -> int:
    """Bytes that this rank sends through TCP in a step, without those of the barriers."""

    def sent_in(batches: Sequence[tuple[Tensor, Tensor]]) -> int:
        dist.barrier()
        before = sent_bytes()
        for each in batches:
            method.train(each)
        dist.barrier()
        return sent_bytes() - before

    return -sent_in(()) + sent_in((batch,))


if __name__ == "__main__":
    main(sys.argv[1:])
