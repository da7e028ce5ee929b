"""One rank of the prediction benchmark; started by ``superscaler_predict.py``.

    python -m bench.superscaler_predict_worker CONFIG.json FOUND.json

Rank 0 writes what it found: the links, the profile without its table, and a row a plan.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from bench.training_method import everyone
from rvdcomm.calibration import calibrate
from superscaler_core.cli.sources import plan_source
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import Plan
from superscaler_core.run.live_bytes import LiveBytes
from superscaler_core.run.load import load
from superscaler_core.run.trainer import Trainer
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured

TIMEOUT = timedelta(seconds=600)
NUM_WARM = 2
NUM_CALLS = 200
"""Small calls by which the time around a transfer is measured."""

LEARNING_RATE, MOMENTUM = 0.01, 0.9


@dataclass
class Case:
    """A plan, its program and this rank's share of it."""

    row: dict[str, Any]
    compiled: Compiled
    trainer: Trainer
    batch: Sequence[Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> tuple[float, float]:
        """Seconds of forward and backward on this rank, and of its processor, without optimizer."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        self.trainer.step(*self.batch)
        secs, cpu_secs = time.perf_counter() - start, time.process_time() - cpu_start
        self.optimizer.step()
        self.optimizer.zero_grad()
        return secs, cpu_secs


def main(argv: list[str]) -> None:
    """Measure the machine, run all plans, predict them."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    topology, _ = calibrate()
    cases = [_case(config, row, topology) for row in config["rows"]]
    profile = measured(
        [case.compiled for case in cases],
        op_secs=config["op_secs"],
        move_secs=measured_move_secs(topology),
    )
    for case in cases:
        case.row["peak_bytes"] = everyone(_peak_bytes(case))
    for case in cases:
        case.row |= {"step_secs": [], "cpu_secs": []}
    for i in range(NUM_WARM + config["steps"]):
        for case in cases:
            secs, cpu_secs = zip(*everyone(case.step()), strict=True)
            if i >= NUM_WARM:
                case.row["step_secs"].append(max(secs))
                case.row["cpu_secs"].append(sum(cpu_secs) / len(cpu_secs))
    if dist.get_rank() == 0:
        for case in cases:
            case.row |= _predicted(case.compiled, profile, topology)
        found = {
            "topology": topology.to_json(),
            "profile": {**asdict(profile), "op_secs": len(profile.op_secs)},
            "rows": [case.row for case in cases],
        }
        Path(argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _case(config: Mapping[str, Any], row: dict[str, Any], topology: rv.Topology) -> Case:
    """Collective: every rank compiles the same program, and the first writes it."""
    torch.manual_seed(0)
    model = build(row["model"], **row["sizes"])
    inputs = example_inputs(row["model"], config["microbatch"], **row["sizes"])
    plan = Plan(capture(model, inputs), range(config["ranks"]))
    plan_source(row["plan"]).call(plan, **row["knobs"])
    compiled = compile(plan, topology=topology, optimizer="momentum")
    folder = Path(config["folder"], row["name"].replace(":", "_"))
    if dist.get_rank() == 0:
        compiled.save(folder)
    dist.barrier()
    trainer = load(folder)
    trainer.load_state_dict(model.state_dict())
    size = config["microbatch"] * plan.num_microbatches
    batch = example_inputs(row["model"], size, **row["sizes"])
    optimizer = torch.optim.SGD(trainer.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    return Case(row, compiled, trainer, batch, optimizer)


def measured_move_secs(topology: rv.Topology) -> float:
    """What a call takes besides its plan's time: of a small all-reduce, the median."""
    ranks = range(dist.get_world_size())
    src, dst = (
        rv.Layout((64,), rvd.format(len(ranks)), ranks)
        for rvd in ("R(1)V({})D(1)", "R({})V(1)D(1)")
    )
    plan = rv.plan(src, dst, "float32", topology)
    call = rv.Redistributor(plan)
    value, times = torch.zeros(64), []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        call(value, requires_grad=False)
        times.append(time.perf_counter() - start)
    spent: list[float] = everyone(median(times))
    return max(0.0, median(spent) - plan.cost.secs)


def _peak_bytes(case: Case) -> int:
    """Of the first two steps: optimizer states come to be at the end of the first."""
    with LiveBytes(case.trainer) as live:
        case.step()
        case.step()
    return live.peak_bytes


def _predicted(compiled: Compiled, profile: DeviceProfile, topology: rv.Topology) -> dict[str, Any]:
    found = simulate(compiled, profile, topology)
    return {
        "predicted_secs": found.secs - max(found.optimizer_secs.values()),
        "predicted_bytes": [found.peak_bytes[device] for device in found.devices],
        "predicted_busy_secs": [
            found.busy_secs[device] - found.optimizer_secs[device] for device in found.devices
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
