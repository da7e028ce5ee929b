"""One rank of the duplex benchmark; started by ``command.py``.

    python -m bench.superscaler_duplex.worker CONFIG.json FOUND.json

Rank 0 writes the samples of both programs in seconds (the slowest rank of each step), the time for
which ranks wait for communication in a serial step, and the predictions of the simulator.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import rvdcomm as rv
from bench.machine.method import TIMEOUT, Method, alternating, everyone, loaded, waiting_secs
from bench.superscaler_duplex.waiting_moe import WaitingMoE, WaitingMoEConfig, example_inputs
from rvdcomm.calibration import calibrate
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.plan import Overlap, Plan
from superscaler_core.plans import PLANS
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured

NUM_CHECKED = 3
"""Steps whose losses are compared before anything is timed; they are also the warm-up."""

NUM_CALLS = 200
"""Small calls that measure the overhead of a call (``_move_secs``)."""

METHODS = {"serial": Overlap(), "duplex": Overlap(duplex=True)}


def main(argv: list[str]) -> None:
    """Run both programs on this rank."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    topology = rv.Network.of(calibrate()[0]).nearest_levels
    sizes = WaitingMoEConfig(layers=config["layers"])
    torch.manual_seed(0)
    model = WaitingMoE(sizes)
    generator = torch.Generator().manual_seed(1)
    batches = [example_inputs(sizes, config["batch"], generator) for _ in range(NUM_CHECKED)]
    programs = {
        name: _compiled(sizes, model, config["batch"], overlap, topology)
        for name, overlap in METHODS.items()
    }
    profile = measured(
        list(programs.values()),
        op_secs=config["op_secs"],
        move_secs=_move_secs(topology),
        clock=time.perf_counter,
    )
    # Ops mostly wait, which needs no core, so the simulated ranks do not share cores.
    profile = replace(profile, num_cores=0)
    folder = Path(config["folder"])
    methods = {}
    for name, program in programs.items():
        trainer = loaded(program, model, folder / name)
        methods[name] = Method.of(trainer.step, trainer.parameters())
    samples = alternating(methods, batches, config["steps"])
    comm_secs = waiting_secs(methods["serial"], batches, config["steps"])
    if dist.get_rank() == 0:
        foretold = {name: predicted(one, profile, topology) for name, one in programs.items()}
        found = {"samples": samples, "comm_secs": comm_secs, "predicted": foretold}
        Path(argv[1]).write_text(json.dumps({**found, "topology": topology.to_json()}))
    dist.barrier()
    dist.destroy_process_group()


def _compiled(
    sizes: WaitingMoEConfig,
    model: nn.Module,
    batch: int,
    overlap: Overlap,
    topology: rv.Topology,
) -> Compiled:
    """The program of a whole batch; captured with half of the batch for duplex."""
    inputs = example_inputs(sizes, batch // overlap.num_halves, torch.Generator())
    plan = Plan(capture(model, inputs), range(dist.get_world_size()))
    PLANS["expert_parallel"](plan)
    plan.overlap = overlap
    return compile(plan, topology=topology, optimizer="momentum")


def _move_secs(topology: rv.Topology) -> float:
    """Overhead of a call besides its plan's time, in seconds: the median over small all-reduces."""
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


def predicted(
    compiled: Compiled, profile: DeviceProfile, topology: rv.Topology
) -> dict[str, float]:
    """Simulated seconds of a step without the update, seconds of waiting in it, and overlap."""
    found = simulate(compiled, profile, topology)
    waiting = found.communication_secs.values()
    return {
        "secs": found.secs - max(found.optimizer_secs.values()),
        "comm_secs": sum(waiting) / len(waiting),
        "hidden": found.overlap,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
