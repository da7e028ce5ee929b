"""One rank of the overlap benchmark; started by ``superscaler_overlap.py``.

    python -m bench.superscaler_overlap_worker CONFIG.json FOUND.json

Rank 0 writes samples of every method in seconds (the slowest rank of each step), the time that
ranks wait for communication in a step without overlap, and what the simulator predicts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rvdcomm as rv
from bench.superscaler_predict_worker import TIMEOUT, measured_move_secs
from bench.training_method import Method, alternating, waiting_secs
from rvdcomm.calibration import calibrate
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.models.gpt import GPT, GPTConfig, example_inputs
from superscaler_core.plan import Overlap, Plan
from superscaler_core.plans import PLANS
from superscaler_core.run.load import load
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured

NUM_CHECKED = 3
"""Steps whose losses are compared before anything is timed; they also warm up."""

PLAN_OF = {"dp": "data_parallel", "zero3": "zero3"}


def main(argv: list[str]) -> None:
    """Run all methods on this rank."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    topology, _ = calibrate()
    sizes = GPTConfig(**config["model"])
    torch.manual_seed(0)
    model = GPT(sizes)
    generator = torch.Generator().manual_seed(1)
    batches = [example_inputs(sizes, config["batch"], generator) for _ in range(NUM_CHECKED)]
    programs = {
        name: _compiled(config, name, model, batches[0], topology)
        for name in config["methods"]
        if name.removesuffix("+") in PLAN_OF
    }
    profile = measured(
        list(programs.values()),
        op_secs=config["op_secs"],
        move_secs=measured_move_secs(topology),
    )
    methods = {
        name: _ours(config, name, model, programs[name])
        if name in programs
        else _torchs(config, name, model)
        for name in config["methods"]
    }
    samples = alternating(methods, batches, config["steps"])
    comm_secs = {
        name: waiting_secs(methods[name], batches, config["steps"])
        for name in programs
        if not name.endswith("+")
    }
    if dist.get_rank() == 0:
        foretold = {name: predicted(one, profile, topology) for name, one in programs.items()}
        found = {"samples": samples, "comm_secs": comm_secs, "predicted": foretold}
        Path(argv[1]).write_text(json.dumps({**found, "topology": topology.to_json()}))
    dist.barrier()
    dist.destroy_process_group()


# --- methods ------------------------------------------------------------------------------------


def _compiled(
    config: Mapping[str, Any],
    name: str,
    model: GPT,
    batch: tuple[Tensor, Tensor],
    topology: rv.Topology,
) -> Compiled:
    plan = Plan(capture(model, batch), range(dist.get_world_size()))
    PLANS[PLAN_OF[name.removesuffix("+")]](plan)
    if name.endswith("+"):
        plan.overlap = Overlap(config["prefetch"], reductions=True, bucket_bytes=config["bucket"])
    return compile(plan, topology=topology, optimizer="momentum")


def _ours(config: Mapping[str, Any], name: str, model: GPT, compiled: Compiled) -> Method:
    """Collective: every rank compiles the same program, and the first writes it."""
    folder = Path(config["folder"], name)
    if dist.get_rank() == 0:
        compiled.save(folder)
    dist.barrier()
    trainer = load(folder)
    trainer.load_state_dict(model.state_dict())
    return Method.of(trainer.step, trainer.parameters())


def _torchs(config: Mapping[str, Any], name: str, model: GPT) -> Method:
    """DDP or FSDP2, of a copy of the model."""
    module: Any = deepcopy(model)
    if name == "fsdp":
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    else:
        options = {} if name == "ddp25" else {"bucket_cap_mb": config["bucket"] / (1 << 20)}
        module = DistributedDataParallel(module, **options)
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = module(tokens.chunk(size)[rank], targets.chunk(size)[rank])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Method.of(step, module.parameters())


# --- prediction ----------------------------------------------------------------------------------


def predicted(
    compiled: Compiled, profile: DeviceProfile, topology: rv.Topology
) -> dict[str, float]:
    """What the simulator says: seconds of a step without the optimizer, and of waiting in it."""
    found = simulate(compiled, profile, topology)
    waiting = found.communication_secs.values()
    return {
        "secs": found.secs - max(found.optimizer_secs.values()),
        "comm_secs": sum(waiting) / len(waiting),
        "hidden": found.overlap,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
